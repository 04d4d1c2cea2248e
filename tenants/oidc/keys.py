"""A provider's public keys, by key id: read in the background, fetched once when an id is new, trusted for a time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, JWKRegistry, Key, OKPKey, RSAKey

from core.clock import Clock
from core.errors import PlatformError
from core.logging import get_logger
from core.settings import Oidc
from tenants.oidc.errors import provider_unavailable, token_refused

KEYS_MAX = 64
RSA_MODULUS_MIN = 342  # base64 digits of 2048 bits
_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}

log = get_logger(__name__)


def public_keys(document: Mapping[str, Any]) -> list[Key]:
    """Return the signing keys of a JWKS; secret, short, unreadable ones and those for encryption are left out."""
    found: list[Key] = []
    entries = document.get("keys")
    for entry in entries[:KEYS_MAX] if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or entry.get("kty") not in {"RSA", "EC", "OKP"} or entry.get("use") == "enc":
            continue
        if entry["kty"] == "RSA" and len(str(entry.get("n", ""))) < RSA_MODULUS_MIN:
            continue
        try:
            found.append(JWKRegistry.import_key({name: value for name, value in entry.items() if name != "key_ops"}))
        except (JoseError, ValueError, TypeError, KeyError):
            continue
    return found


def suits(key: Key, algorithm: str) -> bool:
    """Say whether a key may have signed with `algorithm`: its kind, its curve and, if it names one, its own `alg`."""
    named = key.get("alg")
    if named is not None and named != algorithm:
        return False
    match key:
        case RSAKey():
            return algorithm[:2] in {"RS", "PS"}
        case ECKey():
            return _CURVES.get(algorithm) == key.curve_name
        case OKPKey():
            return algorithm in {"EdDSA", "Ed25519"} and key.curve_name == "Ed25519"
    return False


class KeyRing:
    """The keys of one issuer. `fetch` returns its JWKS."""

    def __init__(self, fetch: Callable[[], Awaitable[Mapping[str, Any]]], clock: Clock, settings: Oidc) -> None:
        self._fetch = fetch
        self._clock = clock
        self._settings = settings
        self._keys: list[Key] = []
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._flight: asyncio.Task[None] | None = None

    def peek(self, kid: str | None, algorithm: str) -> Key | None:
        """Return the key from memory; None when there is none, or when all are too old to be trusted.

        Without a key id there must be no choice: exactly one key that suits the algorithm.
        """
        if self._age_s() > self._settings.keys_trust_s:
            return None
        suiting = [key for key in self._keys if suits(key, algorithm) and kid in {None, key.get("kid")}]
        return suiting[0] if len(suiting) == 1 else None

    async def find(self, kid: str | None, algorithm: str) -> Key:
        """Return the key, after at most one fetch, which all who wait at the time share.

        Raises:
            PlatformError: INVALID_TOKEN for a key id that the provider does not have; IDENTITY_PROVIDER_UNAVAILABLE
                when its keys cannot be had.
        """
        key = self.peek(kid, algorithm)
        if key is None and (self._flight is not None or self._may_fetch()):
            await self.refresh()
            key = self.peek(kid, algorithm)
        if key is not None:
            return key
        if self._age_s() > self._settings.keys_trust_s:
            raise provider_unavailable("its keys are not known")
        raise token_refused("it is signed with a key that its issuer does not have")

    @property
    def due(self) -> bool:
        """Whether a fetch in the background is due."""
        return self._age_s() >= self._settings.keys_refresh_s and self._may_fetch()

    async def refresh(self) -> None:
        """Fetch the keys, once for all who ask meanwhile. A failure is logged; the keys stay as they were."""
        if self._flight is None:
            self._flight = asyncio.create_task(self._refresh())
        await asyncio.shield(self._flight)

    async def _refresh(self) -> None:
        self._tried_at = self._clock.monotonic()
        try:
            self._keys = public_keys(await self._fetch())
            self._fetched_at = self._clock.monotonic()
        except PlatformError as error:
            log.warning("provider_keys.unreadable", code=error.code)
        finally:
            self._flight = None

    def _may_fetch(self) -> bool:
        return self._tried_at is None or self._clock.monotonic() - self._tried_at >= self._settings.refetch_min_s

    def _age_s(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock.monotonic() - self._fetched_at

"""What a process knows of its providers: endpoints and keys, by issuer, over one HTTP session."""

from collections.abc import Mapping
from typing import Any

from core.clock import Clock
from core.errors import PlatformError
from core.settings import Oidc
from tenants.oidc.discovery import Metadata, discover
from tenants.oidc.fetch import Fetcher
from tenants.oidc.keys import KeyRing

ISSUERS_MAX = 256


class Clients:
    """One per process. Metadata is fetched when needed and kept for `keys_refresh_s`, as keys are."""

    def __init__(self, settings: Oidc, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.fetcher = Fetcher(settings)
        self._metadata: dict[str, tuple[float, Metadata]] = {}
        self._rings: dict[str, KeyRing] = {}

    async def metadata(self, issuer: str) -> Metadata:
        """Return the endpoints of `issuer`; with it away, the ones known before, while its keys are trusted.

        Raises:
            PlatformError: IDENTITY_PROVIDER_UNAVAILABLE or IDENTITY_PROVIDER_INVALID.
        """
        now = self.clock.monotonic()
        at, known = self._metadata.get(issuer, (0.0, None))
        if known is not None and now - at < self.settings.keys_refresh_s:
            return known
        try:
            found = await discover(self.fetcher, issuer)
        except PlatformError:
            if known is None or now - at > self.settings.keys_trust_s:
                raise
            return known
        if len(self._metadata) >= ISSUERS_MAX:
            self._metadata.clear()
        self._metadata[issuer] = (now, found)
        return found

    async def logout_endpoint(self, issuer: str) -> str:
        """Return where `issuer` signs people out; empty when it offers no such place, or does not answer."""
        try:
            return (await self.metadata(issuer)).end_session_endpoint
        except PlatformError:
            return ""

    def keys(self, issuer: str) -> KeyRing:
        """Return the keys of `issuer`, a configured one."""
        ring = self._rings.get(issuer)
        if ring is None:
            if len(self._rings) >= ISSUERS_MAX:
                self._rings.clear()
            ring = self._rings[issuer] = KeyRing(lambda: self._jwks(issuer), self.clock, self.settings)
        return ring

    async def close(self) -> None:
        await self.fetcher.close()

    async def _jwks(self, issuer: str) -> Mapping[str, Any]:
        metadata = await self.metadata(issuer)
        return await self.fetcher.get_json(metadata.jwks_uri)

"""HTTP to identity providers, and to nothing else by their word: https, no redirect followed, bounded in time and size.

An address that a provider's name resolves to is looked at before it is called: this machine itself and link-local
addresses, where clouds keep their credentials, are refused. Private networks are allowed: many providers live there.
"""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult

from core.settings import Oidc
from tenants.oidc.errors import provider_invalid, provider_unavailable

ANSWER_MAX_BYTES = 512 * 1024
CONNECTIONS_MAX = 32
URL_MAX = 2048
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_CLOUD_METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("169.254.169.254")})


def address_allowed(text: str, *, loopback: bool) -> bool:
    """Say whether an IP address may be called for a provider."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_loopback:
        return loopback
    return not (address.is_link_local or address.is_multicast or address.is_unspecified or address in _CLOUD_METADATA)


def check_url(url: str, *, loopback: bool) -> None:
    """Refuse what is no https address of another host; plain http only on loopback, when settings allow that.

    Raises:
        PlatformError: IDENTITY_PROVIDER_INVALID.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise provider_invalid("an address in it is malformed") from None
    local = host in _LOOPBACK_NAMES
    if not host or len(url) > URL_MAX or parts.username is not None or parts.fragment:
        raise provider_invalid("an address in it is malformed")
    if parts.scheme != "https" and not (parts.scheme == "http" and local and loopback):
        raise provider_invalid("an address in it is not https")
    try:
        literal = address_allowed(host, loopback=loopback)
    except ValueError:
        literal = not local or loopback
    if not literal:
        raise provider_invalid("an address in it is not a provider's")


class _GuardedResolver(AbstractResolver):
    """The system's resolver, without the answers that no provider may have."""

    def __init__(self, *, loopback: bool) -> None:
        self._inner = aiohttp.ThreadedResolver()
        self._loopback = loopback

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        allowed = [result for result in found if address_allowed(result["host"], loopback=self._loopback)]
        if not allowed:
            raise OSError("the name resolves to no address that may be called")
        return allowed

    async def close(self) -> None:
        await self._inner.close()


class Fetcher:
    """One aiohttp session to all providers of a process; opened at the first call, on the loop that calls."""

    def __init__(self, settings: Oidc) -> None:
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def get_json(self, url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON object at `url`.

        Raises:
            PlatformError: IDENTITY_PROVIDER_UNAVAILABLE without an answer in time, or with a 5xx or 429;
                IDENTITY_PROVIDER_INVALID with any other answer but a JSON object under 200.
        """
        status, body = await self._call("GET", url, headers or {}, None)
        if status != 200:
            raise provider_invalid(f"it answered {status}")
        return body

    async def post_form(
        self, url: str, form: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON object of a form's answer; raises as `get_json`, but for 4xx answers in JSON."""
        return await self._call("POST", url, headers, form)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _session_now(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = _GuardedResolver(loopback=self.settings.allow_loopback)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver, limit=CONNECTIONS_MAX, use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=self.settings.fetch_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_field_size=8192,
            )
        return self._session

    async def _call(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None
    ) -> tuple[int, dict[str, Any]]:
        check_url(url, loopback=self.settings.allow_loopback)
        try:
            async with self._session_now().request(
                method, url, headers={"Accept": "application/json", **headers}, data=form, allow_redirects=False
            ) as answer:
                body = await _bounded(answer)
                status = answer.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise provider_unavailable(type(error).__name__) from error
        if status >= 500 or status == 429:
            raise provider_unavailable(f"it answered {status}")
        if 300 <= status < 400:
            raise provider_invalid("it redirects, which is not followed")
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise provider_invalid(f"it answered {status} without JSON") from None
        if not isinstance(value, dict):
            raise provider_invalid("it answered with no JSON object")
        return status, value


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_chunked(65_536):
        body += chunk
        if len(body) > ANSWER_MAX_BYTES:
            raise provider_invalid(f"it is larger than {ANSWER_MAX_BYTES:,} bytes")
    return bytes(body)

"""A hub that speaks Hugging Face's HTTP API: which files a repository has, and their bytes.

Only the configured host is called, and for files the hosts that the settings name beside it: a redirect elsewhere is
refused, and the hub's token goes to the hub itself alone. Every answer is bounded.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote, urljoin, urlsplit

import aiohttp
import msgspec

from catalog.registry.errors import invalid
from catalog.registry.store import CHUNK_BYTES
from core.errors import ErrorKind, PlatformError
from core.settings import Registry

ANSWER_MAX_BYTES = 16 * 1024 * 1024
REDIRECTS_MAX = 5
TRIES_MAX = 5  # without a byte more
CALLS_MAX = 1000  # for one file
CONNECT_S, SILENCE_S = 10.0, 60.0
RETRY_S = 0.1  # doubled with each try
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


class _Lfs(msgspec.Struct, frozen=True):
    sha256: str = ""
    size: int = 0


class _Sibling(msgspec.Struct, frozen=True):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Card(msgspec.Struct, frozen=True):
    license: str | list[str] | None = None


class _Repository(msgspec.Struct, frozen=True):
    sha: str
    siblings: list[_Sibling]
    cardData: _Card | None = None  # noqa: N815 - the hub's word


class HubFile(msgspec.Struct, frozen=True):
    """A file of a repository; `sha256` is empty where the hub does not say it (small files kept in git)."""

    path: str
    size_bytes: int
    sha256: str


class HubListing(msgspec.Struct, frozen=True):
    """A repository at one commit."""

    commit: str
    licence: str
    files: list[HubFile]


def check_repository(location: str, revision: str, settings: Registry) -> None:
    """Refuse what is no repository's name, and everything when no hub is set.

    Raises:
        PlatformError: kind invalid.
    """
    if not settings.hub_url:
        raise invalid("No hub is set. Name one in TIDEGATE_REGISTRY__HUB_URL, e.g. https://hub.example.", "source")
    if not _REPOSITORY.fullmatch(location) or ".." in location:
        raise invalid("A repository of the hub is written owner/name.", "source")
    if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise invalid("A revision is a branch, a tag or a commit, without slashes.", "source")


class Hub:
    """One repository at the configured hub."""

    def __init__(self, settings: Registry, repository: str) -> None:
        self._settings = settings
        self._repository = repository
        self._base = settings.hub_url.rstrip("/")

    async def listing(self, revision: str) -> HubListing:
        """Return the files at a revision, pinned to its commit.

        Raises:
            PlatformError: kind invalid when the hub does not have it or does not give it, upstream when it cannot be
                asked.
        """
        url = f"{self._base}/api/models/{self._repository}/revision/{quote(revision or 'main', safe='')}?blobs=true"
        async with self._session() as session, self._get(session, url, {}) as answer:
            body = bytearray()
            async for piece in answer.content.iter_chunked(65_536):
                body += piece
                if len(body) > ANSWER_MAX_BYTES:
                    raise invalid(f"The hub's answer has more than {ANSWER_MAX_BYTES:,} bytes.", "source")
        try:
            found = msgspec.json.decode(bytes(body), type=_Repository)
        except msgspec.MsgspecError:
            raise _upstream("the hub's answer cannot be read") from None
        if not _COMMIT.fullmatch(found.sha):
            raise _upstream("the hub does not say which commit this is")
        licence = found.cardData.license if found.cardData is not None else None
        return HubListing(
            found.sha, licence[:100] if isinstance(licence, str) else "", [_file(s) for s in found.siblings]
        )

    async def read(self, commit: str, path: str, size_bytes: int) -> AsyncIterator[bytes]:
        """Yield a file; where the connection breaks, it goes on from there."""
        url = f"{self._base}/{self._repository}/resolve/{commit}/{quote(path)}"
        seen, tries, calls = 0, 0, 0
        async with self._session() as session:
            while seen < size_bytes:
                why, before = "it ended early", seen
                try:
                    async with self._get(session, url, {"Range": f"bytes={seen}-"} if seen else {}) as answer:
                        skip = seen if answer.status == 200 else 0
                        async for piece in answer.content.iter_chunked(CHUNK_BYTES):
                            fresh = piece[skip:]
                            skip = max(0, skip - len(piece))
                            seen += len(fresh)
                            if fresh:
                                yield fresh
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    why = f"it broke off ({type(error).__name__})"
                calls += 1
                tries = 0 if seen > before else tries + 1
                if seen < size_bytes:
                    if tries >= TRIES_MAX or calls >= CALLS_MAX:
                        raise _upstream(why)
                    await asyncio.sleep(RETRY_S * 2**tries)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        async with aiohttp.ClientSession(timeout=limits, cookie_jar=aiohttp.DummyCookieJar()) as session:
            yield session

    @asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Follow redirects to hosts that are allowed, and to no others."""
        for _ in range(REDIRECTS_MAX + 1):
            own = _origin(url) == _origin(self._base)
            if not own and not self._may_call(url):
                named = str(_origin(url)[1])[:100]
                why = f"The hub sends us to {named!r}, which is not in TIDEGATE_REGISTRY__HUB_FILE_HOSTS."
                raise invalid(why, "source")
            sent = {"Accept-Encoding": "identity", **headers}
            token = self._settings.hub_token.get_secret_value()
            if own and token:
                sent["Authorization"] = f"Bearer {token}"
            async with session.get(url, headers=sent, allow_redirects=False) as answer:
                if answer.status in {301, 302, 303, 307, 308}:
                    url = urljoin(url, answer.headers.get("Location", ""))
                    continue
                _check_status(answer.status)
                yield answer
                return
        raise invalid("The hub redirects in circles.", "source")

    def _may_call(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            return False
        plain_too = self._base.startswith("http://")
        named = f"{host}:{parts.port}" if parts.port else host
        return bool(
            (parts.scheme == "https" or (plain_too and parts.scheme == "http"))
            and parts.username is None
            and named in self._settings.hub_file_hosts
        )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "", None, None
    return parts.scheme, parts.hostname, port


def _check_status(status: int) -> None:
    if status in {401, 403}:
        raise invalid("The hub does not give this repository to us. Set TIDEGATE_REGISTRY__HUB_TOKEN.", "source")
    if status in {404, 410}:
        raise invalid("The hub has no such repository, revision or file.", "source")
    if status not in {200, 206}:
        raise _upstream(f"the hub answered {status}")


def _file(found: _Sibling) -> HubFile:
    if found.lfs is not None:
        return HubFile(found.rfilename, found.lfs.size or found.size or 0, found.lfs.sha256)
    return HubFile(found.rfilename, found.size or 0, "")


def _upstream(why: str) -> PlatformError:
    return PlatformError("HUB_UNAVAILABLE", ErrorKind.UPSTREAM, f"The hub cannot be read now: {why}.")

"""`tidegate model upload`: sends weights to an installation, from any host; a run that was cut goes on where it was."""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from cli import home as homes
from cli import installation, screen
from cli.models import weights_in
from core.errors import ErrorKind, PlatformError

ADMIN = "/api/v1/admin"
TRIES_MAX = 8
RETRY_S = 0.2  # doubled with each try
CHUNK_BYTES = 4 * 1024 * 1024
PAGES_MAX = 100


def upload(given: argparse.Namespace) -> int:
    """Send a file or folder as a new version; 1 when it was refused."""
    url, token = _where(given)
    try:
        return asyncio.run(_upload(given, url.rstrip("/"), token))
    except aiohttp.ClientError as error:
        screen.say(f"The installation at {url} could not be reached ({type(error).__name__}). Run this again to go on.")
        return 1


def _where(given: argparse.Namespace) -> tuple[str, str]:
    token = os.environ.get("TIDEGATE_TOKEN", "")
    if given.url and token:
        return given.url, token
    home = homes.existing_home(given.home)
    secrets = homes.load_secrets(home, installation.refuse)
    return given.url or homes.load_state(home).base_url, token or secrets.operator_token


async def _upload(given: argparse.Namespace, url: str, token: str) -> int:
    files = weights_in(given.path)
    listed = [{"path": path, "size_bytes": file.stat().st_size, "sha256": _hash(file)} for path, file in files.items()]
    async with _api(url, token) as api:
        model_id = await api.model(given.model)
        intake = await api.going(model_id, listed) or await api.call(
            "POST",
            f"{ADMIN}/registry/uploads",
            json={
                "model_id": model_id,
                "number": given.number,
                "licence": given.licence,
                "context_max": given.context_max,
                "make_current": given.make_current,
                "note": given.note,
                "files": listed,
            },
        )
        path = f"{ADMIN}/registry/intakes/{intake['id']}"
        for file in intake["files"]:
            await _send(api, path, file, files[file["path"]], intake["part_bytes"])
        await api.call("POST", f"{path}/complete")
        return await _follow(api, path)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


class _Api:
    """The installation's API, asked again where a connection breaks."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Return an answer.

        Raises:
            PlatformError: with the code of the answer when it refuses.
            aiohttp.ClientError: it could not be reached, again and again.
        """
        for left in reversed(range(TRIES_MAX)):
            try:
                async with self._session.request(method, path, **options) as answer:
                    found: dict[str, Any] = await answer.json(content_type=None)
                    if answer.status < 400:
                        return found
                    if answer.status < 500 or not left:
                        extra = {name: found[name] for name in ("received_bytes",) if name in found}
                        raise PlatformError(found["code"], ErrorKind.INVALID, found["detail"], fields=extra)
            except aiohttp.ClientError:
                if not left:
                    raise
            await asyncio.sleep(RETRY_S * 2 ** (TRIES_MAX - 1 - left))
        raise AssertionError

    async def pages(self, path: str) -> AsyncIterator[dict[str, Any]]:
        after: str | None = ""
        for _ in range(PAGES_MAX):
            page = await self.call("GET", path, params={"limit": 100, **({"after": after} if after else {})})
            for item in page["items"]:
                yield item
            after = page["next_after"]
            if not after:
                return

    async def model(self, name: str) -> str:
        """Return the id of a model, made when there is none of this name."""
        async for model in self.pages(f"{ADMIN}/models"):
            if model["name"] == name:
                return str(model["id"])
        return str((await self.call("POST", f"{ADMIN}/models", json={"name": name}))["id"])

    async def going(self, model_id: str, listed: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the upload of these files that an earlier run opened."""
        async for intake in self.pages(f"{ADMIN}/registry/intakes"):
            if intake["model_id"] == model_id and intake["kind"] == "upload" and intake["state"] == "receiving":
                found = await self.call("GET", f"{ADMIN}/registry/intakes/{intake['id']}")
                names = ("path", "size_bytes", "sha256")
                if [{name: file[name] for name in names} for file in found["files"]] == listed:
                    screen.say(f"Going on with {intake['id']}.")
                    return found
        return None


@asynccontextmanager
async def _api(url: str, token: str) -> AsyncIterator[_Api]:
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers, timeout=limits) as session:
        yield _Api(session)


def _parts(path: Path, start: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        file.seek(start)
        while part := file.read(part_bytes):
            yield start, part
            start += len(part)


async def _send(api: _Api, path: str, file: Mapping[str, Any], local: Path, part_bytes: int) -> None:
    """Send what is missing of a file; a part that arrived although its answer did not is not sent again."""
    received = int(file["received_bytes"])
    while received < file["size_bytes"]:
        try:
            for start, part in _parts(local, received, part_bytes):
                headers = {"X-Part-Sha256": hashlib.sha256(part).hexdigest()}
                target = f"{path}/files/{file['no']}"
                sent = await api.call("PUT", target, data=part, params={"offset": start}, headers=headers)
                received = int(sent["received_bytes"])
                _say(f"{file['path']}  {screen.size(received)} of {screen.size(file['size_bytes'])}")
        except PlatformError as error:
            if error.code != "OFFSET_WRONG" or error.fields["received_bytes"] <= received:
                raise
            received = int(error.fields["received_bytes"])


async def _follow(api: _Api, path: str) -> int:
    """Wait until the version is there; 1 when it was refused."""
    while True:
        intake = await api.call("GET", path)
        _say(f"{intake['state']}  {screen.size(intake['done_bytes'])} of {screen.size(intake['size_bytes'])}")
        if intake["state"] not in {"receiving", "planning", "moving"}:
            break
        await asyncio.sleep(0.5)
    if intake["state"] != "done":
        screen.say(f"{intake['state']}: {intake['error']}")
        return 1
    version = await api.call("GET", f"{ADMIN}/model-versions/{intake['version_id']}")
    screen.say(version["reference"])
    return 0


def _say(text: str) -> None:
    """Progress goes to standard error, so that the reference alone is the output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()

"""A real S3 server, run as a program, and a hub that answers as the real one does."""

import asyncio
import hashlib
import http.client
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from cli.embedded.postgres import free_port

WEED = Path(sysconfig.get_path("scripts")) / "weed"
ACCESS, SECRET = "tidegate-test", "tidegate-test-secret"
START_S = 60
_CONFIG = (
    '{"identities":[{"name":"t","credentials":[{"accessKey":"%s","secretKey":"%s"}],'
    '"actions":["Admin","Read","Write","List","Tagging"]}]}'
)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run SeaweedFS with its S3 side; yields its address. Nothing of it calls out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "s3.json").write_text(_CONFIG % (ACCESS, SECRET))
    ports = [free_port() for _ in range(4)]
    names = ("master", "volume", "filer", "s3")
    given = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=True)]
    given += [f"-{name}.port.grpc={free_port()}" for name in names]
    given += ["-master.telemetry=false", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=64"]
    given += ["-volume.max=60", "-s3", f"-s3.config={folder / 's3.json'}", f"-dir={folder}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(WEED), "server", *given], stdout=log, stderr=log, cwd=folder)
    try:
        url = f"http://127.0.0.1:{ports[3]}"
        _wait(url, process, folder / "log")
        yield url
    finally:
        process.kill()  # nothing of it is kept
        process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("GET", "/")
            connection.getresponse().read()
            connection.close()
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(log.read_text()[-3000:])


@dataclass
class FakeHub:
    """What a hub of Hugging Face's kind answers for one repository, and what it was asked."""

    contents: dict[str, bytes]
    lfs: frozenset[str] = frozenset()
    commit: str = "c0ffee" + "0" * 34
    licence: str = "apache-2.0"
    breaks_after: int | None = None  # each answer with a file ends after so many bytes
    files_at: str = ""  # another origin that files are at
    token: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)  # path, and what came as Authorization
    ranges: list[str] = field(default_factory=list)

    async def info(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "gated"}, status=401)
        siblings = []
        for path, content in self.contents.items():
            found: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": "0" * 40}
            if path in self.lfs:
                sha256 = hashlib.sha256(content).hexdigest()
                found["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(found)
        card = {"license": self.licence, "tags": ["x"]}
        return web.json_response({"id": "org/tide", "sha": self.commit, "siblings": siblings, "cardData": card})

    async def file(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        if request.match_info["commit"] != self.commit or path not in self.contents:
            return web.Response(status=404)
        if self.files_at and path in self.lfs:
            return web.Response(status=302, headers={"Location": f"{self.files_at}/cdn/{path}?signed=1"})
        return await self._send(request, self.contents[path])

    async def cdn(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        return await self._send(request, self.contents[request.match_info["path"]])

    async def _send(self, request: web.Request, content: bytes) -> web.StreamResponse:
        wanted = request.headers.get("Range", "")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        answer = web.StreamResponse(status=206 if wanted else 200)
        answer.content_length = len(content) - start
        await answer.prepare(request)
        part = content[start:] if self.breaks_after is None else content[start : start + self.breaks_after]
        await answer.write(part)
        if len(part) < len(content) - start and request.transport is not None:
            request.transport.close()  # in the middle of the body
            await asyncio.sleep(0)
        return answer


@contextmanager
def _app(hub: FakeHub) -> Iterator[web.Application]:
    app = web.Application()
    app.router.add_get("/api/models/org/tide/revision/{revision}", hub.info)
    app.router.add_get("/org/tide/resolve/{commit}/{path:.+}", hub.file)
    app.router.add_get("/cdn/{path:.+}", hub.cdn)
    yield app


async def serve(hub: FakeHub) -> tuple[web.AppRunner, str]:
    """Serve on a free loopback port; returns what to clean up, and the address."""
    with _app(hub) as app:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return runner, f"http://127.0.0.1:{port}"

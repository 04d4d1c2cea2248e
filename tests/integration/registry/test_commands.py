"""`tidegate model`: on the host, and an upload over a connection that is cut again and again."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from api.app import create_app, open_services
from catalog.registry import intakes, versions, work
from catalog.registry.types import IntakeState
from cli import main, model_upload
from core import db
from core.clock import SystemClock
from core.settings import Settings
from tests.conftest import PostgresService
from tests.factories import registry as make
from tests.factories.tenants import PEPPER, operator

GGUF = make.gguf(filling=bytes(range(200)) * 10)


@pytest.fixture
def home(postgres: PostgresService, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose database the environment names."""
    for name, value in {
        "DATABASE__URL": postgres.url("app", database),
        "VALKEY__URL": "unix:///none",
        "VALKEY__BROKER_URL": "unix:///none",
        **{f"SECRETS__{name.upper()}": value for name, value in make.KEYS.items()},
    }.items():
        monkeypatch.setenv(f"TIDEGATE_{name}", value)
    return tmp_path


def run(home: Path, *arguments: str) -> int:
    return main.main(["model", *arguments, "--home", str(home)])


def test_a_version_is_imported_shown_checked_deprecated_and_taken_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "in"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(GGUF)
    assert run(home, "list") == 0
    assert capsys.readouterr().out == "No versions.\n"
    assert run(home, "import", "tide", str(folder), "--licence", "MIT") == 0
    reference = capsys.readouterr().out.splitlines()[-1]
    assert reference.startswith("tide@1:")
    for version in (reference, "tide@1"):
        assert run(home, "show", version) == 0
        shown = capsys.readouterr().out
        assert f"reference                {reference}" in shown
        assert "authentic" in shown
        assert "kv_bytes_per_token       256" in shown
    assert run(home, "show", "tide@1", "--manifest") == 0
    assert json.loads(capsys.readouterr().out)["licence"] == "MIT"
    assert run(home, "verify", "tide@1") == 0
    assert run(home, "deprecate", "tide@1", "--at", "2020-01-01", "--note", "use tide@2") == 0
    assert "DEPRECATED since 2020-01-01 use tide@2" in capsys.readouterr().out
    assert run(home, "deprecate", "tide@1", "--withdraw") == 0
    assert run(home, "gc") == 0
    assert f"keep    {reference}: it is younger than 7 days" in capsys.readouterr().out
    assert run(home, "show", "tide@2") == 1
    assert run(home, "show", f"tide@1:{'ab' * 32}") == 1
    (stored,) = (home / "objects").rglob("m.gguf")
    stored.write_bytes(b"x" * len(GGUF))
    assert run(home, "verify", reference) == 1
    assert run(home, "list") == 0
    assert "DAMAGED" in capsys.readouterr().out


def test_what_cannot_be_imported_says_why(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "in").mkdir()
    (home / "in" / "m.gguf").write_bytes(b"GGUF of another kind")
    told = {str(home / "in"): "no usable GGUF", str(home / "no"): "no such folder", "hub:a/b": "No hub is set"}
    for source, why in told.items():
        assert run(home, "import", "tide", source) == 1
        printed = capsys.readouterr()
        assert why in printed.out + printed.err


@asynccontextmanager
async def cutting(port: int, after_bytes: int) -> AsyncIterator[int]:
    """A way to a port on which every connection is cut after so many bytes towards it; yields its own port."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
        left = most
        while piece := await reader.read(65_536):
            if left is not None:
                piece, left = piece[:left], left - len(piece)
            writer.write(piece)
            await writer.drain()
            if left is not None and left <= 0:
                return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_upstream = await asyncio.open_connection("127.0.0.1", port)
        ways = {
            asyncio.create_task(pump(reader, to_upstream, after_bytes)),
            asyncio.create_task(pump(upstream, writer, None)),
        }
        tasks.update(ways)
        _, pending = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in pending:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        tasks.difference_update(ways)
        for each in (writer, to_upstream):
            each.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    for task in tasks:
        task.cancel()


async def test_an_upload_over_a_connection_that_is_cut_again_and_again_arrives(
    sessions: db.Sessions, settings: Settings, tmp_path: Path
) -> None:
    _, token = await operator(sessions)
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    given = argparse.Namespace(
        path=path, model="tide", number=0, licence="", context_max=0, make_current=True, note="", home=tmp_path
    )
    async with open_services(settings) as services:
        config = uvicorn.Config(create_app(services), port=0, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with cutting(port, 2777) as cut:
            sending = asyncio.create_task(model_upload._upload(given, f"http://127.0.0.1:{cut}", token))
            await _work_when_complete(services.settings, sessions)
            assert await sending == 0
        server.should_exit = True
        await running
    async with db.transaction(sessions) as session:
        (made,) = await versions.list_all(session)
    assert made.size_bytes == len(GGUF)


async def _work_when_complete(settings: Settings, sessions: db.Sessions) -> None:
    """Be the worker."""
    desk = work.open_desk(settings, sessions, SystemClock())
    while True:
        async with db.transaction(sessions) as session:
            found = await intakes.list_all(session)
        if found and found[0].state is IntakeState.MOVING:
            await make.worked(desk, found[0].id)
            return
        await asyncio.sleep(0.02)


@pytest.fixture
def settings(database_settings: object, valkey: Path, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": {**make.KEYS, "pepper": PEPPER.hex()},
            "database": database_settings,
            "valkey": {"url": f"unix://{valkey}", "broker_url": f"unix://{valkey}?db=1"},
            "registry": {"part_bytes": make.PART},
        }
    )

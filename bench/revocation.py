"""How soon every gateway obeys: four of them, a probe from outside, and every way in which a key loses its rights.

`python -m bench.revocation PROBE [--trials 200]`, where PROBE is a program with a command `revoke` that takes `--url`,
`--make COMMAND` (prints a fresh key), `--revoke COMMAND` (ends ``{key}``) and `--trials`, and prints JSON. Here the
commands ask this process, which makes tenants, owners and keys and ends them in turn. Every second change is written
without a notice, so that only the look that gateways take each quarter of a second finds it. Meanwhile callers of
another key keep every gateway busy.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aiohttp
import psycopg
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from bench import machine
from cli.embedded import postgres as pg
from cli.embedded import valkey as vk
from core import db
from core.clock import SystemClock
from core.money import Currency
from core.settings import Database
from tenants import api_keys, members, people, person_status, projects, service_accounts, tenants
from tenants.roles import Rights
from tenants.types import KeyOwner, PersonStatus, Role, Status

GATEWAYS = 4
LOAD_CALLERS = 8
LOAD_PAUSE_S = 0.01
KINDS = ("key", "suspended key", "person", "member", "service account", "project", "tenant")
ENDINGS = [(kind, silent) for silent in (False, True) for kind in KINDS]
DATABASE = "tidegate"
OWNER = Rights(frozenset({Role.OWNER}))
MUTE = (
    "CREATE SCHEMA muted",
    "CREATE FUNCTION muted.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT'",
    "GRANT USAGE ON SCHEMA muted TO tidegate_app",
)
ASK = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
    "s.sendall((' '.join(sys.argv[2:]) + '\\n').encode()); print(s.makefile().read().strip())"
)


@dataclass
class Made:
    """What one trial made."""

    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    owner_id: UUID
    member_id: UUID
    kind: str
    silent: bool


@dataclass
class Hand:
    """Makes keys and ends them, for the probe's commands."""

    sessions: db.Sessions
    pepper: bytes
    made: dict[str, Made] = field(default_factory=dict)
    kinds: "cycle[tuple[str, bool]]" = field(default_factory=lambda: cycle(ENDINGS))
    done: list[tuple[str, bool]] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        command, _, key = (await reader.readline()).decode().strip().partition(" ")
        writer.write((await self.make() if command == "make" else await self.end(key)).encode())
        writer.close()

    async def make(self) -> str:
        kind, silent = next(self.kinds)
        async with db.transaction(self.sessions) as session:
            tenant = await tenants.create(session, name=uuid4().hex, currency=Currency.USD)
            project = await projects.create(session, tenant.id, name="main")
            if kind == "service account":
                account = await service_accounts.create(
                    session, tenant.id, project.id, name="robot", role=Role.DEVELOPER, by=OWNER
                )
                owner = KeyOwner(service_account_id=account.id)
                member_id = account.id
            else:
                person = await people.create(session, email=f"{uuid4().hex}@example.com")
                member_id = (await members.add(session, tenant.id, person.id, Role.DEVELOPER)).id
                owner = KeyOwner(person_id=person.id)
            key, secret = await api_keys.create(
                session, tenant.id, project.id, name="key", pepper=self.pepper, owner=owner
            )
        owner_id = owner.person_id or owner.service_account_id or tenant.id
        self.made[secret] = Made(tenant.id, project.id, key.id, owner_id, member_id, kind, silent)
        return secret

    async def end(self, secret: str) -> str:
        made = self.made.pop(secret)
        async with db.transaction(self.sessions) as session:
            if made.silent:
                await session.execute(text("SET LOCAL search_path = muted, public, pg_catalog"))
            await _end(session, made)
        self.done.append((made.kind, made.silent))
        return "ended"


async def _end(session: AsyncSession, made: Made) -> None:
    clock = SystemClock()
    if made.kind == "key":
        await api_keys.revoke(session, made.tenant_id, made.key_id, clock=clock)
    elif made.kind == "suspended key":
        await api_keys.set_status(session, made.tenant_id, made.key_id, Status.SUSPENDED, clock=clock)
    elif made.kind == "project":
        await projects.suspend(session, made.tenant_id, made.project_id)
    elif made.kind == "tenant":
        await tenants.suspend(session, made.tenant_id)
    elif made.kind == "service account":
        await service_accounts.change(session, made.tenant_id, made.owner_id, by=OWNER, status=PersonStatus.SUSPENDED)
    elif made.kind == "person":
        await person_status.suspend(session, made.owner_id, now=clock.now())
    else:
        await members.change(
            session, made.tenant_id, made.member_id, by=OWNER, now=clock.now(), status=Status.SUSPENDED
        )


# ---- the platform under test


def _environment(files: pg.PostgresFiles, port: int, valkey: Path, home: Path, pepper: str) -> dict[str, str]:
    return {
        "TIDEGATE_HOME": str(home),
        "TIDEGATE_SECRETS__PEPPER": pepper,
        "TIDEGATE_SECRETS__SIGNING": secrets.token_hex(32),
        "TIDEGATE_SECRETS__SEALING": secrets.token_hex(32),
        "TIDEGATE_DATABASE__URL": pg.url(files, port, "app", DATABASE),
        "TIDEGATE_VALKEY__URL": f"unix://{valkey}",
        "TIDEGATE_VALKEY__BROKER_URL": f"unix://{valkey}?db=1",
        "TIDEGATE_GATEWAY__METRICS_TOKEN": secrets.token_hex(32),
        "TIDEGATE_LOG__LEVEL": "warning",
    }


def _create_database(files: pg.PostgresFiles, port: int) -> None:
    with psycopg.connect(pg.url(files, port, "owner", "postgres"), autocommit=True) as connection:
        role = sql.SQL("CREATE ROLE tidegate_app LOGIN PASSWORD {}").format(sql.Literal(files.app_password))
        connection.execute(role)
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    db.migrate(pg.url(files, port, "owner", DATABASE))
    with psycopg.connect(pg.url(files, port, "owner", DATABASE), autocommit=True) as connection:
        for statement in MUTE:
            connection.execute(statement)


@contextlib.contextmanager
def platform(folder: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Start Postgres, Valkey and the gateways; yield their environment and the gateways' addresses."""
    folder.chmod(0o755)
    files = pg.PostgresFiles(folder / "postgres", secrets.token_hex(16), secrets.token_hex(16), folder / "pg")
    pg.initialise(files)
    port, started = pg.free_port(), []
    postgres = pg.start(files, port)
    started.append(postgres)
    try:
        pg.wait_ready(files, port, lambda: postgres.poll() is None)
        _create_database(files, port)
        valkey = vk.start(folder / "valkey", folder / "valkey.sock")
        started.append(valkey)
        vk.wait_ready(folder / "valkey", folder / "valkey.sock", lambda: valkey.poll() is None)
        shared = _environment(files, port, folder / "valkey.sock", folder, secrets.token_hex(32))
        ports = [pg.free_port() for _ in range(GATEWAYS)]
        for number, own in enumerate(ports):
            settings = {"TIDEGATE_GATEWAY__PORT": str(own), "TIDEGATE_GATEWAY__REPLICA_ID": f"g{number}"}
            with (folder / f"g{number}.log").open("wb") as log:
                command = [sys.executable, "-m", "cli.main", "gateway"]
                started.append(subprocess.Popen(command, env=os.environ | shared | settings, stdout=log, stderr=log))
        yield shared, [f"http://127.0.0.1:{own}" for own in ports]
    finally:
        for process in reversed(started):
            machine.end(process)


async def _ready(urls: Sequence[str]) -> None:
    async with aiohttp.ClientSession() as client:
        for url in urls:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"{url}/ready") as answer:
                        if answer.status == HTTPStatus.OK:
                            break
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def load(urls: Sequence[str], key: str) -> AsyncIterator[list[int]]:
    """Keep every gateway busy with a key that lives; the statuses it met are in the list."""
    met: list[int] = []

    async def call(client: aiohttp.ClientSession, turns: "cycle[str]") -> None:
        while True:
            async with client.get(f"{next(turns)}/v1/models") as answer:
                met.append(answer.status)
            await asyncio.sleep(LOAD_PAUSE_S)

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        tasks = [asyncio.create_task(call(client, cycle(urls))) for _ in range(LOAD_CALLERS)]
        try:
            yield met
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def probe(program: Path, urls: Sequence[str], port: int, trials: int) -> dict[str, Any]:
    """Run the probe; return what it reports."""
    asked = shlex.join([sys.executable, "-S", "-c", ASK, str(port)])
    command = [sys.executable, str(program), "revoke", "--make", f"{asked} make", "--revoke", f"{asked} end {{key}}"]
    addresses = [part for url in urls for part in ("--url", url)]
    process = await asyncio.create_subprocess_exec(
        *command, "--trials", str(trials), "--settle-s", "0.5", *addresses, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    found: dict[str, Any] = json.loads(output)
    return found


def _delays(texts: Sequence[str]) -> list[float]:
    """The longest delay from a change to obeying it, by each gateway's own measure."""
    names = "tidegate_gateway_config_delay_max_seconds "
    return [float(line.removeprefix(names)) for text_ in texts for line in text_.splitlines() if line.startswith(names)]


async def measure(program: Path, trials: int, shared: dict[str, str], urls: Sequence[str]) -> dict[str, Any]:
    engine = db.create_engine(Database.model_validate({"url": shared["TIDEGATE_DATABASE__URL"]}))
    hand = Hand(db.create_sessions(engine), bytes.fromhex(shared["TIDEGATE_SECRETS__PEPPER"]))
    server = await asyncio.start_server(hand.answer, "127.0.0.1", 0)
    try:
        await _ready(urls)
        living = await hand.make()
        hand.kinds = cycle(ENDINGS)
        await asyncio.sleep(1)
        async with load(urls, living) as met:
            began = time.monotonic()
            report = await probe(program, urls, server.sockets[0].getsockname()[1], trials)
            took_s = time.monotonic() - began
        token = shared["TIDEGATE_GATEWAY__METRICS_TOKEN"]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as client:
            texts = [await (await client.get(f"{url}/metrics")).text() for url in urls]
    finally:
        server.close()
        await engine.dispose()
    worst: dict[str, float] = {}
    for (kind, silent), trial in zip(hand.done, report.pop("each"), strict=True):
        name = f"{kind}, {'notice lost' if silent else 'told'}"
        worst[name] = max(worst.get(name, 0.0), trial["last_admitted_after_start_ms"])
    rest = {"load_per_s": len(met) / took_s, "load_refused": sum(status != HTTPStatus.OK for status in met)}
    return {**report, **rest, "worst_ms_by_kind": worst, "gateways_own_worst_s": _delays(texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgr-") as name, platform(Path(name)) as (shared, urls):
        report = asyncio.run(measure(options.probe, options.trials, shared, urls))
    print(json.dumps(report, indent=1))
    sys.exit(not report["ok"])


if __name__ == "__main__":
    main()

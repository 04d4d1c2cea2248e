"""A gateway process before two engines, one of which stops in the middle of its work: SIGSTOP, as a hung GPU looks."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import orjson

from billing.spool_reader import SpoolReader
from billing.types import Outcome
from core import db, keyspace
from core.resp import RespClient
from core.settings import Database
from knative.types import DeploymentState, Endpoint, ReplicaState
from tests.factories.gateway_process import METRICS_HEADERS, ROOT, free_port, gateway_process, seed
from tests.waiting import until

ASKED = 4
PROMPT = "[[sim n=8 p=20 t=300000]]"


@asynccontextmanager
async def engine(log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run one engine; ended hard, however it is."""
    url = f"http://127.0.0.1:{free_port()}"
    command = (sys.executable, "-m", "engine.simulator", "--port", url.rpartition(":")[2], "--log", str(log))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)

    async def ready() -> bool:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False

    try:
        await until(ready)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def lines(log: Path) -> list[tuple[str, int]]:
    """How each request of an engine ended, and how many tokens it generated."""
    written = [orjson.loads(line) for line in log.read_bytes().splitlines()] if log.exists() else []
    return [(line["ended"], line["generated"]) for line in written]


async def test_what_waits_on_a_stopped_engine_is_answered_by_the_other_one(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> None:
    """All are answered and billed once; the stopped engine, when it goes on, finds that nobody waits for it."""
    logs = [tmp_path / f"engine{number}.jsonl" for number in range(2)]
    seeded = await seed(sessions, "")
    headers = {"Authorization": f"Bearer {seeded.customer.secret}"}
    async with (
        engine(logs[0]) as (stopped, hung_url),
        engine(logs[1]) as (_, url),
        gateway_process(database_settings, valkey, tmp_path) as gateway,
        httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as http,
    ):
        endpoints = (Endpoint("r0", hung_url), Endpoint("r1", url))
        state = DeploymentState(seeded.deployment_id.hex, ReplicaState.READY, endpoints, epoch=1)
        client = await RespClient.connect(f"unix://{valkey}")
        await client.call("HSET", keyspace.STATE, state.deployment, msgspec.json.encode(state))
        await client.call("PUBLISH", keyspace.STATE_CHANNEL, msgspec.json.encode(state))
        body = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}]}
        first = await http.post("/v1/chat/completions", json=body, headers={"x-tidegate-max-wait": "20"})
        assert first.status_code == 200, first.text
        os.kill(stopped.pid, signal.SIGSTOP)
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(ASKED)))
        assert [answer.status_code for answer in answers] == [200] * ASKED
        metrics = (await http.get("/metrics", headers=METRICS_HEADERS)).text
        (moved,) = [int(n) for n in re.findall(r'tidegate_gateway_retries_total\{result="moved"\} (\d+)', metrics)]
        assert moved > 0
        os.kill(stopped.pid, signal.SIGCONT)
        await until(lambda: [ended for ended, _ in lines(logs[0])].count("aborted") == moved)
        events = SpoolReader(gateway.home / "spool" / "g1").read(10)
        await client.close()
    ended = [lines(log) for log in logs]
    assert sorted(ended[0] + ended[1]) == [("aborted", 0)] * moved + [("completed", 8)] * (1 + ASKED)
    assert [(event.outcome, event.usage.output) for event in events] == [(Outcome.COMPLETED, 8)] * (1 + ASKED)
    assert len({event.id for event in events}) == 1 + ASKED

"""How long one engine of twelve takes to be replaced on this host, and that the others do not notice.

``python -m bench.restart``: engines are simulators under the controller's own backend (`knative.local`); the switch is
SIGTERM → ended → started → ready, without a drain, which is as long as the requests in it.
"""

import asyncio
import signal
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from catalog.types import Deployment, DeploymentKind, EngineKind, Temperature
from core.ids import new_uuid
from engine import health
from knative.local import LocalBackend
from knative.types import Seat

ENGINES = 12
ROUNDS = 10
POLL_S = 0.01
READY_S = 120.0


def deployment(number: int) -> Deployment:
    return Deployment(
        id=new_uuid(),
        version_id=new_uuid(),
        model_id=new_uuid(),
        name=f"sim-{number}",
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        engine_args={},
        endpoints=frozenset({"chat"}),
        source="",
        sha256="",
        context_max=2048,
        base_url="",
        has_credential=False,
        upstream_model="sim",
        default_max_tokens=16,
        inflight_max=0,
        waiting_max=0,
        max_wait_s=30,
        fallback_model="",
        gpu_memory_mb=0,
        kv_request_mb=0,
        temperature=Temperature.HOT,
        min_scale=1,
        max_scale=1,
        keep_alive_s=0,
        load_timeout_s=0,
        epoch=1,
        created_at=datetime.now(UTC),
    )


async def ready(backend: LocalBackend, seat: Seat) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            alive, note = backend.look(seat)
            record = backend.record(seat)
            if not alive or record is None:
                raise RuntimeError(note)
            if (await health.probe(record.url, EngineKind.SIMULATOR, timeout_s=1.0)).ok:
                return
            await asyncio.sleep(POLL_S)


async def replace(backend: LocalBackend, seat: Seat, one: Deployment) -> float:
    """Return the seconds from SIGTERM to ready again."""
    begun = time.perf_counter()
    backend.send(seat, signal.SIGTERM)
    while backend.look(seat)[0]:  # noqa: ASYNC110 - nobody tells when a process ends
        await asyncio.sleep(POLL_S)
    backend.start(seat, one)
    await ready(backend, seat)
    return time.perf_counter() - begun


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tg-restart-") as folder:
        backend = LocalBackend(Path(folder, "engines"), Path(folder))
        backend.adopt()
        known = {Seat(one.id): one for one in (deployment(number) for number in range(ENGINES))}
        try:
            for seat, one in known.items():
                backend.start(seat, one)
            for seat in known:
                await ready(backend, seat)
            first, *others = known
            before = [backend.record(seat) for seat in others]
            took_s = [await replace(backend, first, known[first]) for _ in range(ROUNDS)]
            for seat in others:
                await ready(backend, seat)
            assert [backend.record(seat) for seat in others] == before
        finally:
            await backend.end_all(5.0)
    print(
        f"one of {ENGINES} replaced {ROUNDS} times: p50 {statistics.median(took_s):.2f} s, slowest {max(took_s):.2f} s;"
        f" the other {ENGINES - 1} are the same processes and answer"
    )


if __name__ == "__main__":
    asyncio.run(main())

"""Four replicas, each a process, under random traffic with many cancels: `python -m … URL REAL`.

One program imports once and forks them. They write `<replica> <pid>` when they take part, and work until SIGTERM; then
they let end what runs, leave nothing behind and exit. REAL is 1 for heartbeats and ticks in real time, else they come
so often that the test may move the server's time. What was cancelled is counted in the key ``test:cancels``.
"""

import asyncio
import os
import random
import signal
import sys
from contextlib import suppress
from uuid import UUID

import msgspec

from core.clock import SystemClock
from core.errors import PlatformError
from core.resp import RespClient, RespError, RespUnavailable
from core.tiers import Tier
from scheduler.admission import Admission
from scheduler.upkeep import StaleEpoch
from tests.factories.forks import run_forked
from tests.factories.scheduler import ask, concurrency, money, served_model

REPLICAS, USERS, GLOBAL_CAP = 4, 12, 20
CAPS = {UUID(int=1): 3, UUID(int=2): 6, UUID(int=3): 12}
TENANTS = [UUID(int=tenant) for tenant in (11, 12, 13)]
CANCELS = "test:cancels"
MODELS = [
    msgspec.structs.replace(served_model(inflight_max=cap), deployment_id=deployment, model_id=deployment)
    for deployment, cap in CAPS.items()
]


async def _user(admission: Admission, client: RespClient, draw: random.Random, stop: asyncio.Event) -> None:
    """Ask, wait, leave or run, again and again."""
    while not stop.is_set():
        tenant, model = draw.choice(TENANTS), draw.choice(MODELS)
        demands = (
            concurrency(30, counter=f"tenant:{tenant.hex}:conc"),
            concurrency(12, counter=f"tenant:{tenant.hex}:m:{model.model_id.hex}:conc"),
            concurrency(12, counter=f"key:{tenant.hex}:conc"),
        )
        used = (draw.randrange(300), draw.randrange(300))
        wait_s, tier = draw.choice((0.0, 0.05, 5.0)), draw.choice(list(Tier))
        task = asyncio.ensure_future(
            ask(admission, model, *demands, money=money(tenant, 10), used=used, tier=tier, wait_s=wait_s)
        )
        cancelled = draw.random() < 0.4
        if cancelled:
            await asyncio.sleep(draw.random() * 0.01)
            task.cancel()
        try:
            grant = await task
        except (PlatformError, asyncio.CancelledError):
            await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(draw.random() * 0.01)
            admission.release(grant, draw.choice((None, 0, 5)), draw.randrange(300), 0)
        if cancelled:
            client.post(b"*2\r\n$4\r\nINCR\r\n$%d\r\n%b\r\n" % (len(CANCELS), CANCELS.encode()))


async def _replica(url: str, name: str, *, real: bool) -> None:
    client, stop = await RespClient.connect(url), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    admission = Admission(client, replica=name, clock=SystemClock(), global_inflight_max=GLOBAL_CAP, background=real)
    await admission.start()
    os.write(1, f"{name} {os.getpid()}\n".encode())
    users = [asyncio.create_task(_user(admission, client, random.Random(f"{name}{n}"), stop)) for n in range(USERS)]
    while not all(user.done() for user in users):
        await asyncio.wait(users, timeout=0.05)
        if not real:
            with suppress(RespUnavailable, RespError, StaleEpoch):
                await admission.heartbeat()
                await admission.tick()
    await asyncio.gather(*users)
    await admission.close()
    await client.close()


if __name__ == "__main__":
    valkey_url, in_real_time = sys.argv[1:]
    sys.exit(run_forked(lambda number: _replica(valkey_url, f"r{number}", real=in_real_time == "1"), REPLICAS))

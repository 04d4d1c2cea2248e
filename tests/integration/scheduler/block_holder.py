"""A gateway's admission as a process of its own that admits from a block until it is killed.

Arguments: Valkey URL, replica, deployment id, tenant (hex). Says ``ready <requests in flight>`` when some of its
requests run from the block and some have ended; their charges may have been told or not.
"""

import asyncio
import sys
from uuid import UUID

import msgspec

from core.clock import SystemClock
from core.ids import new_uuid
from core.resp import RespClient
from core.tiers import Tier
from scheduler.admission import Admission
from scheduler.types import Grant
from tests.factories.scheduler import ask, concurrency, money, rate, served_model

HOLD, RUNNING = 1000, 20


async def hold(url: str, replica: str, deployment: str, tenant: str) -> None:
    client = await RespClient.connect(url)
    admission = Admission(client, replica=replica, clock=SystemClock(), global_inflight_max=100_000, blocks=True)
    await admission.start()
    model = msgspec.structs.replace(served_model(inflight_max=50_000), deployment_id=UUID(deployment))
    prepared = admission.prepare((concurrency(50_000), rate(10**7)), model, tenant)
    while not admission.blocks.granted:
        grant = admission.take(new_uuid(), prepared, HOLD, 0, 0, Tier.PRIORITY)
        grant = grant or await ask(admission, model, prepared=prepared, money=money(UUID(tenant), HOLD))
        admission.release(grant, 1)
    local: list[Grant] = []
    while len(local) < 2 * RUNNING:
        grant = admission.take(new_uuid(), prepared, HOLD, 0, 0, Tier.PRIORITY)
        if grant is None:
            await asyncio.sleep(0.001)
        else:
            local.append(grant)
    for grant in local[RUNNING:]:
        admission.release(grant, 7)
    await admission.heartbeat()
    sys.stdout.write(f"ready {admission.in_flight}\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(hold(*sys.argv[1:]))

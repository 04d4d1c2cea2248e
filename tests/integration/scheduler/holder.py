"""A replica as a process of its own, to be stopped and killed: holds `grants` requests, then queues `waiters`.

Arguments: Valkey URL, replica, deployment id, cap, tenant (hex), grants, waiters. Says ``ready`` when all is taken.
"""

import asyncio
import sys
from uuid import UUID

import msgspec

from core.clock import SystemClock
from core.resp import RespClient
from scheduler.admission import Admission
from tests.factories.scheduler import ask, concurrency, money, served_model


async def hold(arguments: list[str]) -> None:
    url, replica, deployment, cap, tenant, grants, waiters = arguments
    client = await RespClient.connect(url)
    admission = Admission(client, replica=replica, clock=SystemClock(), global_inflight_max=1000)
    await admission.start()
    model = msgspec.structs.replace(served_model(inflight_max=int(cap)), deployment_id=UUID(deployment))
    demands = (concurrency(1000),)
    for _ in range(int(grants)):
        await ask(admission, model, *demands, money=money(UUID(tenant), 10))
    tasks = [
        asyncio.create_task(ask(admission, model, *demands, money=money(UUID(tenant), 10), wait_s=30))
        for _ in range(int(waiters))
    ]
    while admission.waiting < int(waiters):
        await admission.heartbeat()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*tasks)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1:]))

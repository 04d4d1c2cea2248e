"""A process that moves rollouts on, to be killed: one program imports once, and forks it at each line of its input.

`python -m tests.factories.rollout_driver DATABASE_URL VALKEY_SOCKET` prints the pid of each.
"""

import asyncio
import os
import sys

from core import db
from core.clock import SystemClock
from core.resp import RespClient
from core.settings import Database
from knative import rollouts
from knative.rollouts import RolloutDriver

LOOK_S = 0.02


async def drive(url: str, valkey: str) -> None:
    engine = db.create_engine(Database.model_validate({"url": url}))
    client = await RespClient.connect(f"unix://{valkey}")
    await RolloutDriver(db.create_sessions(engine), client, SystemClock()).run()


def main(url: str, valkey: str) -> None:
    rollouts.LOOK_S = rollouts.QUIET_LOOK_S = LOOK_S
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            os.dup2(2, 1)  # what it logs is not for who reads pids
            try:
                asyncio.run(drive(url, valkey))
            finally:
                os._exit(1)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

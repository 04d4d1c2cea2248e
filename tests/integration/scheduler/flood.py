"""Four gateway processes that ask, wait, leave and serve by the scripts' time: ``python -m … URL SCENARIO SEED``.

One program imports once and forks them. What they do is drawn from the seed; in which order they reach the server is
up to the machine, and right whatever it is. The test sets the time and tells it; a request runs for so long of it. Each
writes lines of JSON: its pid, then how each of its requests ended. They work until SIGTERM, end what they have begun,
and exit.
"""

import asyncio
import heapq
import itertools
import math
import os
import random
import signal
import sys
from typing import Any
from uuid import UUID

import msgspec

from core.clock import SystemClock
from core.errors import PlatformError
from core.resp import RespClient, pack
from scheduler.admission import Admission
from scheduler.types import Grant
from tests.factories.forks import run_forked
from tests.integration.scheduler.scenarios import REPLICAS, SCENARIOS, Line, Scenario, Told

TIME, HEARD = "test:time:", "test:heard"  # lists: to each replica the time, from all who has gone by it
REPORT = 9  # the file that facts go to
PATIENCE_S = 60.0  # of a machine with other work


class Replica:
    """One gateway with all its callers."""

    def __init__(self, admission: Admission, client: RespClient, name: str, scenario: Scenario, seed: int) -> None:
        self._admission, self._client, self._name, self._scenario, self._seed = admission, client, name, scenario, seed
        self._now_s = 0.0
        self._alarms: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._serving: set[asyncio.Task[None]] = set()
        self._again: set[asyncio.Task[Grant]] = set()
        self.stop, self._heard = asyncio.Event(), asyncio.Event()

    def say(self, fact: Any) -> None:
        os.write(REPORT, msgspec.json.encode(fact) + b"\n")

    async def until(self, at_s: float) -> None:
        """Return once the scripts' time is there."""
        alarm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._alarms, (at_s, next(self._order), alarm))
        await alarm

    async def work(self) -> None:
        """Have the callers ask; hear each new time, let end what has its time, say so. Until `stop`."""
        await self._client.read_list(TIME + self._name, self._hear)
        self.say({"replica": self._name, "pid": os.getpid()})
        users = [
            asyncio.create_task(self._user(number, line, random.Random(f"{self._seed} {self._name} {number} {user}")))
            for number, line in enumerate(self._scenario.lines)
            for user in range(line.users)
        ]
        ticked_s = 0.0
        while not self.stop.is_set():
            await self._heard.wait()
            self._heard.clear()
            self._ring(self._now_s)
            for _ in range(3):  # who was told goes on
                await asyncio.sleep(0)
            if self._now_s >= ticked_s + 1:
                ticked_s = self._now_s
                await self._admission.tick()
            await self._admission.heartbeat()
            self._client.post(pack("RPUSH", HEARD, self._name))
        for task in (*users, *self._again):
            task.cancel()
        while self._serving or not all(user.done() for user in users):
            self._ring(math.inf)
            await self._admission.tick()
            await asyncio.sleep(0.005)

    def _hear(self, time: bytes) -> None:
        self._now_s = int(time) / 1e6
        self._heard.set()

    def end(self) -> None:
        self.stop.set()
        self._heard.set()

    def _ring(self, now_s: float) -> None:
        while self._alarms and self._alarms[0][0] <= now_s:
            alarm = heapq.heappop(self._alarms)[2]
            if not alarm.done():
                alarm.set_result(None)

    async def _user(self, number: int, line: Line, draw: random.Random) -> None:
        prepared = self._admission.prepare(
            line.demands,
            line.model,
            line.tenant.hex if line.hold else "",
            owner=line.tenant.hex,
            weight=line.weight,
            entitlements=line.entitlements,
        )
        while True:
            if line.pause_s[1]:
                await self.until(self._now_s + draw.uniform(*line.pause_s))
            if line.bursts_s:
                await self.until(line.bursts_s * (self._now_s // line.bursts_s + 1))
            request, used = UUID(int=draw.getrandbits(128)), (draw.randint(*line.prompt), draw.randint(*line.output))
            asked = asyncio.create_task(
                self._admission.acquire(
                    request,
                    prepared,
                    hold=line.hold,
                    input_tokens=used[0] * line.guess,
                    output_tokens=used[1] * line.guess,
                    tier=line.tier,
                    wait_s=draw.choice(line.wait_s),
                )
            )
            leaver = asyncio.create_task(self._leave(asked, draw)) if draw.random() < line.leaves else None
            told = Told(request.hex, number, self._name, "left")
            try:
                grant = await asked
            except PlatformError as error:
                self._refused(told, error)
                await asyncio.sleep(0.001)
                continue
            except asyncio.CancelledError:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                self.say(told)
                if self.stop.is_set():
                    raise
                continue
            finally:
                if leaver is not None:
                    leaver.cancel()
            serving = asyncio.create_task(self._serve(grant, told, line, draw, used))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
            if not line.backlog:
                await asyncio.shield(serving)

    def _refused(self, told: Told, error: PlatformError) -> None:
        told.ended, told.reason = error.code, str(error.fields.get("reason", ""))
        told.status_kind, told.retry_after_s = error.kind.name, error.retry_after_s
        self.say(told)

    async def _leave(self, asked: "asyncio.Task[Grant]", draw: random.Random) -> None:
        """The caller goes: at once, or while it waits."""
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() * 0.003)
        else:
            await self.until(self._now_s + draw.random() * 3)
        asked.cancel()

    async def _serve(self, grant: Grant, told: Told, line: Line, draw: random.Random, used: tuple[int, int]) -> None:
        streams = draw.random() < line.streams
        while True:
            asked = asyncio.Event()

            def on_asked(asked: asyncio.Event = asked) -> bool:
                asked.set()
                return not streams

            grant.on_asked = on_asked
            if grant.asked_for is not None and not on_asked():
                self._admission.keep_place(grant)
            end = asyncio.ensure_future(self.until(self._now_s + draw.uniform(*line.serves_s)))
            place = asyncio.ensure_future(asked.wait())
            await asyncio.wait([end] if streams else [end, place], return_when=asyncio.FIRST_COMPLETED)
            place.cancel()
            if end.done():
                break
            end.cancel()
            told.preempted += 1
            again = asyncio.create_task(self._admission.wait_again(grant, draw.choice(line.wait_s)))
            self._again.add(again)
            try:
                grant = await again
            except PlatformError as error:
                self._refused(told, error)
                return
            except asyncio.CancelledError:
                self.say(told)
                return
            finally:
                self._again.discard(again)
        charge = draw.choice((0, line.hold // 2, line.hold)) if line.hold else None
        self._admission.release(grant, charge, *used)
        told.ended = "served"
        self.say(told)


async def _replica(number: int, url: str, scenario: Scenario, seed: int) -> None:
    client = await RespClient.connect(url, timeout_s=PATIENCE_S)
    name = f"r{number}"
    admission = Admission(
        client, replica=name, clock=SystemClock(), global_inflight_max=scenario.platform, background=False
    )
    replica = Replica(admission, client, name, scenario, seed)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replica.end)
    await admission.start()
    await replica.work()
    await admission.close()
    await client.close()


if __name__ == "__main__":
    os.dup2(1, REPORT)
    os.dup2(2, 1)  # what is logged
    valkey_url, scenario_name, seed_text = sys.argv[1:]
    played = SCENARIOS[scenario_name]
    sys.exit(run_forked(lambda number: _replica(number, valkey_url, played, int(seed_text)), REPLICAS))

"""Admission in tests: models, demands, and several replicas on one Valkey whose time the test moves."""

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from catalog.types import DeploymentKind, EngineKind, ServedModel
from core import keyspace
from core.clock import ManualClock
from core.credit_figure import parse_figure
from core.demand import Demand, DemandKind, Unit
from core.errors import PlatformError
from core.ids import new_uuid
from core.load import LAYOUT, parse_load
from core.resp import RespClient, RespUnavailable
from core.tiers import Tier
from scheduler import commands
from scheduler.admission import Admission
from scheduler.loading import BudgetLoader, CreditLoader
from scheduler.types import Grant, Prepared
from tests.factories.credit_figures import set_figure

RATE, ENTRY, FAR = struct.Struct("<ddddB"), struct.Struct("<Id"), 255  # scheduler/scripts/common.lua


def served_model(*, inflight_max: int = 0, waiting_max: int = 256, max_wait_s: int = 30) -> ServedModel:
    return ServedModel(
        name="small",
        model_id=uuid4(),
        version_id=uuid4(),
        deployment_id=uuid4(),
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        upstream_model="small",
        context_max=4096,
        default_max_tokens=256,
        endpoints=frozenset({"chat"}),
        inflight_max=inflight_max,
        waiting_max=waiting_max,
        max_wait_s=max_wait_s,
    )


def rate(limit: int, *, counter: str = "key:k:rpm", window_s: int = 60) -> Demand:
    return Demand(DemandKind.RATE, counter, 1, limit, "RATE_LIMITED", window_s)


def tokens(limit: int, unit: Unit, *, counter: str = "", window_s: int = 60, enforced: bool = True) -> Demand:
    """A limit of input or output tokens per window; how many a request takes is said when it asks."""
    name = counter or f"key:k:{'itpm' if unit is Unit.INPUT_TOKEN else 'otpm'}"
    return Demand(DemandKind.RATE, name, 0, limit, "TOKENS_LIMITED", window_s, unit, enforced=enforced)


def spend(limit_nano: int, *, counter: str = "key:k:spend:d:2026-11-30", enforced: bool = True) -> Demand:
    return Demand(DemandKind.SPEND, counter, 0, limit_nano, "BUDGET_EXCEEDED", enforced=enforced)


def load_text(*, inflight: int = 0, waiting: int = 0, last_us: int = 0) -> bytes:
    """A deployment's load as the scripts keep it."""
    return LAYOUT.pack(inflight, waiting, last_us, *[0] * 7)


def concurrency(limit: int, *, counter: str = "key:k:conc") -> Demand:
    return Demand(DemandKind.CONCURRENCY, counter, 1, limit, "CONCURRENCY_LIMITED")


class Money(NamedTuple):
    """Who pays, in hex, and the hold in nano."""

    tenant: str
    hold: int


def money(tenant: UUID, hold_nano: int) -> Money:
    return Money(tenant.hex, hold_nano)


NO_MONEY = Money("", 0)


@dataclass
class Fleet:
    """Replicas that share a Valkey. `clock` is theirs; `advance` moves Valkey's time and theirs."""

    url: str
    client: RespClient  # the test's own
    clock: ManualClock = field(default_factory=ManualClock)
    replicas: list[Admission] = field(default_factory=list)
    clients: list[RespClient] = field(default_factory=list)

    @classmethod
    async def open(cls, valkey: Path) -> "Fleet":
        url = f"unix://{valkey}"
        return cls(url, await RespClient.connect(url))

    async def replica(
        self,
        name: str = "",
        *,
        global_inflight_max: int = 10_000,
        credit_loader: CreditLoader | None = None,
        budget_loader: BudgetLoader | None = None,
        blocks: bool = False,
        background: bool = False,
    ) -> Admission:
        client = await RespClient.connect(self.url, jitter=lambda: 0.0)
        replica = Admission(
            client,
            replica=name or f"r{len(self.replicas)}",
            clock=self.clock,
            global_inflight_max=global_inflight_max,
            credit_loader=credit_loader,
            budget_loader=budget_loader,
            blocks=blocks,
            background=background,
        )
        await replica.start()
        self.replicas.append(replica)
        self.clients.append(client)
        return replica

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.client.call("INCRBY", commands.OFFSET, int(seconds * 1_000_000))

    async def server_us(self) -> int:
        """Return the time that the scripts go by."""
        seconds, micros = await self.client.call("TIME")
        return int(seconds) * 1_000_000 + int(micros) + int(await self.client.call("GET", commands.OFFSET) or 0)

    async def set_credit(self, tenant: UUID, nano: int) -> None:
        await set_figure(self.client, tenant, available=nano, version=1)

    async def settled(self) -> None:
        """Return when what the replicas sent without waiting is done."""
        for client in self.clients:
            if client.connected:
                with contextlib.suppress(RespUnavailable):
                    await client.call("PING")

    async def _read(self, *command: str) -> Any:
        """Ask on our own connection, once what the replicas sent without waiting is done."""
        await self.settled()
        return await self.client.call(*command)

    async def credit_left(self, tenant: UUID) -> int:
        (raw,) = await self._read("MGET", keyspace.credit(tenant))
        figure = parse_figure(raw)
        assert figure is not None
        return figure.available - figure.outstanding

    async def outstanding(self, tenant: UUID) -> dict[str, int]:
        flat = await self._read("HGETALL", f"{{tg}}:out:{tenant.hex}")
        return {key.decode(): int(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}

    async def load(self, model: ServedModel) -> tuple[int, int]:
        """Return the deployment's requests in flight and waiting."""
        load = parse_load(await self._read("GET", f"{{tg}}:m:{model.deployment_id.hex}"))
        return load.inflight, load.waiting

    async def last_us(self, model: ServedModel) -> int:
        """Return the server time of the deployment's last grant or release."""
        return parse_load(await self._read("GET", f"{{tg}}:m:{model.deployment_id.hex}")).last_us

    async def corrupt(self, key: str, by: int) -> int:
        """Change a counter behind the scripts' back, of a record its requests at once; returns what it says then."""
        if not key.startswith(keyspace.record("")):
            return int(await self.client.call("INCRBY", key, by))
        raw = await self.client.call("GET", key) or bytes(8)
        value = struct.unpack("<d", raw[:8])[0] + by
        await self.client.call("SET", key, struct.pack("<d", value) + raw[8:])
        return int(value)

    async def count(self, counter: str) -> int:
        """Return what is counted of a cap or a budget."""
        return int(await self._read("GET", f"{{tg}}:c:{counter}") or 0)

    async def running(self, owner: str) -> int:
        """Return the requests in flight of an owner's record."""
        raw = await self._read("GET", keyspace.record(owner))
        return int(struct.unpack_from("<d", raw)[0]) if raw else 0

    async def rated(self, counter: str) -> dict[int, int]:
        """Return what stands in each bucket of a rate; checks that its sum is theirs."""
        whose, _, counted = counter.removesuffix(":dark").rpartition(":")
        owner, unit = whose + counter[len(whose) + 1 + len(counted) :], ("rpm", "itpm", "otpm").index(counted)
        raw = await self._read("GET", keyspace.record(owner)) or b""
        at = struct.calcsize("<d")
        for place in range(unit + 1):
            if at >= len(raw):
                return {}
            total, oldest, newest, count, near = RATE.unpack_from(raw, at)
            at += RATE.size
            closed = b"" if near == FAR else raw[at : at + near * ENTRY.size]
            at += len(closed)
            if near == FAR and place == unit:
                closed = await self._read("GET", f"{{tg}}:b:{owner}:{unit}")
        found = {int(newest) - (int(newest) - number) % 2**32: int(n) for number, n in ENTRY.iter_unpack(closed)}
        assert list(found) == sorted(found)
        found[int(newest)] = int(count)
        assert min(found) == oldest
        assert sum(found.values()) == total
        return found

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()
        for client in [*self.clients, self.client]:
            await client.close()


async def ask(
    replica: Admission,
    model: ServedModel,
    *demands: Demand,
    money: Money = NO_MONEY,
    used: tuple[int, int] = (0, 0),
    tier: Tier = Tier.PRIORITY,
    wait_s: float = 0.0,
    prepared: Prepared | None = None,
    request_id: UUID | None = None,
) -> Grant:
    return await replica.acquire(
        request_id or new_uuid(),
        prepared or replica.prepare(demands, model, money.tenant),
        hold=money.hold,
        input_tokens=used[0],
        output_tokens=used[1],
        tier=tier,
        wait_s=wait_s,
    )


async def until_waiting(replica: Admission, requests: int) -> None:
    async with asyncio.timeout(10):
        while replica.waiting != requests:
            await replica.heartbeat()  # its answer comes after theirs


async def until_ready(replica: Admission, *, ready: bool = True) -> None:
    async with asyncio.timeout(10):
        while replica.ready is not ready:  # noqa: ASYNC110 - the world outside makes it so
            await asyncio.sleep(0.005)


async def outcomes(*asks: asyncio.Future[Grant] | asyncio.Task[Grant]) -> list[Grant | str]:
    """Return each one's grant or error code."""
    return [_outcome(got) for got in await asyncio.gather(*asks, return_exceptions=True)]


def _outcome(got: Grant | BaseException) -> Grant | str:
    if isinstance(got, Grant):
        return got
    if isinstance(got, PlatformError):
        return got.code
    raise got

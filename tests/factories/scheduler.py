"""Admission in tests: models, demands, and several replicas on one Valkey whose time the test moves."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from catalog.types import DeploymentKind, EngineKind, ServedModel
from core.clock import ManualClock
from core.demand import Demand, DemandKind
from core.errors import PlatformError
from core.ids import new_uuid
from core.resp import RespClient, RespUnavailable
from core.tiers import Tier
from scheduler import commands
from scheduler.admission import Admission, CreditLoader
from scheduler.types import Grant, Prepared


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


def concurrency(limit: int, *, counter: str = "key:k:concurrency") -> Demand:
    return Demand(DemandKind.CONCURRENCY, counter, 1, limit, "CONCURRENCY_LIMITED")


def money(tenant: UUID, hold_nano: int) -> Demand:
    return Demand(DemandKind.MONEY, tenant.hex, hold_nano, 0, "INSUFFICIENT_CREDIT")


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
        background: bool = False,
    ) -> Admission:
        client = await RespClient.connect(self.url, jitter=lambda: 0.0)
        replica = Admission(
            client,
            replica=name or f"r{len(self.replicas)}",
            clock=self.clock,
            global_inflight_max=global_inflight_max,
            credit_loader=credit_loader,
            background=background,
        )
        await replica.start()
        self.replicas.append(replica)
        self.clients.append(client)
        return replica

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.client.call("INCRBY", commands.OFFSET, int(seconds * 1_000_000))

    async def set_credit(self, tenant: UUID, nano: int) -> None:
        await self.client.call("HSET", f"{{tg}}:credit:{tenant.hex}", "a", nano, "v", 1)

    async def _read(self, *command: str) -> Any:
        """Ask on our own connection, once what the replicas sent without waiting is done."""
        for client in self.clients:
            if client.connected:
                with contextlib.suppress(RespUnavailable):
                    await client.call("PING")
        return await self.client.call(*command)

    async def credit_left(self, tenant: UUID) -> int:
        a, o = await self._read("HMGET", f"{{tg}}:credit:{tenant.hex}", "a", "o")
        return int(a) - int(o or 0)

    async def outstanding(self, tenant: UUID) -> dict[str, int]:
        flat = await self._read("HGETALL", f"{{tg}}:out:{tenant.hex}")
        return {key.decode(): int(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}

    async def load(self, model: ServedModel) -> tuple[int, int]:
        """Return the deployment's requests in flight and waiting."""
        got = await self._read("HMGET", f"{{tg}}:m:{model.deployment_id.hex}", "inflight", "waiting")
        return int(got[0] or 0), int(got[1] or 0)

    async def last_us(self, model: ServedModel) -> int:
        """Return the server time of the deployment's last grant or release."""
        return int(await self._read("HGET", f"{{tg}}:m:{model.deployment_id.hex}", "last_us"))

    async def count(self, counter: str) -> int:
        return int(await self._read("GET", f"{{tg}}:c:{counter}") or 0)

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()
        for client in [*self.clients, self.client]:
            await client.close()


async def ask(
    replica: Admission,
    model: ServedModel,
    *demands: Demand,
    money: Demand | None = None,
    tier: Tier = Tier.STANDARD,
    wait_s: float = 0.0,
    prepared: Prepared | None = None,
    request_id: UUID | None = None,
) -> Grant:
    return await replica.acquire(
        request_id or new_uuid(),
        prepared or replica.prepare(demands),
        money,
        model=model,
        tier=tier,
        wait_s=wait_s,
    )


async def outcomes(*asks: asyncio.Future[Grant] | asyncio.Task[Grant]) -> list[Grant | str]:
    """Return each one's grant or error code."""
    return [_outcome(got) for got in await asyncio.gather(*asks, return_exceptions=True)]


def _outcome(got: Grant | BaseException) -> Grant | str:
    if isinstance(got, Grant):
        return got
    if isinstance(got, PlatformError):
        return got.code
    raise got

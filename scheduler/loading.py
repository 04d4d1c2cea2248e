"""Figures that Valkey does not have are loaded once, however many requests wait for them."""

import asyncio
from collections.abc import Awaitable, Callable
from uuid import UUID

import structlog

from core.demand import Demand
from core.errors import PlatformError
from scheduler import refusals

log = structlog.get_logger()

CreditLoader = Callable[[UUID], Awaitable[object]]
BudgetLoader = Callable[[UUID, tuple[Demand, ...]], Awaitable[object]]


class Loading:
    """The loads that run now.

    Args:
        credit: puts a tenant's credit into Valkey.
        budgets: puts what a tenant spent on these budgets into Valkey, where it is missing.
    """

    def __init__(self, credit: CreditLoader | None, budgets: BudgetLoader | None) -> None:
        self._credit = credit
        self._budgets = budgets
        self._running: dict[object, asyncio.Task[object]] = {}

    async def credit(self, tenant: str) -> None:
        """Raises PlatformError SERVICE_UNAVAILABLE when it cannot be had."""
        if self._credit is None:
            raise refusals.unavailable()
        loader = self._credit
        await self._once(tenant, lambda: loader(UUID(hex=tenant)))

    async def budgets(self, tenant: str, spends: tuple[Demand, ...]) -> None:
        """Raises PlatformError SERVICE_UNAVAILABLE when they cannot be had."""
        if self._budgets is None:
            raise refusals.unavailable()
        loader = self._budgets
        name = (tenant, *(demand.counter for demand in spends))
        await self._once(name, lambda: loader(UUID(hex=tenant), spends))

    async def _once(self, name: object, load: Callable[[], Awaitable[object]]) -> None:
        task = self._running.get(name)
        if task is None:
            task = asyncio.ensure_future(load())
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        try:
            await asyncio.shield(task)
        except PlatformError:
            raise
        except Exception as error:
            log.warning("figures.load_failed", error=type(error).__name__)
            raise refusals.unavailable() from error

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

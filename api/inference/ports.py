"""What the gateway needs from its neighbours, as types.

The real ones are `scheduler.admission.Admission`, `billing.spool.SpoolWriter`,
`billing.price_book.PriceTable` and `knative.wake.StateFeed`.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol
from uuid import UUID

from billing.types import PriceSchedule, UsageEvent
from catalog.types import ServedModel
from core.demand import Demand
from core.money import Currency
from core.tiers import Tier
from core.waits import Wait
from knative.types import DeploymentState
from scheduler import recount
from scheduler.types import Entitlement


class Grant(Protocol):
    """What admission gave; to be released on every ending."""

    @property
    def queue_us(self) -> int: ...
    @property
    def wait(self) -> Wait | None:
        """Why it waited, if it did."""
        ...

    @property
    def reply(self) -> Sequence[int]:
        """What the script said of the limits; see `scheduler.types.Grant`."""
        ...

    @property
    def over(self) -> tuple[Demand, ...]:
        """The soft and dark limits that it passed; empty almost always."""
        ...

    preempted: int  # how often its place went to a higher tier
    asked_for: Tier | None  # a request of that tier needs its place
    on_asked: Callable[[], bool] | None  # told so; True: the place will be given


class Blocks(Protocol):
    """What is leased to this gateway, so that it admits by itself."""

    granted: int  # requests admitted so, ever

    def __len__(self) -> int: ...


class Admission(Protocol):
    """The one atomic script over all demands."""

    @property
    def ready(self) -> bool:
        """False while Valkey is away and the replica decides alone."""
        ...

    @property
    def waiting(self) -> int:
        """Requests of this gateway in the queue."""
        ...

    @property
    def drift(self) -> recount.Figures:
        """What recounts by this replica found."""
        ...

    @property
    def blocks(self) -> Blocks:
        """How many there are, and what they were good for."""
        ...

    def prepare(
        self,
        demands: tuple[Demand, ...],
        model: ServedModel,
        tenant: str,
        *,
        owner: str = "",
        weight: float = 1.0,
        entitlements: tuple[Entitlement, ...] = (),
    ) -> Any: ...

    def take(  # noqa: PLR0917 - as `acquire`
        self, request_id: UUID, prepared: Any, hold: int, input_tokens: int, output_tokens: int, tier: Tier
    ) -> Any:
        """Admit from the caller's block (`prepared.block`); None: `acquire` decides."""
        ...

    def acquire(
        self,
        request_id: UUID,
        prepared: Any,
        *,
        hold: int,
        input_tokens: int,
        output_tokens: int,
        tier: Tier,
        wait_s: float,
    ) -> Awaitable[Any]: ...

    def release(
        self,
        grant: Any,
        charge_nano: int | None,
        input_tokens: int = -1,
        output_tokens: int = -1,
        cached_tokens: int = 0,
    ) -> None:
        """None: no usage event will come, the hold is free at once. Tokens are what was used; -1: nobody knows.

        `cached_tokens` are part of the input.
        """
        ...

    def wait_again(self, grant: Any, wait_s: float) -> Awaitable[Any]:
        """Give the place that was asked for, and wait for another; PREEMPTED when there is none in time."""
        ...


class Spool(Protocol):
    """Usage events, durable before the last byte."""

    def refuses(self, tier: Tier) -> bool:
        """Whether usage of new work of that tier could not be kept."""
        ...

    def append(self, event: UsageEvent, on_durable: Callable[[bool], None]) -> None: ...


class Prices(Protocol):
    """Published prices, in memory."""

    def schedule(
        self,
        model_id: UUID,
        tier: Tier,
        currency: Currency,
        tenant_id: UUID,
        at_us: int | None = None,
        *,
        plan_book: UUID | None = None,
    ) -> PriceSchedule | None: ...

    def next_change_us(self, currency: Currency, at_us: int, plan_book: UUID | None = None) -> int: ...


class States(Protocol):
    """The controller's view of deployments."""

    @property
    def opening(self) -> Collection[UUID]:
        """Deployments that became ready a moment ago, whose callers are let go step by step; nearly always empty."""
        ...

    def current(self, deployment_id: UUID) -> DeploymentState | None: ...

    def request_wake(self, deployment_id: UUID) -> None: ...

    def note_first_token(self, deployment_id: UUID, ready_us: int, first_token_ms: int) -> None: ...

    def wait_ready(self, deployment_id: UUID, timeout_s: float) -> Awaitable[DeploymentState]:
        """Wake it if need be; raises PlatformError (MODEL_LOADING and the like) when it is not ready in time."""
        ...

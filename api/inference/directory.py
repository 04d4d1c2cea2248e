"""What the request path knows of keys, models and prices: plain maps in memory, replaced or patched by `snapshot`."""

import asyncio
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

import msgspec

from api.inference.limits import NO_LIMITS, LimitLines
from api.inference.ports import Prices
from billing.types import PriceSchedule
from catalog.rollout_types import Arms
from catalog.types import EngineKind, ServedModel
from core.tiers import Tier
from scheduler.types import NO_CAPABILITY, Entitlement
from tenants.entitlements import EntitlementBook
from tenants.types import Principal

OFFERS_MAX = 50_000


class Offer(msgspec.Struct, frozen=True, gc=False):
    """A principal's use of a model at a tier, with its price; cached until anything changes.

    It holds until `until_us`, when prices published ahead take effect. `fields` are our members of the engine's JSON
    that do not depend on the request.
    """

    principal: Principal
    model: ServedModel
    tier: Tier
    schedule: PriceSchedule
    until_us: int
    prepared: Any
    fields: bytes
    lines: LimitLines = NO_LIMITS  # of the limits of key, project and tenant
    facts: tuple[Any, ...] = ()  # of a usage event: what is the same in all of this offer, from tenant to price version


class Directory:
    """The maps, and the offers derived from them."""

    def __init__(self) -> None:
        self.principals: dict[bytes, Principal] = {}
        self.models: Mapping[str, ServedModel] = {}
        self.rollouts: Mapping[str, Arms] = {}  # by public name: two versions serve it
        self.prices: Prices | None = None
        self.entitlements = EntitlementBook()
        self.promised: dict[str, tuple[Entitlement, ...]] = {}  # by model: of all its tenants, as admission knows them
        self.credentials: dict[UUID, str] = {}  # deployment → upstream credential, opened
        self.revision = -1
        self.news = 0  # how often changes were begun to be applied
        self.settled = asyncio.Event()  # no changes are being applied
        self.settled.set()
        self.served = asyncio.Event()  # there is a revision that requests are resolved by, and nobody was told of
        self.loaded = False
        self.from_disk = False  # what is known was read from disk at the start, and Postgres was not seen since
        self.disk_note = ""  # why the policy on disk was not taken
        self.fresh_at = 0.0  # monotonic time of the last successful look at Postgres
        self.offers: dict[tuple[int, str, Tier | None, str], Offer] = {}  # by key id, as a number: quick to hash

    def entitle(self, book: EntitlementBook) -> None:
        """Take in what tenants are entitled to."""
        self.entitlements, self.promised = book, {}

    def promised_of(self, model: str) -> tuple[Entitlement, ...]:
        """What tenants are promised of a model, by its own name."""
        found = self.promised.get(model)
        if found is None:
            found = self.promised[model] = tuple(
                Entitlement(
                    tenant_id.hex,
                    guarantee=figures.guarantee or 0,
                    deserved=max(figures.guarantee or 0, figures.deserved or 0),
                    capability=NO_CAPABILITY if figures.capability is None else figures.capability,
                )
                for tenant_id, figures in self.entitlements.promised(model)
            )
        return found

    def changed(self) -> None:
        """Forget what was derived."""
        self.offers.clear()

    def remember(self, key: tuple[int, str, Tier | None, str], offer: Offer) -> None:
        if len(self.offers) >= OFFERS_MAX:
            self.offers.clear()
        self.offers[key] = offer

    def usable(self, principal: Principal) -> list[ServedModel]:
        """The models this principal may call, by name."""
        return sorted(
            (model for model in self.models.values() if may_use(principal, model.name)), key=lambda model: model.name
        )


def may_use(principal: Principal, name: str) -> bool:
    patterns = principal.model_patterns
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def engine_fields(principal: Principal, model: ServedModel, tier: Tier, endpoint: str) -> bytes:
    """Our members of the engine's JSON, without braces.

    Priority is written only when it is not vLLM's own default, since vLLM refuses any other unless it schedules by it.
    """
    fields: dict[str, Any] = {"model": model.upstream_model}
    if model.engine is EngineKind.VLLM and endpoint in {"chat", "completions"}:
        if principal.cache_salt:
            fields["cache_salt"] = principal.cache_salt
        if tier is not Tier.STANDARD:
            fields["priority"] = 10 * (int(Tier.STANDARD) - int(tier))
    return msgspec.json.encode(fields)[1:-1]

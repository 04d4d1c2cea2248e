"""Operators: what in the registry's store nobody needs: a dry run, then its removal."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from api.admin.registry_shapes import ModelVersionOut, version_out
from api.deps import CurrentServices, CurrentWork
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Input, Output, problems
from billing.version_use import is_used
from catalog.registry import garbage, store
from catalog.registry.garbage import Plan
from core.clock import Clock
from core.ids import IdKind, format_id

router = APIRouter(route_class=GuardedRoute, tags=["registry"])

SHOWN_MAX = 100


class KeptOut(Output):
    """A version that stays, and what needs it."""

    version_id: str
    reference: str
    because: str


class GarbageOut(Output):
    """What goes, or would go. Rows stay: receipts name them. Of `loose` files, no version's, 100 are shown."""

    remove: list[ModelVersionOut]
    keep: list[KeptOut]
    loose_files: int
    loose: list[str]
    bytes: int = Field(description="Of all that goes.")


class CollectIn(Input):
    """What the dry run said: collected is no more than this many versions."""

    versions_max: Annotated[int, Field(ge=0, le=1000, description="As many as the dry run showed.")]


def _out(plan: Plan, clock: Clock) -> GarbageOut:
    return GarbageOut(
        remove=[version_out(version, clock.now()) for version in plan.remove],
        keep=[
            KeptOut(
                version_id=format_id(IdKind.MODEL_VERSION, kept.version.id),
                reference=kept.version.reference,
                because=kept.because,
            )
            for kept in plan.keep
        ],
        loose_files=len(plan.loose),
        loose=plan.loose[:SHOWN_MAX],
        bytes=plan.bytes,
    )


@router.get(f"{ADMIN}/registry/garbage", summary="Show what nobody needs")
async def show_garbage(services: CurrentServices) -> GarbageOut:
    """A dry run: nothing is changed. Each version that stays says what needs it."""
    plan = await garbage.plan(
        services.sessions,
        store.open_store(services.settings),
        is_used,
        now=services.clock.now(),
        weights_days=services.settings.retention.weights_days,
    )
    return _out(plan, services.clock)


@router.post(f"{ADMIN}/registry/garbage/collect", summary="Take out what nobody needs", responses=problems(409))
async def collect_garbage(body: CollectIn, work: CurrentWork) -> GarbageOut:
    """Look again, and delete what still nobody needs: 409 when that is more than the dry run showed."""
    services = work.services
    plan = await garbage.collect(
        services.sessions,
        store.open_store(services.settings),
        is_used,
        now=services.clock.now(),
        weights_days=services.settings.retention.weights_days,
        versions_max=body.versions_max,
    )
    references = [version.reference for version in plan.remove]
    work.act.details.update(removed=references, loose_files=len(plan.loose), bytes=plan.bytes)
    return _out(plan, services.clock)

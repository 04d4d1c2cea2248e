"""Operators: let a version take another one's place, watch it, take it back."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header, Query
from pydantic import Field
from starlette.responses import StreamingResponse

from api.admin import rollout_events
from api.deps import CurrentAct, CurrentPaging, CurrentServices, ModelId, ReadSession, Session, path_id
from api.guard import GuardedRoute
from api.permissions import ADMIN, ROLLOUT
from api.schemas import Input, Output, problems
from api.services import Services
from catalog import deployments, rollouts
from catalog.rollout_types import ENDS, NewRollout, Plan, Rollout, RolloutNote, RolloutState, Room, Rules, Shadow, Step
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from knative import rollout_life, rollout_rules
from knative.rollouts import see

router = APIRouter(route_class=GuardedRoute, tags=["rollouts"])

RolloutId = Annotated[UUID, path_id(IdKind.ROLLOUT, "rollout_id")]
Id = Annotated[str, Field(max_length=64)]
StateName = Annotated[RolloutState, Field(strict=False)]
RoomName = Annotated[Room, Field(strict=False)]
Percent = Annotated[float, Field(ge=0.01, le=100, strict=False)]
Seconds = Annotated[int, Field(ge=0, le=604_800)]
Ratio = Annotated[float, Field(ge=0, le=1000, strict=False)]
Share = Annotated[float, Field(ge=0, le=1, strict=False)]
Samples = Annotated[int, Field(ge=1, le=1_000_000)]


class StepIn(Input):
    """The new version serves a part of the conversations, for so long and until it has had so many requests."""

    percent: Percent
    seconds: Seconds = 600
    requests: int = Field(100, ge=0, le=10_000_000)


class RulesIn(Input):
    """When it goes back by itself; ratios are new over old, and 0 switches a rule off. See docs/rollouts.md."""

    samples: Samples = 100
    errors: Ratio = 2.0
    ttft: Ratio = 1.5
    tpot: Ratio = 1.5
    cost: Ratio = 1.5
    tokens: Ratio = 1.5


class ShadowIn(Input):
    """A part of the requests is copied to the new version first, and its answers are compared; nobody pays or sees."""

    percent: Percent = 1.0
    seconds: Seconds = 600
    comparisons: int = Field(20, ge=1, le=1_000_000)
    unlike_max: float = Field(
        1.0, ge=0, le=1, strict=False, description="Part of unlike answers from which it goes back."
    )


class RolloutIn(Input):
    """Which version is to serve, and how it gets there. Without steps its names switch once it is warm."""

    version_id: Id
    deployment_id: Id | None = Field(None, description="Of the version; else its oldest, or a copy of the one serving.")
    steps: list[StepIn] = Field([], max_length=rollouts.STEPS_MAX)
    rules: RulesIn = RulesIn()
    shadow: ShadowIn | None = None
    room: RoomName = Room.AUTO
    warm_s: int = Field(1800, ge=1, le=86_400, description="The new version must be ready within.")
    drain_s: int = Field(600, ge=0, le=86_400, description="What runs on a version that is left may take so long.")
    keep_s: int = Field(0, ge=0, le=604_800, description="The old version stays ready so long after the switch.")

    def plan(self) -> Plan:
        return Plan(
            steps=tuple(Step(parts(step.percent), step.seconds, step.requests) for step in self.steps),
            rules=Rules(**self.rules.model_dump()),
            shadow=None
            if self.shadow is None
            else Shadow(
                parts(self.shadow.percent), self.shadow.seconds, self.shadow.comparisons, self.shadow.unlike_max
            ),
            room=self.room,
            warm_s=self.warm_s,
            drain_s=self.drain_s,
            keep_s=self.keep_s,
        )


def parts(percent: float) -> int:
    """Return a percentage as parts of ten thousand."""
    return round(percent * 100)


class NoteOut(Output):
    """One move, with the figures that decided it."""

    at: datetime
    state: StateName
    step: int
    reason: str
    figures: dict[str, Any]


class RolloutOut(Output):
    """How far it is. `waits_for` says in words what keeps it there."""

    id: str
    model_id: str
    names: list[str] = Field(description="The public names that it switches.")
    from_version_id: str
    to_version_id: str
    from_deployment_id: str
    to_deployment_id: str
    state: StateName
    step: int
    percent: float = Field(description="Of the conversations that the new version serves now.")
    room: RoomName
    ending: StateName | None = Field(description="What it ends as, while it goes back.")
    wish: StateName | None
    reason: str
    plan: dict[str, Any]
    created_at: datetime
    state_since: datetime
    ended_at: datetime | None
    waits_for: str = ""
    figures: dict[str, Any] = Field(default={}, description="Of both versions in the current window.")
    samples: list[dict[str, Any]] = Field(default=[], description="Figures of single comparisons; no text.")
    notes: list[NoteOut] = Field(default=[], description="Its moves, oldest first.")


class RolloutPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[RolloutOut]
    next_after: str | None


def _out(found: Rollout) -> RolloutOut:
    return RolloutOut(
        id=format_id(IdKind.ROLLOUT, found.id),
        model_id=format_id(IdKind.MODEL, found.model_id),
        names=list(found.names),
        from_version_id=format_id(IdKind.MODEL_VERSION, found.from_version_id),
        to_version_id=format_id(IdKind.MODEL_VERSION, found.to_version_id),
        from_deployment_id=format_id(IdKind.DEPLOYMENT, found.from_deployment_id),
        to_deployment_id=format_id(IdKind.DEPLOYMENT, found.to_deployment_id),
        state=found.state,
        step=found.step,
        percent=percent_of(found),
        room=found.room,
        ending=found.ending,
        wish=found.wish,
        reason=found.reason,
        plan=rollout_events.plain(found.plan),
        created_at=found.created_at,
        state_since=found.state_since,
        ended_at=found.ended_at,
    )


def percent_of(found: Rollout) -> float:
    """Return the part of the conversations that the new version serves."""
    if found.state is RolloutState.CANARY:
        return found.plan.steps[found.step].parts / 100
    after = {RolloutState.SWITCHING, RolloutState.DRAINING, RolloutState.STOPPING, RolloutState.DONE}
    new = found.state in after or (found.state is RolloutState.WARMING and found.room is Room.INSTEAD)
    return 100.0 if new else 0.0


def _note(found: RolloutNote) -> NoteOut:
    return NoteOut(at=found.at, state=found.state, step=found.step, reason=found.reason, figures=found.figures)


@router.post(
    f"{ADMIN}/models/{{model_id}}/rollouts", status_code=201, summary="Begin a rollout", responses=problems(404, 409)
)
async def start_rollout(
    model_id: ModelId, body: RolloutIn, session: Session, act: CurrentAct, services: CurrentServices
) -> RolloutOut:
    """Let a version take the place of the one that the model's own name leads to. The controller moves it on."""
    wanted = NewRollout(
        model_id,
        parse_id(IdKind.MODEL_VERSION, body.version_id),
        body.plan(),
        None if body.deployment_id is None else parse_id(IdKind.DEPLOYMENT, body.deployment_id),
    )
    made = await rollouts.start(session, wanted, sealing_key=services.sealing_key, now=services.clock.now())
    act.on(made.id, model_id=format_id(IdKind.MODEL, model_id), version_id=body.version_id)
    return _out(made)


@router.get(f"{ADMIN}/rollouts", summary="List rollouts")
async def list_rollouts(
    session: ReadSession,
    paging: CurrentPaging,
    model_id: Annotated[str | None, Query(max_length=64, description="Only this model's.")] = None,
) -> RolloutPage:
    model = None if model_id is None else parse_id(IdKind.MODEL, model_id)
    found = await rollouts.search(session, model_id=model, before=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda rollout: rollout.id)
    after = None if page.next_after is None else format_id(IdKind.ROLLOUT, page.next_after)
    return RolloutPage(items=[_out(rollout) for rollout in page.items], next_after=after)


@router.get(ROLLOUT, summary="Read a rollout")
async def get_rollout(rollout_id: RolloutId, session: ReadSession, services: CurrentServices) -> RolloutOut:
    """Return how far it is, what it waits for, and what gateways counted of both versions."""
    found = await rollouts.get(session, rollout_id)
    out = _out(found)
    notes = [_note(note) for note in await rollouts.notes(session, rollout_id)]
    if found.state in ENDS:
        return out.model_copy(update={"notes": notes})
    known = {one.id: one for one in await deployments.list_all(session)}
    seen = await see(services.valkey, found, known, services.settings.controller.engines_max)
    return out.model_copy(
        update={
            "notes": notes,
            "waits_for": rollout_life.waits_for(found, seen, services.clock.now()),
            "figures": rollout_rules.shown(seen.figures),
            "samples": [rollout_events.plain(sample) for sample in seen.figures.shadow.samples],
        }
    )


@router.post(f"{ROLLOUT}/cancel", summary="Cancel a rollout", responses=problems(409))
async def cancel_rollout(rollout_id: RolloutId, session: Session, act: CurrentAct) -> RolloutOut:
    """End it before its names have switched: the old version serves all, what runs on the new one ends there."""
    act.on(rollout_id)
    return _out(await rollouts.wish(session, rollout_id, RolloutState.CANCELLED))


@router.post(f"{ROLLOUT}/rollback", summary="Take a version back", responses=problems(409))
async def roll_back(rollout_id: RolloutId, session: Session, act: CurrentAct) -> RolloutOut:
    """Let the names lead to the old version again, at any time before it is stopped."""
    act.on(rollout_id)
    return _out(await rollouts.wish(session, rollout_id, RolloutState.ROLLED_BACK))


@router.get(f"{ROLLOUT}/events", summary="Follow a rollout", response_class=StreamingResponse)
async def follow_rollout(
    rollout_id: RolloutId,
    session: ReadSession,
    services: CurrentServices,
    last_event_id: Annotated[str, Header(max_length=20)] = "",
) -> StreamingResponse:
    """Stream its moves as server-sent events: those after `Last-Event-ID`, then each as it happens, until it ends.

    The stream is closed after 50 s; clients that follow the standard come back by themselves and miss nothing.
    """
    await rollouts.get(session, rollout_id)
    after = int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() else 0
    return StreamingResponse(_events(services, rollout_id, after), media_type="text/event-stream")


def _events(services: Services, rollout_id: UUID, after: int) -> Any:
    return rollout_events.follow(services.sessions, rollout_id, after, clock=services.clock)

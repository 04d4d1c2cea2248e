"""Rollouts: begun by operators, moved on by the controller, each move one transaction with all that belongs to it.

A move writes the row, scale and public names together, and only from the epoch that whoever decided it had seen. So a
controller may die between any two of them, and its successor goes on from the row.
"""

import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import deployments, models, queries, rollout_guard, rollout_queries
from catalog.rollout_tables import RolloutNoteRow, RolloutRow
from catalog.rollout_types import (
    BACKWARD,
    ENDS,
    STOPPED,
    Arms,
    Move,
    NewRollout,
    Plan,
    Rollout,
    RolloutNote,
    RolloutState,
    Room,
    Scale,
)
from catalog.tables import DeploymentRow
from catalog.types import Deployment, DeploymentChange, DeploymentKind, NewDeployment
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, new_uuid
from core.unreadable import Report, log_unreadable

SEED_BYTES = 32
STEPS_MAX = 20
WITH_ARMS = (RolloutState.SHADOWING, RolloutState.CANARY)


async def start(
    session: AsyncSession,
    new: NewRollout,
    *,
    sealing_key: bytes,
    now: datetime,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> Rollout:
    """Begin to let a version take the place of the one that a model's own name leads to.

    All public names that lead to that one are switched. A deployment of the new version is made like the old one where
    there is none.

    Raises:
        PlatformError: not_found for model, version or deployment; invalid for what cannot work; conflict while another
            rollout of the model runs, or when the version serves already.
    """
    model_name = await models.name_of(session, new.model_id)
    await queries.model_by_id(session, new.model_id, lock=True)
    await rollout_guard.check_model(session, new.model_id)
    version = await queries.version_by_id(session, new.version_id)
    if version is None or version.model_id != new.model_id:
        raise _missing(IdKind.MODEL_VERSION, new.version_id)
    from_version = await queries.alias_version(session, model_name)
    if from_version is None:
        raise _invalid("version_id", f"Nothing serves {model_name!r} yet: let its name lead to the version instead.")
    if from_version == new.version_id:
        raise PlatformError("ALREADY_SERVED", ErrorKind.CONFLICT, f"{model_name!r} leads to this version already.")
    check_plan(new.plan)
    old_rows = await rollout_queries.deployments_of_version(session, from_version)
    if not old_rows:
        raise _invalid("model_id", "The version that serves now has no deployment: deploy the new one, set the alias.")
    old = await deployments.get(session, old_rows[0].id)
    target, made = await _target(session, new, old, sealing_key=sealing_key, now=now)
    back = STOPPED if made else Scale(target.min_scale, target.max_scale)
    goal = Scale(old.min_scale, old.max_scale) if back == STOPPED else back
    row = RolloutRow(
        id=new_uuid(),
        model_id=new.model_id,
        names=await rollout_queries.names_of_version(session, from_version),
        from_version_id=from_version,
        to_version_id=new.version_id,
        from_deployment_id=old.id,
        to_deployment_id=target.id,
        moves_engines=DeploymentKind.EXTERNAL not in {old.kind, target.kind},
        seed=random_bytes(SEED_BYTES),
        plan=msgspec.to_builtins(new.plan),
        room=new.plan.room,
        state=RolloutState.REQUESTED,
        step=0,
        ending=None,
        wish=None,
        reason="",
        fence=0,
        from_min_scale=old.min_scale,
        from_max_scale=old.max_scale,
        to_min_scale=goal.min_scale,
        to_max_scale=max(1, goal.max_scale),
        back_min_scale=back.min_scale,
        back_max_scale=back.max_scale,
        epoch=1,
        state_since=now,
        created_at=now,
        ended_at=None,
    )
    session.add(row)
    await session.flush()
    _note(session, row, "asked for", {}, now)
    await session.flush()
    return _rollout(row)


async def wish(session: AsyncSession, rollout_id: UUID, ending: RolloutState) -> Rollout:
    """Ask for a rollout's end: `cancelled` before its names have switched, `rolled_back` at any time before it ends.

    Raises:
        PlatformError: not_found; conflict when it is too late.
    """
    row = await rollout_queries.rollout_by_id(session, rollout_id, lock=True)
    if row is None:
        raise _missing(IdKind.ROLLOUT, rollout_id)
    known = _rollout(row)
    if known.state in ENDS:
        raise _too_late(f"It has ended ({known.state.value}). To go back, begin a rollout to the version before.")
    if known.state is RolloutState.STOPPING and known.room is not Room.INSTEAD:
        raise _too_late("The old version is being stopped. Begin a rollout to the version before once it is done.")
    if ending is RolloutState.CANCELLED and known.state in {RolloutState.SWITCHING, RolloutState.DRAINING}:
        raise _too_late("Its names have switched already. Roll it back instead.")
    row.wish = ending
    await session.flush()
    return _rollout(row)


async def move(session: AsyncSession, known: Rollout, to: Move, *, now: datetime) -> Rollout | None:
    """Take a rollout to its next state with all that this means; None when somebody else moved it since."""
    row = await rollout_queries.rollout_by_id(session, known.id, lock=True)
    if row is None or row.epoch != known.epoch:
        return None
    if to.room is not None:
        row.room = to.room
    row.ending = to.ending if to.ending is not None else row.ending
    fence = await _take_effect(session, _rollout(row), to, now)
    row.state, row.step, row.state_since, row.epoch = to.state, to.step, now, row.epoch + 1
    row.reason = to.reason or (row.reason if to.state in BACKWARD | ENDS else "")
    row.fence = fence or row.fence
    if to.state in ENDS:
        row.ended_at = now
    _note(session, row, row.reason, to.figures, now)
    await session.flush()
    return _rollout(row)


async def _take_effect(session: AsyncSession, known: Rollout, to: Move, now: datetime) -> int:
    """Do what entering a state means; returns the configuration revision that gateways must serve, or 0."""
    for deployment_id, scale in scales_of(known, to.state, to.engines).items():
        if deployment_id != known.from_deployment_id or scale != STOPPED or not await _still_led_to(session, known):
            await _set_scale(session, known, deployment_id, scale, now)
    if to.state is RolloutState.SWITCHING:
        return await _lead(session, known, known.to_version_id, now)
    if to.state is RolloutState.ROLLING_BACK:
        return await _lead(session, known, known.from_version_id, now)
    return await record_config_change(session, "catalog", None) if to.state in WITH_ARMS else 0


def scales_of(known: Rollout, to: RolloutState, engines: int = 1) -> dict[UUID, Scale]:
    """Return what is desired of either deployment from a state on, where that changes. Pure."""
    instead = known.room is Room.INSTEAD
    old, new = known.from_deployment_id, known.to_deployment_id
    found: dict[UUID, Scale] = {}
    if to is RolloutState.WARMING:
        most = max(1, known.to_scale.max_scale)
        found[new] = Scale(min(most, max(1, engines, known.to_scale.min_scale)), most)
    elif to is RolloutState.STOPPING:
        found[old] = STOPPED
    elif to is RolloutState.DONE:
        found[new] = known.to_scale
    elif instead and to in {RolloutState.SWITCHING, RolloutState.ROLLING_BACK}:
        found[new] = STOPPED
    elif to is RolloutState.ROLLING_BACK:
        found[old] = known.from_scale
    elif to in ENDS and known.state is not RolloutState.REQUESTED:
        found[new] = known.back_scale
        if instead:
            found[old] = known.from_scale
    return found


async def _still_led_to(session: AsyncSession, known: Rollout) -> bool:
    """Whether a name that was made meanwhile leads to the old version."""
    return bool(await rollout_queries.names_of_version(session, known.from_version_id))


async def get(session: AsyncSession, rollout_id: UUID) -> Rollout:
    """Return one; kind not_found when there is none."""
    row = await rollout_queries.rollout_by_id(session, rollout_id)
    if row is None:
        raise _missing(IdKind.ROLLOUT, rollout_id)
    return _rollout(row)


async def live(session: AsyncSession) -> list[Rollout]:
    """Return those that have not ended, oldest first."""
    return [_rollout(row) for row in await rollout_queries.live(session)]


async def search(
    session: AsyncSession, *, model_id: UUID | None = None, before: UUID | None = None, limit: int
) -> list[Rollout]:
    """Return rollouts, newest first."""
    found = await rollout_queries.search(session, model_id=model_id, before=before, limit=limit)
    return [_rollout(row) for row in found]


async def notes(session: AsyncSession, rollout_id: UUID, after: int = 0) -> list[RolloutNote]:
    """Return how a rollout came along after the note of that id, oldest first."""
    return [
        RolloutNote(row.id, row.at, RolloutState(row.state), row.step, row.reason, row.figures)
        for row in await rollout_queries.notes(session, rollout_id, after)
    ]


async def load_arms(session: AsyncSession, report: Report = log_unreadable) -> dict[str, Arms]:
    """Return what gateways must know, by public name, of rollouts that send them to two versions."""
    found = {}
    for row, model, version, deployment in await rollout_queries.arms(session, [state.value for state in WITH_ARMS]):
        try:
            known = _rollout(row)
            canary = known.state is RolloutState.CANARY
            shadow = known.plan.shadow if known.state is RolloutState.SHADOWING else None
            for name in known.names:
                found[name] = Arms(
                    rollout_id=known.id,
                    window=known.epoch,
                    seed=row.seed,
                    parts=known.plan.steps[known.step].parts if canary else 0,
                    shadow_parts=shadow.parts if shadow is not None else 0,
                    stable_version_id=known.from_version_id,
                    canary=models.as_served(name, model, version, deployment),
                )
        except Exception as error:  # noqa: BLE001 - one that cannot be read has the old version serve
            report("rollout", row.id, error)
    return found


def check_plan(plan: Plan) -> None:
    """Refuse a plan that could not work, or that says nothing. Pure."""
    weights = [step.parts for step in plan.steps]
    if len(weights) > STEPS_MAX:
        raise _invalid("steps", f"At most {STEPS_MAX} steps.")
    if any(not 0 < parts < 10_000 for parts in weights) or weights != sorted(set(weights)):
        raise _invalid("steps", "Weights rise from step to step, above 0 and below 100 %, which is the switch.")
    if plan.shadow is not None and not 0 < plan.shadow.parts <= 10_000:
        raise _invalid("shadow", "A part of the requests above 0 and up to 100 % is copied.")
    if plan.room is Room.INSTEAD and (plan.steps or plan.shadow is not None):
        raise _invalid("room", "Canary and shadow need both versions at once: leave them out, or ask for room beside.")


async def _target(
    session: AsyncSession, new: NewRollout, old: Deployment, *, sealing_key: bytes, now: datetime
) -> tuple[Deployment, bool]:
    """Return the deployment that is to serve, and whether it was made for it."""
    rows = await rollout_queries.deployments_of_version(session, new.version_id)
    if new.deployment_id is not None:
        rows = [row for row in rows if row.id == new.deployment_id]
        if not rows:
            raise _missing(IdKind.DEPLOYMENT, new.deployment_id)
    if rows:
        _check_serves_first(rows, new)
        return await deployments.get(session, rows[0].id), False
    if old.kind is DeploymentKind.EXTERNAL:
        raise _invalid("version_id", "An external version has no deployment by itself: make one of this version first.")
    deployment_id = await deployments.create(
        session, await _copy(session, old, new.version_id), sealing_key=sealing_key, now=now
    )
    return await deployments.get(session, deployment_id), True


def _check_serves_first(rows: list[DeploymentRow], new: NewRollout) -> None:
    """A name leads to the oldest deployment of its version; a younger one would not be the one that serves."""
    if new.deployment_id is not None and rows[0].id != new.deployment_id:
        raise _invalid("deployment_id", "An older deployment of this version would serve: retire that one first.")


async def _copy(session: AsyncSession, old: Deployment, version_id: UUID) -> NewDeployment:
    """Return a deployment of another version that is otherwise like this one, asleep."""
    version = await queries.version_by_id(session, version_id)
    suffix = f"-v{version.number if version is not None else 0}"
    base = old.name.rpartition("-v")[0] if old.name.rpartition("-v")[2].isdigit() else ""
    name = (base or old.name)[: 63 - len(suffix)].rstrip("-") + suffix
    if await queries.deployment_named(session, name) is not None:
        name = f"{name[:56]}-{new_uuid().hex[-6:]}"
    shared = {
        field: getattr(old, field)
        for field in NewDeployment.__struct_fields__
        if field not in {"name", "version_id", "credential", "min_scale", "max_scale"}
    }
    return NewDeployment(name=name, version_id=version_id, **shared, min_scale=0, max_scale=0)


async def _set_scale(session: AsyncSession, known: Rollout, deployment_id: UUID, scale: Scale, now: datetime) -> None:
    """Say what is desired of a deployment; nothing for external ones, which nobody here starts or stops."""
    if not known.moves_engines:
        return
    change = DeploymentChange(min_scale=scale.min_scale, max_scale=scale.max_scale)
    await deployments.update(session, deployment_id, change, sealing_key=b"", now=now)


async def _lead(session: AsyncSession, known: Rollout, version_id: UUID, now: datetime) -> int:
    """Let the names lead to a version; returns the configuration revision that says so."""
    for name in known.names:
        await queries.upsert_alias(session, name, version_id, now)
    return await record_config_change(session, "catalog", None)


def _note(session: AsyncSession, row: RolloutRow, reason: str, figures: dict[str, Any], now: datetime) -> None:
    session.add(
        RolloutNoteRow(rollout_id=row.id, at=now, state=row.state, step=row.step, reason=reason, figures=figures)
    )


def _rollout(row: RolloutRow) -> Rollout:
    return Rollout(
        id=row.id,
        model_id=row.model_id,
        names=tuple(row.names),
        from_version_id=row.from_version_id,
        to_version_id=row.to_version_id,
        from_deployment_id=row.from_deployment_id,
        to_deployment_id=row.to_deployment_id,
        plan=msgspec.convert(row.plan, Plan),
        room=Room(row.room),
        state=RolloutState(row.state),
        step=row.step,
        ending=RolloutState(row.ending) if row.ending else None,
        wish=RolloutState(row.wish) if row.wish else None,
        reason=row.reason,
        fence=row.fence,
        from_scale=Scale(row.from_min_scale, row.from_max_scale),
        to_scale=Scale(row.to_min_scale, row.to_max_scale),
        back_scale=Scale(row.back_min_scale, row.back_max_scale),
        epoch=row.epoch,
        state_since=row.state_since,
        created_at=row.created_at,
        ended_at=row.ended_at,
        moves_engines=row.moves_engines,
    )


def _too_late(message: str) -> PlatformError:
    return PlatformError("ROLLOUT_TOO_LATE", ErrorKind.CONFLICT, message)


def _invalid(param: str, message: str) -> PlatformError:
    return PlatformError("INVALID_ROLLOUT", ErrorKind.INVALID, message, param=param)


def _missing(kind: IdKind, value: UUID) -> PlatformError:
    noun = kind.name.lower().replace("_", " ")
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no {noun} {format_id(kind, value)}.")

"""`tidegate model update` and its kin: rollouts begun, followed and ended on the host."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from catalog import models, rollouts
from catalog.rollout_types import ENDS, NewRollout, Plan, Rollout, RolloutState, Room, Shadow, Step
from cli import screen
from cli.books import database
from core.clock import SystemClock
from core.db import Sessions, create_engine, create_sessions, transaction
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.sealing import sealing_key
from core.settings import Settings
from tenants import audit
from tenants.types import SYSTEM

LOOK_S = 0.5
SHOWN_MAX = 50
WISHES = {"cancel": RolloutState.CANCELLED, "rollback": RolloutState.ROLLED_BACK}
ACTIONS = {"cancel": "rollout.cancel", "rollback": "rollout.ask_back"}


def run(action: str, options: argparse.Namespace) -> int:
    """Do one action; 1 when it is refused, or when the rollout did not end well."""
    with database(options.home) as settings:
        return asyncio.run(_run(action, options, settings))


async def _run(action: str, options: argparse.Namespace, settings: Settings) -> int:
    async with _sessions(settings) as sessions:
        try:
            if action == "rollouts":
                return await _list(sessions)
            if action == "follow":
                return await follow(sessions, parse_id(IdKind.ROLLOUT, options.rollout))
            if action == "update":
                made = await begin(sessions, options, settings)
                screen.say(f"{format_id(IdKind.ROLLOUT, made.id)} is asked for; it switches {', '.join(made.names)}.")
                return 0 if options.detach else await follow(sessions, made.id)
            return await _wish(sessions, action, parse_id(IdKind.ROLLOUT, options.rollout))
        except PlatformError as error:
            screen.say(error.message)
            return 1


@asynccontextmanager
async def _sessions(settings: Settings) -> AsyncIterator[Sessions]:
    engine = create_engine(settings.database)
    try:
        yield create_sessions(engine)
    finally:
        await engine.dispose()


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan that the options say."""
    steps = (Step(round(percent * 100), options.step_seconds, options.step_requests) for percent in options.steps)
    shadow = None if options.shadow is None else Shadow(round(options.shadow * 100), options.step_seconds)
    return Plan(tuple(steps), shadow=shadow, room=Room(options.room), keep_s=options.keep_seconds)


async def begin(sessions: Sessions, options: argparse.Namespace, settings: Settings) -> Rollout:
    """Ask for the rollout, with its audit record."""
    async with transaction(sessions) as session:
        model_id = next((found.id for found in await models.list_models(session) if found.name == options.name), None)
        if model_id is None:
            raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no model {options.name!r}.")
        numbers = {str(version.number): version.id for version in await models.list_versions(session, model_id)}
        version_id = numbers.get(options.to) or parse_id(IdKind.MODEL_VERSION, options.to)
        wanted = NewRollout(model_id, version_id, plan_of(options))
        key = sealing_key(settings.secrets.sealing)
        made = await rollouts.start(session, wanted, sealing_key=key, now=SystemClock().now())
        details = {"on_host": True, "version_id": format_id(IdKind.MODEL_VERSION, version_id)}
        audit.record(session, SYSTEM, "rollout.start", target_id=made.id, details=details)
    return made


async def follow(sessions: Sessions, rollout_id: UUID, *, look_s: float = LOOK_S) -> int:
    """Say each move until the rollout ends; 0 when it ended as done."""
    after = 0
    while True:
        async with transaction(sessions) as session:
            notes = await rollouts.notes(session, rollout_id, after)
            state = (await rollouts.get(session, rollout_id)).state
        for note in notes:
            after = note.id
            step = f" step {note.step + 1}" if note.state is RolloutState.CANARY else ""
            reason = f": {note.reason}" if note.reason else ""
            screen.say(f"{note.at:%H:%M:%S}  {note.state.value}{step}{reason}")
        if state in ENDS:
            return int(state is not RolloutState.DONE)
        await asyncio.sleep(look_s)


async def _wish(sessions: Sessions, action: str, rollout_id: UUID) -> int:
    async with transaction(sessions) as session:
        await rollouts.wish(session, rollout_id, WISHES[action])
        audit.record(session, SYSTEM, ACTIONS[action], target_id=rollout_id, details={"on_host": True})
    await follow(sessions, rollout_id)
    return 0


async def _list(sessions: Sessions) -> int:
    async with transaction(sessions) as session:
        found = await rollouts.search(session, limit=SHOWN_MAX)
    for one in found:
        reason = f"  {one.reason}" if one.reason else ""
        screen.say(f"{format_id(IdKind.ROLLOUT, one.id)}  {one.state.value:<12} {', '.join(one.names)}{reason}")
    if not found:
        screen.say("No rollouts.")
    return 0

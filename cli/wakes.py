"""`tidegate model wakes`: the starts of a deployment's engines, by phase."""

import asyncio
import sys
from pathlib import Path

import msgspec

from catalog import deployments, observed
from catalog.types import Wake
from cli import screen
from cli.books import database
from core import db
from core.errors import PlatformError

COLUMNS = ("decide", "fetch", "schedule", "load", "first token", "ready")


def show(home: Path, name: str, *, kind: str) -> int:
    """Print them, newest first; 1 when there is no such deployment."""
    with database(home) as settings:

        async def main() -> list[Wake]:
            engine = db.create_engine(settings.database)
            try:
                async with db.transaction(db.create_sessions(engine)) as session:
                    return await observed.list_wakes(session, await deployments.find(session, name))
            finally:
                await engine.dispose()

        try:
            found = asyncio.run(main())
        except PlatformError as error:
            screen.say(error.message)
            return 1
    if kind == "json":
        sys.stdout.write(msgspec.json.encode([document(wake) for wake in found]).decode() + "\n")
    else:
        sys.stdout.writelines(line + "\n" for line in table(found))
    return 0


def document(wake: Wake) -> dict[str, object]:
    return {**msgspec.to_builtins(wake), "ready_ms": wake.ready_ms}


def table(wakes: list[Wake]) -> list[str]:
    """Milliseconds; ``-`` where there is none."""
    head = f"{'woken at':<24} {'replica':>7} {'cause':<6} {'outcome':<7} {'tries':>5} {'held':>5}"
    lines = [head + "".join(f" {column:>11}" for column in COLUMNS) + "  (ms)"]
    for wake in wakes:
        phases = (wake.decide_ms, wake.fetch_ms, wake.schedule_ms, wake.load_ms, wake.first_token_ms, wake.ready_ms)
        lines.append(
            f"{wake.woken_at.isoformat(timespec='milliseconds')[:23]:<24} {wake.index:>7} {wake.cause:<6}"
            f" {wake.outcome:<7} {wake.attempts:>5} {wake.held:>5}"
            + "".join(f" {'-' if ms is None else format(ms, ','):>11}" for ms in phases)
            + (f"  {wake.reason}" if wake.reason else "")
        )
    return lines

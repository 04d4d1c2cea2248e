"""`tidegate operators`: what only the host may say of operators."""

import asyncio
from pathlib import Path

from cli import screen
from cli.books import database
from core.clock import SystemClock
from core.db import create_engine, create_sessions, transaction
from core.errors import PlatformError
from core.settings import Settings
from tenants import audit, vouching
from tenants.types import SYSTEM


def confirm(home: Path, email: str) -> int:
    """Confirm that who signs in with this address is a person of their own; 1 when nobody of it is an operator."""
    with database(home) as settings:
        return asyncio.run(_confirm(settings, email))


async def _confirm(settings: Settings, email: str) -> int:
    engine = create_engine(settings.database)
    try:
        async with transaction(create_sessions(engine)) as session:
            operator_id = await vouching.confirm_on_host(session, email, now=SystemClock().now())
            audit.record(session, SYSTEM, "operator.confirm", target_id=operator_id, details={"on_host": True})
    except PlatformError as error:
        screen.say(error.message)
        return 1
    finally:
        await engine.dispose()
    screen.say(f"{email} is confirmed, and may decide on what others ask for.")
    return 0

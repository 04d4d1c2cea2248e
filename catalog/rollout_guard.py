"""What a rollout works with is not changed under it."""

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from catalog import rollout_queries
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id


async def check_name(session: AsyncSession, name: str) -> None:
    """Raise conflict while a rollout switches this public name."""
    if (running := await rollout_queries.live_of_name(session, name)) is not None:
        raise is_running(running)


async def check_model(session: AsyncSession, model_id: UUID) -> None:
    """Raise conflict while a rollout of this model runs."""
    if (running := await rollout_queries.live_of_model(session, model_id)) is not None:
        raise is_running(running)


async def check_deployment(session: AsyncSession, deployment_id: UUID) -> None:
    """Raise conflict while a rollout needs this deployment."""
    if (running := await rollout_queries.live_of_deployment(session, deployment_id)) is not None:
        raise is_running(running)


def is_running(rollout_id: UUID) -> PlatformError:
    """The refusal of what would meddle with a rollout."""
    known = format_id(IdKind.ROLLOUT, rollout_id)
    message = f"The rollout {known} is under way here. Let it end, cancel it or roll it back first."
    return PlatformError("ROLLOUT_RUNNING", ErrorKind.CONFLICT, message, fields={"rollout_id": known})

"""Every statement of rollouts; private to this package."""

from uuid import UUID

from sqlalchemy import Row, any_, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from catalog.rollout_tables import RolloutNoteRow, RolloutRow
from catalog.tables import DeploymentRow, ModelAliasRow, ModelRow, ModelVersionRow

LIVE_MAX = 100
NOTES_MAX = 500


async def rollout_by_id(session: AsyncSession, rollout_id: UUID, *, lock: bool = False) -> RolloutRow | None:
    statement = select(RolloutRow).where(RolloutRow.id == rollout_id)
    return await session.scalar(statement.with_for_update(key_share=True) if lock else statement)


async def live(session: AsyncSession) -> list[RolloutRow]:
    """Return those that have not ended, oldest first."""
    statement = select(RolloutRow).where(RolloutRow.ended_at.is_(None)).order_by(RolloutRow.id)
    return list(await session.scalars(statement.limit(LIVE_MAX)))


async def live_of_model(session: AsyncSession, model_id: UUID) -> UUID | None:
    return await session.scalar(
        select(RolloutRow.id).where(RolloutRow.ended_at.is_(None), RolloutRow.model_id == model_id)
    )


async def live_of_name(session: AsyncSession, name: str) -> UUID | None:
    statement = select(RolloutRow.id).where(RolloutRow.ended_at.is_(None), literal(name) == any_(RolloutRow.names))
    return await session.scalar(statement.limit(1))


async def live_of_deployment(session: AsyncSession, deployment_id: UUID) -> UUID | None:
    takes_part = (RolloutRow.from_deployment_id == deployment_id) | (RolloutRow.to_deployment_id == deployment_id)
    return await session.scalar(select(RolloutRow.id).where(RolloutRow.ended_at.is_(None), takes_part).limit(1))


async def search(session: AsyncSession, *, model_id: UUID | None, before: UUID | None, limit: int) -> list[RolloutRow]:
    """Return rollouts, newest first."""
    statement = select(RolloutRow).order_by(RolloutRow.id.desc()).limit(limit)
    if model_id is not None:
        statement = statement.where(RolloutRow.model_id == model_id)
    if before is not None:
        statement = statement.where(RolloutRow.id < before)
    return list(await session.scalars(statement))


async def notes(session: AsyncSession, rollout_id: UUID, after: int) -> list[RolloutNoteRow]:
    statement = select(RolloutNoteRow).where(RolloutNoteRow.rollout_id == rollout_id, RolloutNoteRow.id > after)
    return list(await session.scalars(statement.order_by(RolloutNoteRow.id).limit(NOTES_MAX)))


async def names_of_version(session: AsyncSession, version_id: UUID) -> list[str]:
    """Return the public names that lead to a version."""
    statement = select(ModelAliasRow.name).where(ModelAliasRow.version_id == version_id).order_by(ModelAliasRow.name)
    return list(await session.scalars(statement))


async def deployments_of_version(session: AsyncSession, version_id: UUID) -> list[DeploymentRow]:
    """Return the live deployments of a version, oldest first."""
    statement = (
        select(DeploymentRow)
        .where(DeploymentRow.version_id == version_id, DeploymentRow.retired_at.is_(None))
        .order_by(DeploymentRow.created_at, DeploymentRow.id)
    )
    return list(await session.scalars(statement))


async def arms(
    session: AsyncSession, states: list[str]
) -> list[Row[RolloutRow, ModelRow, ModelVersionRow, DeploymentRow]]:
    """Return the rollouts in these states with the version that is new."""
    statement = (
        select(RolloutRow, ModelRow, ModelVersionRow, DeploymentRow)
        .join(ModelRow, ModelRow.id == RolloutRow.model_id)
        .join(ModelVersionRow, ModelVersionRow.id == RolloutRow.to_version_id)
        .join(DeploymentRow, DeploymentRow.id == RolloutRow.to_deployment_id)
        .where(RolloutRow.state.in_(states), RolloutRow.ended_at.is_(None), DeploymentRow.retired_at.is_(None))
        .order_by(RolloutRow.id)
    )
    return list((await session.execute(statement)).all())

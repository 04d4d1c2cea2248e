"""Every statement of the catalog; private to this package."""

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, Select, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from catalog.tables import (
    ControllerTermRow,
    DeploymentRow,
    DesiredRow,
    EngineLoadRow,
    ModelAliasRow,
    ModelRow,
    ModelVersionRow,
    ReplicaRow,
    WakeRow,
)

PAGE_MAX = 1000


async def model_by_id(session: AsyncSession, model_id: UUID, *, lock: bool = False) -> ModelRow | None:
    statement = select(ModelRow).where(ModelRow.id == model_id)
    return await session.scalar(statement.with_for_update(key_share=True) if lock else statement)


async def model_named(session: AsyncSession, name: str) -> ModelRow | None:
    return await session.scalar(select(ModelRow).where(ModelRow.name == name))


async def known_models(session: AsyncSession, model_ids: Collection[UUID]) -> set[UUID]:
    return set(await session.scalars(select(ModelRow.id).where(ModelRow.id.in_(model_ids))))


async def models(session: AsyncSession) -> list[ModelRow]:
    return list(await session.scalars(select(ModelRow).order_by(ModelRow.name).limit(PAGE_MAX)))


async def last_version_number(session: AsyncSession, model_id: UUID) -> int:
    statement = select(func.coalesce(func.max(ModelVersionRow.number), 0)).where(ModelVersionRow.model_id == model_id)
    return (await session.execute(statement)).scalar_one()


async def version_by_id(session: AsyncSession, version_id: UUID, *, keep: bool = False) -> ModelVersionRow | None:
    """Return a version; with `keep` its weights cannot be taken out of the store until this transaction ends."""
    statement = select(ModelVersionRow).where(ModelVersionRow.id == version_id)
    if keep:
        statement = statement.with_for_update(read=True).execution_options(populate_existing=True)
    return await session.scalar(statement)


async def versions(session: AsyncSession, model_id: UUID) -> list[ModelVersionRow]:
    statement = select(ModelVersionRow).where(ModelVersionRow.model_id == model_id).order_by(ModelVersionRow.number)
    return list(await session.scalars(statement.limit(PAGE_MAX)))


async def upsert_alias(session: AsyncSession, name: str, version_id: UUID, now: datetime) -> None:
    statement = insert(ModelAliasRow).values(name=name, version_id=version_id, updated_at=now)
    changed = {"version_id": version_id, "updated_at": now}
    await session.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changed))


async def alias_model(session: AsyncSession, name: str) -> UUID | None:
    """Return the model that an alias leads to."""
    statement = (
        select(ModelVersionRow.model_id)
        .join(ModelAliasRow, ModelAliasRow.version_id == ModelVersionRow.id)
        .where(ModelAliasRow.name == name)
    )
    return await session.scalar(statement)


async def alias_version(session: AsyncSession, name: str) -> UUID | None:
    """Return the version that an alias leads to."""
    return await session.scalar(select(ModelAliasRow.version_id).where(ModelAliasRow.name == name))


async def delete_alias(session: AsyncSession, name: str) -> None:
    await session.execute(delete(ModelAliasRow).where(ModelAliasRow.name == name))


async def served(session: AsyncSession) -> list[Row[str, ModelRow, ModelVersionRow, DeploymentRow]]:
    """Each public name with the live deployments of its version, the oldest one last."""
    statement = (
        select(ModelAliasRow.name, ModelRow, ModelVersionRow, DeploymentRow)
        .join(ModelVersionRow, ModelVersionRow.id == ModelAliasRow.version_id)
        .join(ModelRow, ModelRow.id == ModelVersionRow.model_id)
        .join(DeploymentRow, DeploymentRow.version_id == ModelVersionRow.id)
        .where(ModelRow.retired_at.is_(None), DeploymentRow.retired_at.is_(None))
        .order_by(ModelAliasRow.name, DeploymentRow.created_at.desc(), DeploymentRow.id.desc())
    )
    return list((await session.execute(statement)).all())


def _deployments() -> Select[DeploymentRow, DesiredRow, ModelVersionRow]:
    return (
        select(DeploymentRow, DesiredRow, ModelVersionRow)
        .join(DesiredRow, DesiredRow.deployment_id == DeploymentRow.id)
        .join(ModelVersionRow, ModelVersionRow.id == DeploymentRow.version_id)
        .where(DeploymentRow.retired_at.is_(None))
    )


async def deployments(session: AsyncSession) -> list[Row[DeploymentRow, DesiredRow, ModelVersionRow]]:
    statement = _deployments().order_by(DeploymentRow.created_at, DeploymentRow.id).limit(PAGE_MAX)
    return list((await session.execute(statement)).all())


async def deployments_of(session: AsyncSession, model: str) -> list[DeploymentRow]:
    """Return the live deployments of all versions of a model of this own name."""
    query = (
        select(DeploymentRow)
        .join(ModelVersionRow, ModelVersionRow.id == DeploymentRow.version_id)
        .join(ModelRow, ModelRow.id == ModelVersionRow.model_id)
        .where(ModelRow.name == model, DeploymentRow.retired_at.is_(None))
        .order_by(DeploymentRow.created_at, DeploymentRow.id)
        .limit(PAGE_MAX)
    )
    return list(await session.scalars(query))


async def deployment_by_id(
    session: AsyncSession, deployment_id: UUID, *, lock: bool = False
) -> Row[DeploymentRow, DesiredRow, ModelVersionRow] | None:
    statement = _deployments().where(DeploymentRow.id == deployment_id)
    if lock:
        statement = statement.with_for_update(key_share=True, of=(DeploymentRow, DesiredRow))
    return (await session.execute(statement)).one_or_none()


async def deployment_named(session: AsyncSession, name: str) -> UUID | None:
    return await session.scalar(select(DeploymentRow.id).where(DeploymentRow.name == name))


async def replicas(session: AsyncSession, deployment_id: UUID | None = None) -> list[ReplicaRow]:
    statement = select(ReplicaRow).order_by(ReplicaRow.deployment_id, ReplicaRow.index).limit(PAGE_MAX)
    if deployment_id is not None:
        statement = statement.where(ReplicaRow.deployment_id == deployment_id)
    return list(await session.scalars(statement))


async def upsert_replica(session: AsyncSession, values: dict[str, Any]) -> None:
    """Write a replica's row unless a later term or epoch wrote it already."""
    statement = insert(ReplicaRow).values(**values)
    changed = {name: statement.excluded[name] for name in values if name not in {"deployment_id", "index"}}
    newer = (ReplicaRow.term < statement.excluded.term) | (
        (ReplicaRow.term == statement.excluded.term) & (ReplicaRow.epoch <= statement.excluded.epoch)
    )
    await session.execute(
        statement.on_conflict_do_update(index_elements=["deployment_id", "index"], set_=changed, where=newer)
    )


async def delete_replica(session: AsyncSession, replica_id: UUID, term: int) -> None:
    await session.execute(delete(ReplicaRow).where(ReplicaRow.id == replica_id, ReplicaRow.term <= term))


async def delete_seat(session: AsyncSession, deployment_id: UUID, index: int, term: int) -> None:
    await session.execute(
        delete(ReplicaRow).where(
            ReplicaRow.deployment_id == deployment_id, ReplicaRow.index == index, ReplicaRow.term <= term
        )
    )


async def insert_load(session: AsyncSession, deployment_id: UUID, load_ms: int, now: datetime, keep: int) -> None:
    """Add a load and drop all but the newest `keep`."""
    await session.execute(insert(EngineLoadRow).values(deployment_id=deployment_id, load_ms=load_ms, loaded_at=now))
    kept = (
        select(EngineLoadRow.id)
        .where(EngineLoadRow.deployment_id == deployment_id)
        .order_by(EngineLoadRow.id.desc())
        .limit(keep)
    )
    await session.execute(
        delete(EngineLoadRow).where(EngineLoadRow.deployment_id == deployment_id, EngineLoadRow.id.not_in(kept))
    )


async def loads(session: AsyncSession) -> list[Row[UUID, int]]:
    """Deployment and load time, oldest first."""
    statement = select(EngineLoadRow.deployment_id, EngineLoadRow.load_ms).order_by(EngineLoadRow.id)
    return list((await session.execute(statement.limit(20 * PAGE_MAX))).all())


async def upsert_wake(session: AsyncSession, values: dict[str, Any], keep: int) -> None:
    """Write a wake, again once more of it is known, and drop all but the newest `keep` of its deployment."""
    statement = insert(WakeRow).values(**values)
    changed = {"first_token_ms": statement.excluded.first_token_ms}
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=changed))
    kept = wakes_of(values["deployment_id"]).with_only_columns(WakeRow.id).limit(keep)
    await session.execute(
        delete(WakeRow).where(WakeRow.deployment_id == values["deployment_id"], WakeRow.id.not_in(kept))
    )


def wakes_of(deployment_id: UUID) -> Select[WakeRow]:
    newest_first = (WakeRow.woken_at.desc(), WakeRow.id.desc())
    return select(WakeRow).where(WakeRow.deployment_id == deployment_id).order_by(*newest_first)


async def wakes(session: AsyncSession, deployment_id: UUID) -> list[WakeRow]:
    return list(await session.scalars(wakes_of(deployment_id).limit(PAGE_MAX)))


async def next_term(session: AsyncSession, holder: str) -> int:
    statement = (
        update(ControllerTermRow)
        .values(term=ControllerTermRow.term + 1, holder=holder)
        .returning(ControllerTermRow.term)
    )
    return (await session.execute(statement)).scalar_one()


async def current_term(session: AsyncSession) -> int:
    return (await session.execute(select(ControllerTermRow.term))).scalar_one()


async def changes_since(session: AsyncSession, seen: int) -> tuple[int, bool]:
    """Return the newest revision of `config_change`, and whether one after `seen` was the catalog's."""
    statement = text(
        "SELECT coalesce(max(revision), :seen), coalesce(bool_or(kind = 'catalog'), false)"
        " FROM config_change WHERE revision > :seen"
    )
    newest, changed = (await session.execute(statement, {"seen": seen})).one()
    return int(newest), bool(changed)

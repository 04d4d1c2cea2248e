"""Every statement of the registry; private to catalog."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, Select, delete, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from catalog.registry.tables import IntakeFileRow, IntakePartRow, IntakeRow, ModelFileRow
from catalog.registry.types import OPEN, WORKING, IntakeState
from catalog.tables import DeploymentRow, ModelAliasRow, ModelRow, ModelVersionRow

PAGE_MAX = 1000
PARTS_MAX = 1_000_000
VersionAndModel = Row[ModelVersionRow, ModelRow]


def _versions() -> Select[ModelVersionRow, ModelRow]:
    return select(ModelVersionRow, ModelRow).join(ModelRow, ModelRow.id == ModelVersionRow.model_id)


async def version(session: AsyncSession, version_id: UUID, *, lock: bool = False) -> VersionAndModel | None:
    statement = _versions().where(ModelVersionRow.id == version_id)
    if lock:
        statement = statement.with_for_update(of=ModelVersionRow, key_share=True)
    return (await session.execute(statement)).one_or_none()


async def version_named(session: AsyncSession, name: str, number: int) -> VersionAndModel | None:
    statement = _versions().where(ModelRow.name == name, ModelVersionRow.number == number)
    return (await session.execute(statement)).one_or_none()


async def versions(session: AsyncSession, model: str | None = None) -> list[VersionAndModel]:
    statement = _versions().order_by(ModelRow.name, ModelVersionRow.number).limit(PAGE_MAX)
    if model is not None:
        statement = statement.where(ModelRow.name == model)
    return list((await session.execute(statement)).all())


async def versions_signed_by_others(session: AsyncSession, signed_by: str, most: int) -> list[ModelVersionRow]:
    statement = select(ModelVersionRow).where(ModelVersionRow.manifest != "", ModelVersionRow.signed_by != signed_by)
    return list(await session.scalars(statement.order_by(ModelVersionRow.id).limit(most).with_for_update()))


async def signed_by_others(session: AsyncSession, signed_by: str) -> int:
    statement = select(func.count()).where(ModelVersionRow.manifest != "", ModelVersionRow.signed_by != signed_by)
    return int((await session.execute(statement)).scalar_one())


async def deprecated_in_use(session: AsyncSession, now: datetime) -> list[VersionAndModel]:
    """Return the versions whose date has passed and that are deployed."""
    live = exists().where(DeploymentRow.version_id == ModelVersionRow.id, DeploymentRow.retired_at.is_(None))
    statement = _versions().where(ModelVersionRow.deprecated_at <= now, live).order_by(ModelVersionRow.id)
    return list((await session.execute(statement.limit(PAGE_MAX))).all())


async def same_weights(session: AsyncSession, model_id: UUID, sha256: str) -> ModelVersionRow | None:
    statement = select(ModelVersionRow).where(
        ModelVersionRow.model_id == model_id, ModelVersionRow.sha256 == sha256, ModelVersionRow.manifest != ""
    )
    return await session.scalar(statement)


async def number_taken(session: AsyncSession, model_id: UUID, number: int) -> bool:
    found = exists().where(ModelVersionRow.model_id == model_id, ModelVersionRow.number == number)
    return bool(await session.scalar(select(found)))


async def files(session: AsyncSession, version_id: UUID) -> list[ModelFileRow]:
    statement = select(ModelFileRow).where(ModelFileRow.version_id == version_id).order_by(ModelFileRow.no)
    return list(await session.scalars(statement))


async def last_number(session: AsyncSession, model_id: UUID) -> int:
    """Return the largest number that a version has, or that somebody is bringing."""
    versions = select(func.coalesce(func.max(ModelVersionRow.number), 0)).where(ModelVersionRow.model_id == model_id)
    intakes = select(func.coalesce(func.max(IntakeRow.number), 0)).where(
        IntakeRow.model_id == model_id, IntakeRow.state.in_(OPEN), IntakeRow.kind != "check"
    )
    both = select(func.greatest(versions.scalar_subquery(), intakes.scalar_subquery()))
    return int((await session.execute(both)).scalar_one())


async def intake(session: AsyncSession, intake_id: UUID, *, lock: bool = False) -> IntakeRow | None:
    statement = select(IntakeRow).where(IntakeRow.id == intake_id)
    return await session.scalar(statement.with_for_update(key_share=True) if lock else statement)


async def intakes(session: AsyncSession) -> list[IntakeRow]:
    return list(await session.scalars(select(IntakeRow).order_by(IntakeRow.created_at.desc()).limit(PAGE_MAX)))


async def open_count(session: AsyncSession) -> int:
    statement = select(func.count()).where(IntakeRow.state.in_(OPEN))
    return int((await session.execute(statement)).scalar_one())


async def claim_intake(session: AsyncSession, intake_id: UUID, holder: UUID, now: datetime, until: datetime) -> bool:
    """Take or renew the lease of an intake that is to be worked on; False when another has it or nothing is to do."""
    statement = (
        update(IntakeRow)
        .where(
            IntakeRow.id == intake_id,
            IntakeRow.state.in_(WORKING),
            or_(IntakeRow.leased_until.is_(None), IntakeRow.leased_until < now, IntakeRow.holder == holder),
        )
        .values(holder=holder, leased_until=until)
        .returning(IntakeRow.id)
    )
    return await session.scalar(statement) is not None


async def stalled(session: AsyncSession, now: datetime, quiet_since: datetime, most: int) -> list[UUID]:
    """Return what is to be worked on and nobody has touched."""
    statement = select(IntakeRow.id).where(
        IntakeRow.state.in_(WORKING),
        IntakeRow.updated_at < quiet_since,
        or_(IntakeRow.leased_until.is_(None), IntakeRow.leased_until < now),
    )
    return list(await session.scalars(statement.order_by(IntakeRow.id).limit(most)))


async def expired(session: AsyncSession, now: datetime, most: int) -> list[IntakeRow]:
    statement = select(IntakeRow).where(IntakeRow.state.in_(OPEN), IntakeRow.expires_at <= now)
    return list(await session.scalars(statement.order_by(IntakeRow.id).limit(most).with_for_update(skip_locked=True)))


async def with_parts(session: AsyncSession, most: int) -> list[UUID]:
    """Return intakes that are over and still have parts."""
    parts = exists().where(IntakePartRow.intake_id == IntakeRow.id)
    statement = select(IntakeRow.id).where(IntakeRow.state.not_in(OPEN), parts).order_by(IntakeRow.id).limit(most)
    return list(await session.scalars(statement))


async def intake_files(session: AsyncSession, intake_id: UUID) -> list[IntakeFileRow]:
    statement = select(IntakeFileRow).where(IntakeFileRow.intake_id == intake_id).order_by(IntakeFileRow.no)
    return list(await session.scalars(statement.execution_options(populate_existing=True)))


async def intake_file(session: AsyncSession, intake_id: UUID, no: int) -> IntakeFileRow | None:
    return await session.get(IntakeFileRow, (intake_id, no))


async def set_file(session: AsyncSession, intake_id: UUID, no: int, **values: Any) -> None:
    statement = update(IntakeFileRow).where(IntakeFileRow.intake_id == intake_id, IntakeFileRow.no == no)
    await session.execute(statement.values(**values))


async def drop_files(session: AsyncSession, intake_id: UUID) -> None:
    await session.execute(delete(IntakeFileRow).where(IntakeFileRow.intake_id == intake_id))


async def advance(session: AsyncSession, intake_id: UUID, no: int, *, start: int, size: int, sha256: str) -> bool:
    """Note a part that ends where the next begins; False when the file has gone on from there meanwhile."""
    moved = (
        update(IntakeFileRow)
        .where(IntakeFileRow.intake_id == intake_id, IntakeFileRow.no == no, IntakeFileRow.received_bytes == start)
        .values(received_bytes=start + size)
        .returning(IntakeFileRow.no)
    )
    if await session.scalar(moved) is None:
        return False
    part = {"intake_id": intake_id, "no": no, "start_byte": start, "size_bytes": size, "sha256": sha256}
    await session.execute(insert(IntakePartRow).values(**part))
    return True


async def parts(session: AsyncSession, intake_id: UUID, no: int) -> Sequence[Row[int, int, str]]:
    """Return start, size and hash of the parts of a file, in order."""
    statement = select(IntakePartRow.start_byte, IntakePartRow.size_bytes, IntakePartRow.sha256)
    here = statement.where(IntakePartRow.intake_id == intake_id, IntakePartRow.no == no)
    return (await session.execute(here.order_by(IntakePartRow.start_byte).limit(PARTS_MAX))).all()


async def drop_parts(session: AsyncSession, intake_id: UUID) -> None:
    await session.execute(delete(IntakePartRow).where(IntakePartRow.intake_id == intake_id))


async def needed_by_catalog(session: AsyncSession) -> dict[UUID, str]:
    """Return the versions that a live deployment, a name callers use, or running work needs, and what needs each."""
    found: dict[UUID, str] = {}
    live = select(DeploymentRow.version_id, DeploymentRow.name).where(DeploymentRow.retired_at.is_(None))
    named = (
        select(ModelAliasRow.version_id, ModelAliasRow.name)
        .join(ModelVersionRow, ModelVersionRow.id == ModelAliasRow.version_id)
        .join(ModelRow, ModelRow.id == ModelVersionRow.model_id)
        .where(ModelRow.retired_at.is_(None))
    )
    busy = select(IntakeRow.version_id, IntakeRow.kind).where(
        IntakeRow.state.in_(OPEN), IntakeRow.version_id.is_not(None)
    )
    for version_id, name in (await session.execute(live)).all():
        found.setdefault(version_id, f"the deployment {name}")
    for version_id, name in (await session.execute(named)).all():
        found.setdefault(version_id, f"the name {name}")
    for busy_id, kind in (await session.execute(busy)).all():
        if busy_id is not None:
            found.setdefault(busy_id, f"a running {kind}")
    return found


async def folder_in_use(session: AsyncSession, intake: IntakeRow) -> bool:
    """Say whether a version, or another intake that is open, has the folder in the store that this intake writes to."""
    version = exists().where(
        ModelVersionRow.model_id == intake.model_id,
        ModelVersionRow.number == intake.number,
        ModelVersionRow.sha256 == intake.sha256,
        ModelVersionRow.removed_at.is_(None),
    )
    other = exists().where(
        IntakeRow.id != intake.id,
        IntakeRow.state.in_(OPEN),
        IntakeRow.model_id == intake.model_id,
        IntakeRow.number == intake.number,
        IntakeRow.sha256 == intake.sha256,
    )
    return bool(await session.scalar(select(version | other)))


async def lifetimes(session: AsyncSession, version_id: UUID) -> list[Row[datetime, datetime | None]]:
    """Return when each deployment of a version, retired ones too, was made and taken away."""
    statement = select(DeploymentRow.created_at, DeploymentRow.retired_at).where(DeploymentRow.version_id == version_id)
    return list((await session.execute(statement.limit(PAGE_MAX))).all())


async def open_folders(session: AsyncSession) -> set[tuple[UUID, int, str]]:
    """Return model, number and hash of what is being moved into the store."""
    statement = select(IntakeRow.model_id, IntakeRow.number, IntakeRow.sha256).where(IntakeRow.state.in_(OPEN))
    return {(model_id, number, sha256) for model_id, number, sha256 in (await session.execute(statement)).all()}


async def open_intakes(session: AsyncSession) -> set[UUID]:
    return set(await session.scalars(select(IntakeRow.id).where(IntakeRow.state == IntakeState.RECEIVING))) | set(
        await session.scalars(select(IntakeRow.id).where(IntakeRow.state.in_(WORKING)))
    )

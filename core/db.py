"""Postgres: the engine, the transaction at the edge, and migrations. `commit(` stands only here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

from sqlalchemy import URL, MetaData, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from core.settings import Database

NAMING = {
    "ix": "%(table_name)s_%(column_0_N_name)s_idx",
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ck": "%(table_name)s_%(constraint_name)s_check",
    "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
    "pk": "%(table_name)s_pkey",
}


class Base(DeclarativeBase):
    """Every mapped class of every package. Relationships are `lazy="raise"`."""

    metadata = MetaData(naming_convention=NAMING)


Sessions = async_sessionmaker[AsyncSession]


def driver_url(url: str) -> URL:
    """Return the URL for psycopg 3, the one driver of API, workers and migrations."""
    return make_url(url).set(drivername="postgresql+psycopg")


def create_engine(settings: Database) -> AsyncEngine:
    """Build the pool; nothing connects yet."""
    return create_async_engine(
        driver_url(settings.url.get_secret_value()),
        pool_size=settings.pool_size,
        max_overflow=settings.pool_size,
        pool_timeout=5,
        pool_pre_ping=True,
        hide_parameters=True,  # of what people sent, an error must not log a word
        connect_args={
            "connect_timeout": 3,
            "options": "-c statement_timeout=30000 -c lock_timeout=4000 -c TimeZone=UTC",
        },
    )


def create_sessions(engine: AsyncEngine) -> Sessions:
    return async_sessionmaker(engine, expire_on_commit=False)


@asynccontextmanager
async def transaction(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """Open the one transaction of a request or task: committed at the end, rolled back on any exception."""
    async with sessions() as session:
        try:
            yield session
            await session.commit()
        except BaseException:
            await session.rollback()
            raise


async def record_config_change(session: AsyncSession, kind: str, entity_id: UUID | None) -> int:
    """Tell every gateway, with this transaction's commit, that the thing changed; returns the revision that says so.

    Args:
        session: the transaction that changes it.
        kind: ``api_key``, ``project``, ``tenant``, ``tenant_limits``, ``plan``, ``person``, ``member``,
            ``identity_provider``, ``operator``, ``catalog`` or ``prices``.
        entity_id: which one; None means reload all of that kind.
    """
    statement = text("SELECT record_config_change(:kind, :entity)")
    return int((await session.execute(statement, {"kind": kind, "entity": entity_id})).scalar_one())


def migrate(owner_url: str) -> None:
    """Bring the schema to the newest revision, as the owner. Blocks; safe to call from several processes."""
    from alembic import command
    from alembic.config import Config

    root = Path(__file__).resolve().parent.parent
    config = Config(root / "alembic.ini")
    config.set_main_option("script_location", str(root / "migrations"))
    config.attributes["url"] = driver_url(owner_url)
    command.upgrade(config, "head")

"""Real services for the tests: one Postgres and one Valkey per xdist worker, a fresh database per test that asks."""

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.ext.asyncio import AsyncEngine

from cli.embedded import postgres as pg
from cli.embedded import valkey as vk
from core import db
from core.settings import Database
from tests.short_paths import memory_folder


@dataclass(frozen=True, slots=True)
class PostgresService:
    """A running server with a migrated template database."""

    files: pg.PostgresFiles
    port: int
    process: subprocess.Popen[bytes]

    def url(self, role: str, database: str) -> str:
        return pg.url(self.files, self.port, role, database)


@pytest.fixture(scope="session")
def service_folder() -> Iterator[Path]:
    """A short path, because unix socket names are limited to 107 bytes, that an unprivileged uid may enter."""
    folder = Path(tempfile.mkdtemp(prefix="tg-", dir=memory_folder()))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(service_folder: Path) -> Iterator[PostgresService]:
    with running_postgres(service_folder) as service:
        yield service


@contextmanager
def running_postgres(folder: Path) -> Iterator[PostgresService]:
    files = pg.PostgresFiles(folder / "pg", secrets.token_hex(16), secrets.token_hex(16))
    pg.initialise(files)
    port = pg.free_port()
    # fsync off: the tests that kill the server run a server of their own
    process = pg.start(files, port, options={"fsync": "off", "synchronous_commit": "off"})
    pg.wait_ready(files, port, lambda: process.poll() is None)
    service = PostgresService(files, port, process)
    pg.create_databases(files, port, "tidegate_template")
    db.migrate(service.url("owner", "tidegate_template"))
    yield service
    pg.stop(process)


@contextmanager
def fresh_database(postgres: PostgresService) -> Iterator[str]:
    """The name of a fresh, migrated database, dropped at the end."""
    name = f"t_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        made = sql.SQL("CREATE DATABASE {} TEMPLATE tidegate_template STRATEGY FILE_COPY").format(sql.Identifier(name))
        connection.execute(made)
        pg.restrict(connection, name)  # a copy does not have its template's rights
    yield name
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def database(postgres: PostgresService) -> Iterator[str]:
    with fresh_database(postgres) as name:
        yield name


def settings_of(postgres: PostgresService, database: str) -> Database:
    return Database.model_validate({"url": postgres.url("app", database), "owner_url": postgres.url("owner", database)})


@pytest.fixture
def database_settings(postgres: PostgresService, database: str) -> Database:
    return settings_of(postgres, database)


@pytest.fixture
async def engine(database_settings: Database) -> AsyncIterator[AsyncEngine]:
    """The application role's pool on a fresh database."""
    engine = db.create_engine(database_settings)
    yield engine
    await engine.dispose()


@pytest.fixture
def sessions(engine: AsyncEngine) -> db.Sessions:
    return db.create_sessions(engine)


@pytest.fixture(scope="session")
def valkey_socket(service_folder: Path) -> Iterator[Path]:
    """A running Valkey; tests that share it use keys of their own or `valkey` below."""
    with running_valkey(service_folder) as socket_path:
        yield socket_path


@contextmanager
def running_valkey(folder: Path) -> Iterator[Path]:
    socket_path = folder / "valkey.sock"
    process = vk.start(folder / "valkey", socket_path)
    vk.wait_ready(folder / "valkey", socket_path, lambda: process.poll() is None)
    yield socket_path
    vk.stop(process)


@pytest.fixture
def valkey(valkey_socket: Path) -> Path:
    """The socket of a Valkey emptied for this test."""
    import redis

    with redis.Redis(unix_socket_path=str(valkey_socket)) as client:
        client.flushall()
    return valkey_socket

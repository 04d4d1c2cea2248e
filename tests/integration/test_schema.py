"""Whether migrations are needed is known without loading the tool that migrates."""

from pathlib import Path

import psycopg
from alembic.config import Config
from alembic.script import ScriptDirectory

from cli import schema
from tests.conftest import PostgresService

ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_revision_is_the_one_that_alembic_finds() -> None:
    config = Config(ROOT / "alembic.ini")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    assert schema.newest_revisions() == set(ScriptDirectory.from_config(config).get_heads())


def test_a_migrated_database_is_current_and_others_are_not(postgres: PostgresService, database: str) -> None:
    assert not schema.is_current(postgres.url("owner", "postgres"))
    url = postgres.url("owner", database)
    assert schema.is_current(url)
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001_core'")
    assert not schema.is_current(url)

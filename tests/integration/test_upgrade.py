"""Books of an older version are brought to this one, and are right then."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from psycopg import sql

from billing import verify
from cli.embedded import postgres as pg
from core import db
from tests.conftest import PostgresService, settings_of
from tests.factories import billing as make

ROOT = Path(__file__).resolve().parents[2]
BEFORE_MINIMUMS = "0016_bound_instants"


@pytest.fixture
def old_database(postgres: PostgresService) -> Iterator[str]:
    """A database as the version before minimum charges left it."""
    name = f"t_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        pg.restrict(connection, name)
    config = Config(ROOT / "alembic.ini")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = db.driver_url(postgres.url("owner", name))
    command.upgrade(config, BEFORE_MINIMUMS)
    yield name
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


OLD_BOOKS = """
    INSERT INTO ledger_account (id, tenant_id, code, currency, normal) VALUES
        ('00000000-0000-7000-8000-000000000001', %(tenant)s, 'revenue.usage', 'CNY', 'credit'),
        ('00000000-0000-7000-8000-000000000002', %(tenant)s, 'expense.overrun', 'CNY', 'debit'),
        ('00000000-0000-7000-8000-000000000003', %(tenant)s, 'liability.credit_paid', 'CNY', 'credit');
    INSERT INTO ledger_balance (account_id, bounded)
        SELECT id, code = 'liability.credit_paid' FROM ledger_account;
    INSERT INTO billing_profile (tenant_id, currency, mode, revenue_account, overrun_account) VALUES
        (%(tenant)s, 'CNY', 'prepaid', '00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000002');
    INSERT INTO credit_lot (account_id, tenant_id, source)
        VALUES ('00000000-0000-7000-8000-000000000003', %(tenant)s, 'paid')
"""


async def test_a_tenant_of_an_older_version_gets_the_account_of_minimums(
    postgres: PostgresService, old_database: str
) -> None:
    tenant = UUID(int=7)
    with psycopg.connect(postgres.url("owner", old_database)) as owner, psycopg.ClientCursor(owner) as cursor:
        cursor.execute(OLD_BOOKS, {"tenant": tenant})
    db.migrate(postgres.url("owner", old_database))
    engine = db.create_engine(settings_of(postgres, old_database))
    sessions = db.create_sessions(engine)
    await make.add_credit(sessions, tenant, "2", "k")
    with psycopg.connect(postgres.url("owner", old_database)) as owner:
        rows = owner.execute(
            "SELECT a.code, a.currency, b.credit FROM billing_profile p JOIN ledger_account a"
            " ON a.id = p.min_charge_account JOIN ledger_balance b ON b.account_id = a.id"
        ).fetchall()
    assert rows == [("revenue.min_charge", "CNY", 0)]
    async with db.transaction(sessions) as session:
        assert await verify.verify(session) is None
    await engine.dispose()

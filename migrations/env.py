"""Alembic's entry: one transaction per migration, an advisory lock against a second migrator, short lock timeouts."""

from alembic import context
from sqlalchemy import create_engine, pool, text

ADVISORY_LOCK = 7_481_200  # any constant of ours


def run() -> None:
    url = context.config.attributes["url"]  # given by core.db.migrate: never from a file
    engine = create_engine(url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
        connection.execute(text("SET lock_timeout = '4s'"))
        connection.execute(text("SET statement_timeout = '60s'"))
        connection.commit()
        context.configure(connection=connection, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()

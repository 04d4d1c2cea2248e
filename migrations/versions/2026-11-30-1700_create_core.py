"""Create what every package leans on: the log of configuration changes and the outbox."""

from alembic import op

revision = "0001_core"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = (
    # Every change that gateways must see writes one row in its own transaction. The advisory lock makes the order of
    # revisions the order of commits, so that "greater than the last one I saw" misses nothing.
    """
    CREATE TABLE config_change (
        revision bigint PRIMARY KEY,
        kind text NOT NULL,
        entity_id uuid,
        changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    """
    CREATE FUNCTION record_config_change(change_kind text, change_entity uuid) RETURNS bigint
    LANGUAGE plpgsql AS $$
    DECLARE next_revision bigint;
    BEGIN
        PERFORM pg_advisory_xact_lock(7481201);
        SELECT coalesce(max(revision), 0) + 1 INTO next_revision FROM config_change;
        INSERT INTO config_change (revision, kind, entity_id) VALUES (next_revision, change_kind, change_entity);
        PERFORM pg_notify('config_change', next_revision::text);
        RETURN next_revision;
    END $$
    """,
    """
    CREATE TABLE outbox (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        task text NOT NULL,
        arguments jsonb NOT NULL,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        sent_at timestamptz,
        done_at timestamptz,
        attempts int NOT NULL DEFAULT 0,
        last_error text
    )
    """,
    "CREATE INDEX outbox_open ON outbox (id) WHERE done_at IS NULL",
    "GRANT USAGE ON SCHEMA public TO tidegate_app",
    "GRANT SELECT, INSERT ON config_change TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON outbox TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

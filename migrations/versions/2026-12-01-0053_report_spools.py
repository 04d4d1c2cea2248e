"""Keep what posters report of the spools they follow, so that a month is not closed while usage of it is on a disk."""

from alembic import op

revision = "0027_spool_reports"
down_revision = "0026_usage_days"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE spool_report (
        host text NOT NULL CHECK (char_length(host) BETWEEN 1 AND 255),
        name text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 255),
        replica text NOT NULL,
        live boolean NOT NULL,
        unposted_bytes bigint NOT NULL CHECK (unposted_bytes >= 0),
        events bigint NOT NULL CHECK (events >= 0),
        tenants bigint NOT NULL CHECK (tenants >= 0),
        oldest_at timestamptz,
        reported_at timestamptz NOT NULL,
        PRIMARY KEY (host, name)
    )
    """,
    # Why somebody closed a month although usage of it may be on a disk.
    "ALTER TABLE ledger_period ADD override_reason text CHECK (char_length(override_reason) BETWEEN 1 AND 500)",
    "GRANT UPDATE (override_reason) ON ledger_period TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE ON spool_report TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Keep instants that no Python can read back out of what gateways load."""

from alembic import op

revision = "0016_bound_instants"
down_revision = "0015_periods_and_seals"
branch_labels = None
depends_on = None

# Postgres knows the year 294276, Python none after 9999: one such row would stop every gateway from following changes.
BOUND = "CHECK (expires_at < '9000-01-01 00:00:00+00')"
TABLES = ("api_key", "api_key_secret", "operator_token", "invite", "credit_lot")


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {table}_expires_check {BOUND}")

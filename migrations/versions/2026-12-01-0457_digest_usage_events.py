"""Give usage events a digest over all their columns, and the transactions that post them one over their events."""

from alembic import op

revision = "0028_event_digests"
down_revision = "0029_one_limit"
branch_labels = None
depends_on = None

# Null in what was posted before, which is proven as it was. No check of their length: it would read every event there
# is under an exclusive lock, and a digest that is not 16 bytes long is not right in any case.
STATEMENTS = (
    "ALTER TABLE usage_event ADD digest bytea",
    "ALTER TABLE ledger_tx ADD usage_sha256 bytea",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

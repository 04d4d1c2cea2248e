"""Let seals cover, beside transactions, the other rows of money that do not change any more."""

from alembic import op

revision = "0019_sealed_records"
down_revision = "0018_idempotency"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE ledger_seal RENAME transactions TO leaves",
    # A leaf is a transaction's, or that of a record: the row of another table that has this key.
    """
    ALTER TABLE ledger_leaf
        ALTER tx_id DROP NOT NULL,
        ADD record text,
        ADD key text,
        ADD UNIQUE (record, key),
        ADD CHECK ((tx_id IS NULL) = (record IS NOT NULL)),
        ADD CHECK ((record IS NULL) = (key IS NULL))
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

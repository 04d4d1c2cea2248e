"""Keep the answers of changes, for repeats with the same idempotency key."""

from alembic import op

revision = "0018_idempotency"
down_revision = "0017_price_steps"
branch_labels = None
depends_on = None

STATEMENTS = (
    # `digest` is of caller, method, path and key, `fingerprint` keyed, of the body; an empty `sealed` was too large.
    """
    CREATE TABLE idempotency_answer (
        digest bytea PRIMARY KEY CHECK (octet_length(digest) = 32),
        fingerprint bytea NOT NULL CHECK (octet_length(fingerprint) = 32),
        status smallint NOT NULL CHECK (status BETWEEN 200 AND 399),
        sealed bytea NOT NULL,
        expires_at timestamptz NOT NULL CHECK (expires_at < '9000-01-01 00:00:00+00')
    )
    """,
    "CREATE INDEX idempotency_answer_by_expiry ON idempotency_answer (expires_at)",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_answer TO tidegate_app",
)
KEYED = ("ledger_tx", "credit_adjustment")  # what money moves by has keys of its own, for ever
LENGTH = "CHECK (char_length(idempotency_key) BETWEEN 1 AND 255)"


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table in KEYED:
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_idempotency_key_check")
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {table}_idempotency_key_check {LENGTH}")

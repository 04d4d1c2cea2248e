"""Let paid credit expire: beside the lot of a tenant that never does, one lot for each top-up that does."""

from alembic import op

revision = "0033_paid_expiry"
down_revision = "0032_preemptions"
branch_labels = None
depends_on = None

STATEMENTS = (
    # One account per lot, of paid credit too; one lot of it that never expires.
    "DROP INDEX ledger_account_one",
    """
    CREATE UNIQUE INDEX ledger_account_one ON ledger_account (tenant_id, code, currency) NULLS NOT DISTINCT
    WHERE code NOT IN ('liability.credit_paid', 'liability.credit_promo', 'liability.credit_goodwill')
    """,
    "CREATE UNIQUE INDEX credit_lot_one_paid ON credit_lot (tenant_id) WHERE source = 'paid' AND expires_at IS NULL",
    # The check without a name of its own that kept paid credit from expiring.
    """
    DO $$
    DECLARE found text;
    BEGIN
        SELECT conname INTO STRICT found FROM pg_constraint
        WHERE conrelid = 'credit_lot'::regclass AND contype = 'c'
          AND pg_get_constraintdef(oid) LIKE '%expires_at IS NULL%';
        EXECUTE format('ALTER TABLE credit_lot DROP CONSTRAINT %I', found);
    END $$
    """,
    """
    ALTER TABLE credit_lot ADD CONSTRAINT credit_lot_paid_for_all_check
        CHECK (source <> 'paid' OR (models IS NULL AND tiers IS NULL))
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

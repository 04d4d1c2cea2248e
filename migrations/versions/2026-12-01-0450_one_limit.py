"""Put top-ups, what a tenant may owe, and billed quarantine under the limit of one person, as adjustments."""

from alembic import op

revision = "0029_one_limit"
down_revision = "0028_who_asks"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE credit_adjustment DROP CONSTRAINT credit_adjustment_kind_check",
    "ALTER TABLE credit_adjustment DROP CONSTRAINT credit_adjustment_amount_pico_check",
    "ALTER TABLE credit_adjustment DROP CONSTRAINT credit_adjustment_note_check",
    # Of the table's checks without a name of its own, the one that gives what is posted its transaction.
    """
    DO $$
    DECLARE found text;
    BEGIN
        SELECT conname INTO STRICT found FROM pg_constraint
        WHERE conrelid = 'credit_adjustment'::regclass AND contype = 'c'
          AND pg_get_constraintdef(oid) LIKE '%tx_id IS NOT NULL%';
        EXECUTE format('ALTER TABLE credit_adjustment DROP CONSTRAINT %I', found);
    END $$
    """,
    # `details`: of terms the mode and the limit, of billed usage the event and its counts. New terms raise what may be
    # owed by the amount, or by nothing.
    """
    ALTER TABLE credit_adjustment
        ADD details jsonb,
        ADD CONSTRAINT credit_adjustment_kind_check
            CHECK (kind IN ('grant', 'reversal', 'top_up', 'terms', 'usage')),
        ADD CONSTRAINT credit_adjustment_amount_pico_check
            CHECK (amount_pico > 0 OR (amount_pico = 0 AND kind IN ('terms', 'usage'))),
        ADD CONSTRAINT credit_adjustment_note_check
            CHECK (char_length(note) <= 500 AND (note <> '' OR kind = 'top_up')),
        ADD CONSTRAINT credit_adjustment_tx_check
            CHECK ((tx_id IS NOT NULL) = (state = 'posted' AND kind IN ('grant', 'reversal', 'top_up'))),
        ADD CONSTRAINT credit_adjustment_details_check CHECK ((details IS NOT NULL) = (kind IN ('terms', 'usage')))
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

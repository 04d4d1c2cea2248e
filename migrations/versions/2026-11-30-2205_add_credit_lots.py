"""Add credit lots with source, scope and expiry, their contra accounts, reversals, and adjustments by two people."""

from alembic import op

revision = "0014_credit_lots"
down_revision = "0013_sign_in"
branch_labels = None
depends_on = None

KINDS = "('top_up', 'usage', 'write_off', 'grant', 'expiry', 'reversal')"

STATEMENTS = (
    # One account per lot: only lots may have several of one code.
    "ALTER TABLE ledger_account DROP CONSTRAINT ledger_account_tenant_id_code_currency_key",
    """
    CREATE UNIQUE INDEX ledger_account_one ON ledger_account (tenant_id, code, currency) NULLS NOT DISTINCT
    WHERE code NOT IN ('liability.credit_promo', 'liability.credit_goodwill')
    """,
    "ALTER TABLE credit_lot DROP CONSTRAINT credit_lot_source_check",
    # Without models or tiers: for all. The contra accounts are there when nobody paid for the credit.
    """
    ALTER TABLE credit_lot
        ADD CONSTRAINT credit_lot_source_check CHECK (source IN ('paid', 'promo', 'goodwill')),
        ADD models uuid[] CHECK (cardinality(models) BETWEEN 1 AND 100),
        ADD tiers smallint[] CHECK (cardinality(tiers) BETWEEN 1 AND 3 AND tiers <@ ARRAY[0, 1, 2]::smallint[]),
        ADD unearned_account uuid REFERENCES ledger_account (id),
        ADD used_account uuid REFERENCES ledger_account (id),
        ADD CHECK ((source = 'paid') = (unearned_account IS NULL)),
        ADD CHECK ((source = 'paid') = (used_account IS NULL)),
        ADD CHECK (source <> 'paid' OR (expires_at IS NULL AND models IS NULL AND tiers IS NULL)),
        ADD CHECK (date_trunc('minute', expires_at, 'UTC') = expires_at)
    """,
    "CREATE INDEX credit_lot_by_expiry ON credit_lot (expires_at) WHERE expires_at IS NOT NULL",
    "ALTER TABLE ledger_tx DROP CONSTRAINT ledger_tx_kind_check",
    f"ALTER TABLE ledger_tx ADD CONSTRAINT ledger_tx_kind_check CHECK (kind IN {KINDS})",
    # A transaction is reversed once, and a reversal never.
    """
    ALTER TABLE ledger_tx
        ADD effective_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        ADD reverses_tx uuid UNIQUE REFERENCES ledger_tx (id),
        ADD CHECK ((kind = 'reversal') = (reverses_tx IS NOT NULL))
    """,
    "ALTER TABLE ledger_tx DISABLE TRIGGER ledger_tx_append_only",
    "UPDATE ledger_tx SET effective_at = booked_at",
    "ALTER TABLE ledger_tx ENABLE TRIGGER ledger_tx_append_only",
    # What operators ask for beside payments: credit that nobody paid for, and reversals. Above a limit a second person
    # decides, which this table makes sure of.
    """
    CREATE TABLE credit_adjustment (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL REFERENCES billing_profile (tenant_id),
        kind text NOT NULL CHECK (kind IN ('grant', 'reversal')),
        amount_pico numeric(38, 0) NOT NULL CHECK (amount_pico > 0),
        source text CHECK (source IN ('promo', 'goodwill')),
        expires_at timestamptz,
        models uuid[],
        tiers smallint[],
        reverses_tx uuid REFERENCES ledger_tx (id),
        note text NOT NULL CHECK (char_length(note) BETWEEN 1 AND 500),
        idempotency_key text NOT NULL CHECK (char_length(idempotency_key) BETWEEN 1 AND 200),
        body_sha256 bytea NOT NULL CHECK (octet_length(body_sha256) = 32),
        requested_by uuid NOT NULL,
        requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        needs_approval boolean NOT NULL,
        state text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'posted', 'declined')),
        decided_by uuid,
        decided_at timestamptz,
        tx_id uuid UNIQUE REFERENCES ledger_tx (id),
        UNIQUE (tenant_id, idempotency_key),
        CHECK ((kind = 'grant') = (source IS NOT NULL)),
        CHECK ((kind = 'reversal') = (reverses_tx IS NOT NULL)),
        CHECK ((state = 'posted') = (tx_id IS NOT NULL)),
        CHECK ((decided_by IS NULL) = (decided_at IS NULL)),
        CONSTRAINT credit_adjustment_two_people CHECK (decided_by <> requested_by),
        CHECK (state = 'pending' OR decided_by IS NOT NULL OR NOT needs_approval)
    )
    """,
    "CREATE INDEX credit_adjustment_by_tenant ON credit_adjustment (tenant_id, id)",
    "CREATE INDEX credit_adjustment_pending ON credit_adjustment (id) WHERE state = 'pending'",
    """
    CREATE FUNCTION keep_decided_adjustment() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' OR OLD.state <> 'pending' THEN
            RAISE EXCEPTION 'adjustment % is decided and cannot change', OLD.id USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER credit_adjustment_kept BEFORE UPDATE OR DELETE ON credit_adjustment
    FOR EACH ROW EXECUTE FUNCTION keep_decided_adjustment()
    """,
    """
    CREATE TRIGGER credit_adjustment_not_emptied BEFORE TRUNCATE ON credit_adjustment
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    "GRANT SELECT, INSERT ON credit_adjustment TO tidegate_app",
    "GRANT UPDATE (state, decided_by, decided_at, tx_id) ON credit_adjustment TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

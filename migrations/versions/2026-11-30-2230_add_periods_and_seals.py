"""Add accounting periods, which close for good, and seals over every transaction, chained."""

from alembic import op

revision = "0015_periods_and_seals"
down_revision = "0014_credit_lots"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Months that are being closed or are closed; all later ones are open.
    """
    CREATE TABLE ledger_period (
        month date PRIMARY KEY CHECK (extract(day FROM month) = 1),
        state text NOT NULL DEFAULT 'closing' CHECK (state IN ('closing', 'closed')),
        begun_at timestamptz NOT NULL,
        closed_at timestamptz,
        trial_balance_sha256 bytea CHECK (octet_length(trial_balance_sha256) = 32),
        CHECK ((state = 'closed') = (closed_at IS NOT NULL)),
        CHECK ((state = 'closed') = (trial_balance_sha256 IS NOT NULL))
    )
    """,
    """
    CREATE FUNCTION keep_closed_period() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' OR OLD.state = 'closed' THEN
            RAISE EXCEPTION 'the period % does not open again', OLD.month USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER ledger_period_kept BEFORE UPDATE OR DELETE ON ledger_period
    FOR EACH ROW EXECUTE FUNCTION keep_closed_period()
    """,
    """
    CREATE TRIGGER ledger_period_not_emptied BEFORE TRUNCATE ON ledger_period
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    "ALTER TABLE ledger_tx ADD period date",
    "ALTER TABLE ledger_tx DISABLE TRIGGER ledger_tx_append_only",
    "UPDATE ledger_tx SET period = date_trunc('month', effective_at AT TIME ZONE 'UTC')::date",
    "ALTER TABLE ledger_tx ENABLE TRIGGER ledger_tx_append_only",
    "ALTER TABLE ledger_tx ALTER period SET NOT NULL",
    # The month in which it happened, or where that is closed the first open one. The lock is the closing's.
    """
    CREATE FUNCTION book_in_open_period() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(7481206);
        NEW.period := greatest(date_trunc('month', NEW.effective_at AT TIME ZONE 'UTC')::date,
                               (SELECT (max(month) + interval '1 month')::date FROM public.ledger_period));
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER ledger_tx_period BEFORE INSERT ON ledger_tx
    FOR EACH ROW EXECUTE FUNCTION book_in_open_period()
    """,
    # One seal covers some transactions; each has a leaf, the hash of all its fields, at its place.
    """
    CREATE TABLE ledger_seal (
        seq bigint PRIMARY KEY CHECK (seq > 0),
        transactions integer NOT NULL CHECK (transactions > 0),
        merkle_root bytea NOT NULL CHECK (octet_length(merkle_root) = 32),
        prev_hash bytea NOT NULL CHECK (octet_length(prev_hash) = 32),
        hash bytea NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
        sealed_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    """
    CREATE TABLE ledger_leaf (
        seal_seq bigint NOT NULL REFERENCES ledger_seal (seq),
        place integer NOT NULL CHECK (place >= 0),
        tx_id uuid NOT NULL UNIQUE REFERENCES ledger_tx (id),
        hash bytea NOT NULL CHECK (octet_length(hash) = 32),
        PRIMARY KEY (seal_seq, place)
    )
    """,
    *(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        for table in ("ledger_seal", "ledger_leaf")
    ),
    "GRANT SELECT, INSERT ON ledger_seal, ledger_leaf TO tidegate_app",
    "GRANT SELECT, INSERT ON ledger_period TO tidegate_app",
    "GRANT UPDATE (state, closed_at, trial_balance_sha256) ON ledger_period TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Add re-rating: runs, what they mean for each tenant, a line per event, and from which account what moved."""

from alembic import op

revision = "0023_rerating"
down_revision = "0022_alerts"
branch_labels = None
depends_on = None

KINDS = "('top_up', 'usage', 'write_off', 'grant', 'expiry', 'reversal', 'rerating')"

RUNS = (
    "ALTER TABLE ledger_tx DROP CONSTRAINT ledger_tx_kind_check",
    f"ALTER TABLE ledger_tx ADD CONSTRAINT ledger_tx_kind_check CHECK (kind IN {KINDS})",
    # Counted first, then executed; above a limit by another operator than who asked, which this table makes sure of.
    """
    CREATE TABLE rerating (
        id uuid PRIMARY KEY,
        currency text NOT NULL CHECK (currency IN ('USD', 'CNY')),
        wrong_versions uuid[] NOT NULL CHECK (cardinality(wrong_versions) BETWEEN 1 AND 100),
        right_version uuid NOT NULL REFERENCES price_version (id),
        models uuid[] CHECK (cardinality(models) BETWEEN 1 AND 100),
        tiers smallint[] CHECK (cardinality(tiers) BETWEEN 1 AND 3 AND tiers <@ ARRAY[0, 1, 2]::smallint[]),
        meters text[] CHECK (cardinality(meters) BETWEEN 1 AND 7),
        since timestamptz NOT NULL,
        until timestamptz NOT NULL,
        charge_more boolean NOT NULL,
        note text NOT NULL CHECK (char_length(note) BETWEEN 1 AND 500),
        idempotency_key text NOT NULL UNIQUE CHECK (char_length(idempotency_key) BETWEEN 1 AND 255),
        body_sha256 bytea NOT NULL CHECK (octet_length(body_sha256) = 32),
        requested_by uuid NOT NULL,
        requested_at timestamptz NOT NULL,
        state text NOT NULL DEFAULT 'counting'
            CHECK (state IN ('counting', 'counted', 'running', 'done', 'cancelled')),
        needs_approval boolean NOT NULL DEFAULT false,
        executed_by uuid,
        executed_at timestamptz,
        finished_at timestamptz,
        CHECK (until > since),
        CHECK (right_version <> ALL (wrong_versions)),
        CHECK ((executed_by IS NULL) = (executed_at IS NULL)),
        CHECK (state NOT IN ('running', 'done') OR executed_by IS NOT NULL),
        CHECK ((state IN ('done', 'cancelled')) = (finished_at IS NOT NULL)),
        CONSTRAINT rerating_two_people CHECK (NOT needs_approval OR executed_by <> requested_by)
    )
    """,
    # `…_after` is the last event looked at: a run that was interrupted goes on there. Figures of the count, then of
    # the execution. Pico.
    """
    CREATE TABLE rerating_tenant (
        run_id uuid NOT NULL REFERENCES rerating (id),
        tenant_id uuid NOT NULL REFERENCES billing_profile (tenant_id),
        requests bigint NOT NULL,
        counted boolean NOT NULL DEFAULT false,
        counted_after uuid,
        events bigint NOT NULL DEFAULT 0,
        credit_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (credit_pico >= 0),
        charge_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (charge_pico >= 0),
        uncharged bigint NOT NULL DEFAULT 0,
        uncharged_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (uncharged_pico >= 0),
        unpriced bigint NOT NULL DEFAULT 0,
        done boolean NOT NULL DEFAULT false,
        done_after uuid,
        done_events bigint NOT NULL DEFAULT 0,
        credited_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (credited_pico >= 0),
        given_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (given_pico BETWEEN 0 AND credited_pico),
        charged_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (charged_pico >= 0),
        overrun_pico numeric(38, 0) NOT NULL DEFAULT 0 CHECK (overrun_pico BETWEEN 0 AND charged_pico),
        PRIMARY KEY (run_id, tenant_id)
    )
    """,
)

EFFECTS = (
    # What an event comes to after its seq-th re-rating. `version_id` prices it then, all but the meters of runs that
    # named some. A run touches an event once.
    """
    CREATE TABLE usage_rerating (
        tenant_id uuid NOT NULL,
        event_id uuid NOT NULL,
        seq smallint NOT NULL CHECK (seq > 0),
        run_id uuid NOT NULL REFERENCES rerating (id),
        tx_id uuid NOT NULL REFERENCES ledger_tx (id),
        version_id uuid NOT NULL REFERENCES price_version (id),
        from_pico bigint NOT NULL CHECK (from_pico >= 0),
        from_min_pico bigint NOT NULL CHECK (from_min_pico BETWEEN 0 AND from_pico),
        to_pico bigint NOT NULL CHECK (to_pico >= 0),
        to_min_pico bigint NOT NULL CHECK (to_min_pico BETWEEN 0 AND to_pico),
        project_id uuid NOT NULL,
        model_id uuid NOT NULL,
        model text NOT NULL,
        tier smallint NOT NULL,
        price_version_id uuid NOT NULL,
        outcome text NOT NULL,
        admitted_at timestamptz NOT NULL,
        PRIMARY KEY (tenant_id, event_id, seq),
        UNIQUE (run_id, tenant_id, event_id)
    )
    """,
    "CREATE INDEX usage_rerating_by_time ON usage_rerating (tenant_id, admitted_at)",
    "CREATE INDEX usage_rerating_by_tx ON usage_rerating (tx_id)",
    # Which account paid more (above 0) or got back (below 0) for the usage of which transaction.
    """
    CREATE TABLE rerating_move (
        tx_id uuid NOT NULL REFERENCES ledger_tx (id),
        usage_tx uuid NOT NULL REFERENCES ledger_tx (id),
        account_id uuid NOT NULL REFERENCES ledger_account (id),
        amount numeric(38, 0) NOT NULL CHECK (amount <> 0),
        PRIMARY KEY (tx_id, usage_tx, account_id)
    )
    """,
    "CREATE INDEX rerating_move_by_usage ON rerating_move (usage_tx)",
    *(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        for table in ("usage_rerating", "rerating_move")
    ),
    *(
        f"CREATE TRIGGER {table}_kept BEFORE DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        for table in ("rerating", "rerating_tenant")
    ),
    """
    CREATE FUNCTION keep_finished_rerating() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF OLD.state IN ('done', 'cancelled') THEN
            RAISE EXCEPTION 'the re-rating % is over and cannot change', OLD.id USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER rerating_finished BEFORE UPDATE ON rerating
    FOR EACH ROW EXECUTE FUNCTION keep_finished_rerating()
    """,
)

GRANTS = (
    "GRANT SELECT, INSERT ON rerating, rerating_tenant, usage_rerating, rerating_move TO tidegate_app",
    "GRANT UPDATE (state, needs_approval, executed_by, executed_at, finished_at) ON rerating TO tidegate_app",
    """
    GRANT UPDATE (counted, counted_after, events, credit_pico, charge_pico, uncharged, uncharged_pico, unpriced, done,
                  done_after, done_events, credited_pico, given_pico, charged_pico, overrun_pico)
    ON rerating_tenant TO tidegate_app
    """,
)


def upgrade() -> None:
    for statement in (*RUNS, *EFFECTS, *GRANTS):
        op.execute(statement)

"""Create money: price book, ledger, usage events (daily partitions), rollups and quarantine."""

from alembic import op

revision = "0004_billing"
down_revision = "0003_catalog"
branch_labels = None
depends_on = None

METERS = "('input', 'cached_input', 'cache_write', 'output', 'reasoning', 'request')"
OUTCOMES = "('completed', 'client_abort', 'upstream_error', 'timeout', 'preempted')"

PRICE_BOOK = (
    # One book per currency; a published version is the whole list from its effective instant on.
    """
    CREATE TABLE price_book (
        id uuid PRIMARY KEY,
        name text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 120),
        currency text NOT NULL UNIQUE CHECK (currency IN ('USD', 'CNY')),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    """
    CREATE TABLE price_version (
        id uuid PRIMARY KEY,
        book_id uuid NOT NULL REFERENCES price_book (id),
        state text NOT NULL DEFAULT 'draft' CHECK (state IN ('draft', 'published')),
        note text NOT NULL DEFAULT '' CHECK (char_length(note) <= 500),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        effective_at timestamptz,
        published_at timestamptz,
        content_sha256 bytea CHECK (octet_length(content_sha256) = 32),
        UNIQUE (book_id, effective_at),
        CHECK ((state = 'published') = (effective_at IS NOT NULL)),
        CHECK ((state = 'published') = (published_at IS NOT NULL)),
        CHECK ((state = 'published') = (content_sha256 IS NOT NULL))
    )
    """,
    # Tokens in pico per token (six decimals per million are whole pico); meter `request` in pico per request.
    f"""
    CREATE TABLE price_item (
        version_id uuid NOT NULL REFERENCES price_version (id),
        model_id uuid NOT NULL,
        tier smallint NOT NULL CHECK (tier BETWEEN 0 AND 2),
        meter text NOT NULL CHECK (meter IN {METERS}),
        tenant_id uuid,
        unit_price_pico bigint NOT NULL CHECK (unit_price_pico BETWEEN 0 AND 1000000000000),
        UNIQUE NULLS NOT DISTINCT (version_id, model_id, tier, meter, tenant_id)
    )
    """,
    """
    CREATE FUNCTION keep_published_version() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF OLD.state = 'published' THEN
            RAISE EXCEPTION 'price version % is published and cannot change', OLD.id
                USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    END $$
    """,
    """
    CREATE TRIGGER price_version_immutable BEFORE UPDATE OR DELETE ON price_version
    FOR EACH ROW EXECUTE FUNCTION keep_published_version()
    """,
    # The lock keeps a draft from being published between this look and the change's commit.
    """
    CREATE FUNCTION keep_published_items() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE version_state text;
    DECLARE version uuid;
    BEGIN
        FOREACH version IN ARRAY CASE TG_OP
            WHEN 'INSERT' THEN ARRAY[NEW.version_id]
            WHEN 'DELETE' THEN ARRAY[OLD.version_id]
            ELSE ARRAY[OLD.version_id, NEW.version_id] END
        LOOP
            SELECT state INTO version_state FROM price_version WHERE id = version FOR SHARE;
            IF version_state = 'published' THEN
                RAISE EXCEPTION 'price version % is published and its items cannot change', version
                    USING ERRCODE = 'restrict_violation';
            END IF;
        END LOOP;
        RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    END $$
    """,
    """
    CREATE TRIGGER price_item_immutable BEFORE INSERT OR UPDATE OR DELETE ON price_item
    FOR EACH ROW EXECUTE FUNCTION keep_published_items()
    """,
    """
    CREATE TRIGGER price_version_kept BEFORE TRUNCATE ON price_version
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    """
    CREATE TRIGGER price_item_kept BEFORE TRUNCATE ON price_item
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
)

LEDGER = (
    # `tenant_id` is null for the platform's own accounts. Debits may exceed credits by `credit_limit` at most where the
    # account is bounded: prepaid credit with 0, a postpaid tenant's unbilled usage with its limit, by the same rule.
    """
    CREATE TABLE ledger_account (
        id uuid PRIMARY KEY,
        tenant_id uuid,
        code text NOT NULL CHECK (code ~ '^[a-z_]+([.][a-z_]+)*$'),
        currency text NOT NULL CHECK (currency IN ('USD', 'CNY')),
        normal text NOT NULL CHECK (normal IN ('debit', 'credit')),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        UNIQUE NULLS NOT DISTINCT (tenant_id, code, currency),
        UNIQUE (id, currency)
    )
    """,
    """
    CREATE TABLE ledger_balance (
        account_id uuid PRIMARY KEY REFERENCES ledger_account (id),
        debit numeric(38, 0) NOT NULL DEFAULT 0 CHECK (debit >= 0),
        credit numeric(38, 0) NOT NULL DEFAULT 0 CHECK (credit >= 0),
        bounded boolean NOT NULL DEFAULT false,
        credit_limit numeric(38, 0) NOT NULL DEFAULT 0 CHECK (credit_limit >= 0),
        CONSTRAINT ledger_balance_limit_check CHECK (NOT bounded OR debit <= credit + credit_limit)
    ) WITH (fillfactor = 50)
    """,
    # How a tenant pays, and the one row that serialises its postings. `version` rises with every change of its balance.
    """
    CREATE TABLE billing_profile (
        tenant_id uuid PRIMARY KEY,
        currency text NOT NULL CHECK (currency IN ('USD', 'CNY')),
        mode text NOT NULL CHECK (mode IN ('prepaid', 'postpaid')),
        unbilled_account uuid REFERENCES ledger_account (id),
        revenue_account uuid NOT NULL REFERENCES ledger_account (id),
        overrun_account uuid NOT NULL REFERENCES ledger_account (id),
        version bigint NOT NULL DEFAULT 1,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        CHECK ((mode = 'postpaid') = (unbilled_account IS NOT NULL))
    ) WITH (fillfactor = 50)
    """,
    # Prepaid credit lies in lots, each an account; usage takes from the lowest priority number first, then the oldest.
    """
    CREATE TABLE credit_lot (
        account_id uuid PRIMARY KEY REFERENCES ledger_account (id),
        tenant_id uuid NOT NULL REFERENCES billing_profile (tenant_id),
        source text NOT NULL CHECK (source IN ('paid', 'promo')),
        priority smallint NOT NULL DEFAULT 100,
        expires_at timestamptz,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    "CREATE INDEX credit_lot_by_tenant ON credit_lot (tenant_id, priority, account_id)",
    """
    CREATE TABLE ledger_tx (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL,
        kind text NOT NULL CHECK (kind IN ('top_up', 'usage', 'write_off')),
        idempotency_key text CHECK (char_length(idempotency_key) BETWEEN 1 AND 200),
        body_sha256 bytea CHECK (octet_length(body_sha256) = 32),
        actor text NOT NULL DEFAULT '' CHECK (char_length(actor) <= 120),
        note text NOT NULL DEFAULT '' CHECK (char_length(note) <= 500),
        booked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        UNIQUE (tenant_id, kind, idempotency_key),
        CHECK ((idempotency_key IS NULL) = (body_sha256 IS NULL))
    )
    """,
    "CREATE INDEX ledger_tx_by_tenant ON ledger_tx (tenant_id, booked_at)",
    """
    CREATE TABLE ledger_transfer (
        tx_id uuid NOT NULL REFERENCES ledger_tx (id),
        seq smallint NOT NULL CHECK (seq >= 0),
        debit_account uuid NOT NULL,
        credit_account uuid NOT NULL,
        currency text NOT NULL,
        amount numeric(38, 0) NOT NULL CHECK (amount > 0),
        PRIMARY KEY (tx_id, seq),
        CHECK (debit_account <> credit_account),
        FOREIGN KEY (debit_account, currency) REFERENCES ledger_account (id, currency),
        FOREIGN KEY (credit_account, currency) REFERENCES ledger_account (id, currency)
    )
    """,
)

USAGE = (
    # The day is the id's own, so that a repeated event always meets its first copy in the same partition.
    f"""
    CREATE TABLE usage_event (
        id uuid NOT NULL,
        tenant_id uuid NOT NULL,
        day date NOT NULL,
        tx_id uuid NOT NULL,
        project_id uuid NOT NULL,
        key_id uuid NOT NULL,
        model_id uuid NOT NULL,
        version_id uuid NOT NULL,
        deployment_id uuid NOT NULL,
        price_version_id uuid NOT NULL,
        model text NOT NULL,
        endpoint text NOT NULL,
        tier smallint NOT NULL CHECK (tier BETWEEN 0 AND 2),
        currency text NOT NULL CHECK (currency IN ('USD', 'CNY')),
        outcome text NOT NULL CHECK (outcome IN {OUTCOMES}),
        count_source text NOT NULL CHECK (count_source IN ('engine', 'gateway')),
        stream boolean NOT NULL,
        http_status smallint NOT NULL,
        input_uncached bigint NOT NULL CHECK (input_uncached >= 0),
        input_cached bigint NOT NULL CHECK (input_cached >= 0),
        input_cache_write bigint NOT NULL CHECK (input_cache_write >= 0),
        output bigint NOT NULL CHECK (output >= 0),
        reasoning bigint NOT NULL CHECK (reasoning >= 0),
        amount_pico bigint NOT NULL CHECK (amount_pico >= 0),
        admitted_at timestamptz NOT NULL,
        ended_at timestamptz NOT NULL,
        queue_us bigint NOT NULL,
        ttft_us bigint NOT NULL,
        upstream_id text NOT NULL,
        posted_at timestamptz NOT NULL DEFAULT statement_timestamp(),
        PRIMARY KEY (tenant_id, id, day),
        CONSTRAINT usage_event_day_check CHECK (day = (uuid_extract_timestamp(id) AT TIME ZONE 'UTC')::date)
    ) PARTITION BY RANGE (day)
    """,
    # Additive, kept when the events' partitions are long gone.
    """
    CREATE TABLE usage_rollup (
        tenant_id uuid NOT NULL,
        minute timestamptz NOT NULL,
        project_id uuid NOT NULL,
        key_id uuid NOT NULL,
        model_id uuid NOT NULL,
        model text NOT NULL,
        endpoint text NOT NULL,
        tier smallint NOT NULL,
        outcome text NOT NULL,
        price_version_id uuid NOT NULL,
        currency text NOT NULL,
        requests bigint NOT NULL CHECK (requests > 0),
        input_uncached numeric(38, 0) NOT NULL CHECK (input_uncached >= 0),
        input_cached numeric(38, 0) NOT NULL CHECK (input_cached >= 0),
        input_cache_write numeric(38, 0) NOT NULL CHECK (input_cache_write >= 0),
        output numeric(38, 0) NOT NULL CHECK (output >= 0),
        reasoning numeric(38, 0) NOT NULL CHECK (reasoning >= 0),
        amount_pico numeric(38, 0) NOT NULL CHECK (amount_pico >= 0),
        PRIMARY KEY (tenant_id, minute, project_id, key_id, model_id, model, endpoint, tier, outcome, price_version_id)
    ) WITH (fillfactor = 70)
    """,
    # What must not be billed by itself: kept whole, for a person. `payload` is the event as the gateway wrote it.
    """
    CREATE TABLE usage_quarantine (
        tenant_id uuid NOT NULL,
        id uuid NOT NULL,
        reason text NOT NULL,
        amount_pico numeric(38, 0) NOT NULL,
        admitted_at timestamptz NOT NULL,
        model text NOT NULL,
        outcome text NOT NULL,
        raw_usage text NOT NULL,
        payload bytea NOT NULL,
        quarantined_at timestamptz NOT NULL DEFAULT statement_timestamp(),
        PRIMARY KEY (tenant_id, id)
    )
    """,
    # Runs as the owner, because the application may not create tables. Attaching needs no exclusive lock on the parent.
    """
    CREATE FUNCTION ensure_usage_partition(wanted date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE name text := 'usage_event_' || to_char(wanted, 'YYYYMMDD');
    BEGIN
        IF wanted NOT BETWEEN DATE '2024-01-01' AND (now() AT TIME ZONE 'UTC')::date + 40 THEN
            RAISE EXCEPTION 'no partition for %: out of range', wanted USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF to_regclass('public.' || name) IS NOT NULL THEN
            RETURN false;
        END IF;
        PERFORM pg_advisory_xact_lock(7481203);
        IF to_regclass('public.' || name) IS NOT NULL THEN
            RETURN false;
        END IF;
        EXECUTE format('CREATE TABLE public.%I (LIKE public.usage_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', name);
        EXECUTE format('ALTER TABLE public.usage_event ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)',
                       name, wanted, wanted + 1);
        EXECUTE format('CREATE TRIGGER append_only BEFORE TRUNCATE ON public.%I '
                       'FOR EACH STATEMENT EXECUTE FUNCTION public.refuse_change()', name);
        RETURN true;
    END $$
    """,
    "REVOKE ALL ON FUNCTION ensure_usage_partition(date) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION ensure_usage_partition(date) TO tidegate_app",
)

APPEND_ONLY = ("ledger_tx", "ledger_transfer", "ledger_account", "credit_lot", "usage_quarantine")
GUARDS = (
    *(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        for table in APPEND_ONLY
    ),
    # Row triggers are inherited by partitions, so that a partition named directly is guarded too.
    """
    CREATE TRIGGER usage_event_append_only BEFORE UPDATE OR DELETE ON usage_event
    FOR EACH ROW EXECUTE FUNCTION refuse_change()
    """,
    """
    CREATE TRIGGER usage_event_kept BEFORE TRUNCATE ON usage_event
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
)

GRANTS = (
    "GRANT SELECT, INSERT, UPDATE, DELETE ON price_version, price_item TO tidegate_app",
    "GRANT SELECT, INSERT ON price_book TO tidegate_app",
    "GRANT SELECT, INSERT ON ledger_account, ledger_tx, ledger_transfer, credit_lot TO tidegate_app",
    "GRANT SELECT, INSERT ON ledger_balance, billing_profile TO tidegate_app",
    "GRANT UPDATE (debit, credit, credit_limit) ON ledger_balance TO tidegate_app",
    "GRANT UPDATE (version) ON billing_profile TO tidegate_app",
    "GRANT SELECT, INSERT ON usage_event, usage_quarantine TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE ON usage_rollup TO tidegate_app",
)


def upgrade() -> None:
    for statement in (*PRICE_BOOK, *LEDGER, *USAGE, *GUARDS, *GRANTS):
        op.execute(statement)

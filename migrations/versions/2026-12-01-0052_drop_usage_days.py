"""Let days of usage events be dropped by policy: closed first, then checked, summed up for `verify`, and dropped."""

from alembic import op

revision = "0026_usage_days"
down_revision = "0025_quarantine_queue"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Rows come by minute, so that the sums of a day lie together.
    "CREATE INDEX usage_rollup_by_minute ON usage_rollup USING brin (minute) WITH (autosummarize = on)",
    # Days (UTC, of the event's id) that take no more events. `seq`, `hash` and the sums are those of dropping it: each
    # hash is over what was kept and over the hash before.
    """
    CREATE TABLE usage_day (
        day date PRIMARY KEY,
        state text NOT NULL DEFAULT 'closed' CHECK (state IN ('closed', 'dropped')),
        closed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        dropped_at timestamptz,
        seq bigint UNIQUE CHECK (seq > 0),
        events bigint CHECK (events >= 0),
        kept_sha256 bytea CHECK (octet_length(kept_sha256) = 32),
        prev_hash bytea CHECK (octet_length(prev_hash) = 32),
        hash bytea UNIQUE CHECK (octet_length(hash) = 32),
        CHECK ((state = 'dropped') = (dropped_at IS NOT NULL)),
        CHECK (num_nulls(dropped_at, seq, events, kept_sha256, prev_hash, hash) IN (0, 6))
    )
    """,
    # What a dropped day's events came to by transaction, and what they were of the rollup.
    """
    CREATE TABLE usage_day_tx (
        day date NOT NULL REFERENCES usage_day (day),
        tx_id uuid NOT NULL REFERENCES ledger_tx (id),
        tenant_id uuid NOT NULL,
        events bigint NOT NULL CHECK (events > 0),
        amount_pico numeric(38, 0) NOT NULL CHECK (amount_pico >= 0),
        min_charge_pico numeric(38, 0) NOT NULL CHECK (min_charge_pico >= 0),
        PRIMARY KEY (day, tx_id)
    )
    """,
    """
    CREATE TABLE usage_day_rollup (
        day date NOT NULL REFERENCES usage_day (day),
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
        input_uncached numeric(38, 0) NOT NULL,
        input_cached numeric(38, 0) NOT NULL,
        input_cache_write numeric(38, 0) NOT NULL,
        output numeric(38, 0) NOT NULL,
        reasoning numeric(38, 0) NOT NULL,
        amount_pico numeric(38, 0) NOT NULL,
        min_charge_pico numeric(38, 0) NOT NULL,
        PRIMARY KEY (day, tenant_id, minute, project_id, key_id, model_id, model, endpoint, tier, outcome,
                     price_version_id)
    )
    """,
    "CREATE INDEX usage_day_rollup_by_minute ON usage_day_rollup USING brin (minute) WITH (autosummarize = on)",
    *(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        for table in ("usage_day_tx", "usage_day_rollup")
    ),
    """
    CREATE FUNCTION keep_dropped_day() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' OR OLD.state = 'dropped' THEN
            RAISE EXCEPTION 'the day % is closed for good', OLD.day USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER usage_day_kept BEFORE UPDATE OR DELETE ON usage_day
    FOR EACH ROW EXECUTE FUNCTION keep_dropped_day()
    """,
    """
    CREATE TRIGGER usage_day_not_emptied BEFORE TRUNCATE ON usage_day
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    """
    CREATE FUNCTION refuse_closed_day() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the day takes no more usage' USING ERRCODE = 'restrict_violation';
    END $$
    """,
    # Waits for what is being posted to that day; from then on nothing can be.
    """
    CREATE FUNCTION close_usage_day(wanted date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE name text := 'usage_event_' || to_char(wanted, 'YYYYMMDD');
    BEGIN
        IF wanted > (now() AT TIME ZONE 'UTC')::date - 7 THEN
            RAISE EXCEPTION 'the day % is too young to be closed', wanted USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF to_regclass('public.' || name) IS NULL OR EXISTS (SELECT FROM public.usage_day WHERE day = wanted) THEN
            RETURN false;
        END IF;
        EXECUTE format('LOCK TABLE public.%I IN SHARE ROW EXCLUSIVE MODE', name);
        EXECUTE format('CREATE TRIGGER closed BEFORE INSERT ON public.%I '
                       'FOR EACH ROW EXECUTE FUNCTION public.refuse_closed_day()', name);
        INSERT INTO public.usage_day (day) VALUES (wanted);
        RETURN true;
    END $$
    """,
    # Only what was counted in the same transaction goes: so many events, each in a sum that is kept.
    """
    CREATE FUNCTION drop_usage_day(wanted date) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE name text := 'usage_event_' || to_char(wanted, 'YYYYMMDD');
    DECLARE kept public.usage_day;
    DECLARE found bigint;
    BEGIN
        SELECT * INTO kept FROM public.usage_day WHERE day = wanted;
        EXECUTE format('SELECT count(*) FROM public.%I', name) INTO found;
        IF kept.state IS DISTINCT FROM 'dropped' OR kept.events <> found
           OR found <> (SELECT coalesce(sum(events), 0) FROM public.usage_day_tx WHERE day = wanted)
           OR found <> (SELECT coalesce(sum(requests), 0) FROM public.usage_day_rollup WHERE day = wanted)
           OR EXISTS (SELECT FROM public.usage_day_tx k WHERE k.day = wanted
                      AND NOT EXISTS (SELECT FROM public.ledger_leaf f WHERE f.tx_id = k.tx_id)) THEN
            RAISE EXCEPTION 'the day % is not summed up, or not sealed', wanted USING ERRCODE = 'restrict_violation';
        END IF;
        EXECUTE format('DROP TABLE public.%I', name);
    END $$
    """,
    # As before, but a day that was dropped does not come back.
    """
    CREATE OR REPLACE FUNCTION ensure_usage_partition(wanted date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE name text := 'usage_event_' || to_char(wanted, 'YYYYMMDD');
    BEGIN
        IF wanted NOT BETWEEN DATE '2024-01-01' AND (now() AT TIME ZONE 'UTC')::date + 40 THEN
            RAISE EXCEPTION 'no partition for %: out of range', wanted USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF to_regclass('public.' || name) IS NOT NULL OR EXISTS (SELECT FROM public.usage_day WHERE day = wanted) THEN
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
    "REVOKE ALL ON FUNCTION close_usage_day(date), drop_usage_day(date) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION close_usage_day(date), drop_usage_day(date) TO tidegate_app",
    "GRANT SELECT, INSERT ON usage_day_tx, usage_day_rollup TO tidegate_app",
    "GRANT SELECT ON usage_day TO tidegate_app",
    "GRANT UPDATE (state, dropped_at, seq, events, kept_sha256, prev_hash, hash) ON usage_day TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

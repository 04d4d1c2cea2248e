"""Create refusals: what was not served, and which soft and dark limits were passed, summed by second (daily partitions)."""

from alembic import op

revision = "0009_refusals"
down_revision = "0008_limits"
branch_labels = None
depends_on = None

STATEMENTS = (
    # A row is written once, by one gateway; the sums of several gateways stand side by side. `span_s` is 60 where a
    # gateway could not write for long. Nil ids stand for what a gateway had no room to keep apart.
    """
    CREATE TABLE refusal (
        id uuid NOT NULL,
        at timestamptz NOT NULL,
        span_s smallint NOT NULL CHECK (span_s IN (1, 60)),
        tenant_id uuid NOT NULL,
        project_id uuid NOT NULL,
        key_id uuid NOT NULL,
        model_id uuid NOT NULL,
        model text NOT NULL,
        code text NOT NULL,
        level text NOT NULL,
        metric text NOT NULL,
        limit_model text NOT NULL,
        mode text NOT NULL CHECK (mode IN ('hard', 'soft', 'dark')),
        requests bigint NOT NULL CHECK (requests > 0),
        input_tokens numeric(38, 0) NOT NULL CHECK (input_tokens >= 0),
        output_tokens numeric(38, 0) NOT NULL CHECK (output_tokens >= 0),
        sample_request_id uuid NOT NULL,
        PRIMARY KEY (id, at)
    ) PARTITION BY RANGE (at)
    """,
    "CREATE INDEX refusal_by_tenant ON refusal (tenant_id, at)",
    # Run as the owner, because the application may neither create nor drop tables.
    """
    CREATE FUNCTION ensure_refusal_partition(wanted date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE name text := 'refusal_' || to_char(wanted, 'YYYYMMDD');
    BEGIN
        IF wanted NOT BETWEEN DATE '2024-01-01' AND (now() AT TIME ZONE 'UTC')::date + 40 THEN
            RAISE EXCEPTION 'no partition for %: out of range', wanted USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF to_regclass('public.' || name) IS NOT NULL THEN
            RETURN false;
        END IF;
        PERFORM pg_advisory_xact_lock(7481205);
        IF to_regclass('public.' || name) IS NOT NULL THEN
            RETURN false;
        END IF;
        EXECUTE format('CREATE TABLE public.%I (LIKE public.refusal INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', name);
        EXECUTE format('ALTER TABLE public.refusal ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)',
                       name, wanted::timestamp AT TIME ZONE 'UTC', (wanted + 1)::timestamp AT TIME ZONE 'UTC');
        RETURN true;
    END $$
    """,
    # Never younger ones than a week, whoever asks.
    """
    CREATE FUNCTION drop_refusal_partitions(older_than date) RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE name text;
    DECLARE dropped int := 0;
    BEGIN
        IF older_than > (now() AT TIME ZONE 'UTC')::date - 7 THEN
            RAISE EXCEPTION 'refusals younger than a week are kept' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        FOR name IN
            SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
            WHERE i.inhparent = 'public.refusal'::regclass
              AND c.relname < 'refusal_' || to_char(older_than, 'YYYYMMDD')
            ORDER BY c.relname
        LOOP
            EXECUTE format('DROP TABLE public.%I', name);
            dropped := dropped + 1;
        END LOOP;
        RETURN dropped;
    END $$
    """,
    "REVOKE ALL ON FUNCTION ensure_refusal_partition(date), drop_refusal_partitions(date) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION ensure_refusal_partition(date), drop_refusal_partitions(date) TO tidegate_app",
    "GRANT SELECT, INSERT ON refusal TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

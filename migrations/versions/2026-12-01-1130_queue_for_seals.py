"""Note what waits for its seal in the transaction that writes it, so that sealing need not look for it everywhere."""

from alembic import op

revision = "0038_seal_queue"
down_revision = "0037_registry"
branch_labels = None
depends_on = None

# record, its table, the columns of its key, from when on it stays as it is; as `billing.seal_queries.RECORDS` has it.
RECORDS = (
    ("ledger_account", "ledger_account", ("id",), "true"),
    ("credit_terms", "credit_terms", ("id",), "true"),
    ("ledger_balance", "ledger_balance", ("account_id",), "true"),
    ("billing_profile", "billing_profile", ("tenant_id",), "true"),
    ("credit_lot", "credit_lot", ("account_id",), "true"),
    ("credit_adjustment", "credit_adjustment", ("id",), "true"),
    ("decision", "credit_adjustment", ("id",), "{}.state <> 'pending'"),
    ("price_book", "price_book", ("id",), "true"),
    ("price_version", "price_version", ("id",), "{}.state = 'published'"),
    ("usage_quarantine", "usage_quarantine", ("tenant_id", "id"), "true"),
    ("rerating", "rerating", ("id",), "true"),
    ("rerating_tenant", "rerating_tenant", ("run_id", "tenant_id"), "{}.done"),
    ("rerating_end", "rerating", ("id",), "{}.state IN ('done', 'cancelled')"),
    ("usage_decision", "usage_decision", ("tenant_id", "id"), "true"),
    ("usage_day", "usage_day", ("day",), "true"),
    ("dropped day", "usage_day", ("day",), "{}.state = 'dropped'"),
    ("ledger_period", "ledger_period", ("month",), "{}.state = 'closed'"),
)
SECURED = "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp"
BEFORE_QUEUE = (
    # A transaction, or a record by its key. A row is seen when what it names is committed, in whatever order that is.
    """
    CREATE TABLE seal_queue (
        tx_id uuid UNIQUE,
        record text,
        key text,
        UNIQUE (record, key),
        CHECK (num_nonnulls(tx_id, record) = 1),
        CHECK ((record IS NULL) = (key IS NULL))
    )
    """,
    f"""
    CREATE FUNCTION queue_transactions() RETURNS trigger {SECURED} AS $$
    BEGIN
        INSERT INTO public.seal_queue (tx_id) SELECT id FROM written;
        RETURN NULL;
    END $$
    """,  # noqa: S608 - built of constants
    # Arguments: the record, and the columns of its key.
    f"""
    CREATE FUNCTION queue_record() RETURNS trigger {SECURED} AS $$
    DECLARE named text;
    BEGIN
        SELECT string_agg(to_jsonb(NEW) ->> column_name, ' ' ORDER BY place) INTO named
        FROM unnest(TG_ARGV[1:]) WITH ORDINALITY AS a (column_name, place);
        IF NOT EXISTS (SELECT FROM public.ledger_leaf WHERE record = TG_ARGV[0] AND key = named) THEN
            INSERT INTO public.seal_queue (record, key) VALUES (TG_ARGV[0], named) ON CONFLICT DO NOTHING;
        END IF;
        RETURN NULL;
    END $$
    """,  # noqa: S608 - built of constants
    # Nobody but the database's owner takes out what has no leaf.
    """
    CREATE FUNCTION refuse_skipping() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NOT EXISTS (SELECT FROM public.ledger_leaf WHERE tx_id = OLD.tx_id)
           AND NOT EXISTS (SELECT FROM public.ledger_leaf WHERE record = OLD.record AND key = OLD.key) THEN
            RAISE EXCEPTION 'no seal covers %', coalesce(OLD.tx_id::text, OLD.record || ' ' || OLD.key)
                USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN OLD;
    END $$
    """,
    "REVOKE ALL ON FUNCTION queue_transactions(), queue_record() FROM PUBLIC",
    """
    CREATE TRIGGER ledger_tx_queued AFTER INSERT ON ledger_tx REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION queue_transactions()
    """,
)
AFTER_QUEUE = (
    """
    INSERT INTO seal_queue (tx_id)
    SELECT id FROM ledger_tx x WHERE NOT EXISTS (SELECT FROM ledger_leaf f WHERE f.tx_id = x.id)
    """,
    "CREATE TRIGGER seal_queue_kept BEFORE DELETE ON seal_queue FOR EACH ROW EXECUTE FUNCTION refuse_skipping()",
    """
    CREATE TRIGGER seal_queue_unchanged BEFORE UPDATE OR TRUNCATE ON seal_queue
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    "GRANT SELECT, DELETE ON seal_queue TO tidegate_app",
)


def _queue(record: str, table: str, key: tuple[str, ...], when: str) -> tuple[str, str]:
    """Return the trigger that queues a record's rows from now on, and what queues those there are."""
    name = f"{table}_queued" if record == table else f"{table}_queued_{record.replace(' ', '_')}"
    event = "INSERT" if when == "true" else "INSERT OR UPDATE"
    arguments = ", ".join(f"'{one}'" for one in (record, *key))
    named = f"concat_ws(' ', {', '.join(f't.{column}' for column in key)})"
    trigger = f"""
        CREATE TRIGGER {name} AFTER {event} ON {table} FOR EACH ROW WHEN ({when.format("NEW")})
        EXECUTE FUNCTION queue_record({arguments})
    """
    fill = f"""
        INSERT INTO seal_queue (record, key) SELECT '{record}', {named} FROM {table} t
        WHERE {when.format("t")}
          AND NOT EXISTS (SELECT FROM ledger_leaf f WHERE f.record = '{record}' AND f.key = {named})
    """  # noqa: S608 - built of constants
    return trigger, fill


def upgrade() -> None:
    for statement in BEFORE_QUEUE:
        op.execute(statement)
    for record in RECORDS:
        for statement in _queue(*record):
            op.execute(statement)
    for statement in AFTER_QUEUE:
        op.execute(statement)

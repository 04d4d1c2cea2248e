"""Chain the audit trail: each record's hash covers the record before it, computed by the database at commit."""

from alembic import op

revision = "0006_audit_chain"
down_revision = "0005_people"
branch_labels = None
depends_on = None

STATEMENTS = (
    # From where the actor called, as the front door saw it; empty when nobody called.
    "ALTER TABLE audit_record ADD client_ip text NOT NULL DEFAULT '' CHECK (char_length(client_ip) <= 45)",
    "CREATE INDEX audit_record_by_actor ON audit_record (actor_id, id)",
    "CREATE INDEX audit_record_by_target ON audit_record (target_id, id)",
    "CREATE INDEX audit_record_by_time ON audit_record (recorded_at)",
    # One row per record, in the order of commits, without gaps. Nobody but the trigger below may write it.
    """
    CREATE TABLE audit_chain (
        seq bigint PRIMARY KEY CHECK (seq > 0),
        record_id uuid NOT NULL UNIQUE,
        prev_hash bytea NOT NULL CHECK (octet_length(prev_hash) = 32),
        hash bytea NOT NULL UNIQUE CHECK (octet_length(hash) = 32)
    )
    """,
    # What is hashed: a JSON array, so that no field can run into the next. `tenants/audit_chain.py` says the same.
    """
    CREATE FUNCTION audit_text(record audit_record, seq bigint, prev_hash bytea) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
        SELECT jsonb_build_array(
            seq, encode(prev_hash, 'hex'), record.id,
            to_char(record.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
            record.actor_kind, record.actor_id, record.client_ip, record.tenant_id, record.action, record.target_id,
            record.request_id, record.details::text
        )::text
    $$
    """,
    # The lock is held from here to the end of the commit, so that the order of the chain is the order of commits.
    """
    CREATE FUNCTION chain_audit_record(record audit_record) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
    DECLARE last_seq bigint;
    DECLARE last_hash bytea;
    BEGIN
        PERFORM pg_advisory_xact_lock(7481204);
        SELECT seq, hash INTO last_seq, last_hash FROM audit_chain ORDER BY seq DESC LIMIT 1;
        last_seq := coalesce(last_seq, 0) + 1;
        last_hash := coalesce(last_hash, decode(repeat('00', 32), 'hex'));
        INSERT INTO audit_chain (seq, record_id, prev_hash, hash)
        VALUES (last_seq, record.id, last_hash,
                sha256(convert_to(audit_text(record, last_seq, last_hash), 'UTF8')));
    END $$
    """,
    # As the owner, because the application may not write the chain.
    """
    CREATE FUNCTION chain_new_audit_record() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    BEGIN
        PERFORM chain_audit_record(NEW);
        RETURN NULL;
    END $$
    """,
    "REVOKE ALL ON FUNCTION chain_audit_record(audit_record) FROM PUBLIC",
    # Records of before, in the order they were made.
    """
    DO $$
    DECLARE found audit_record;
    BEGIN
        LOCK TABLE audit_record IN SHARE ROW EXCLUSIVE MODE;
        FOR found IN SELECT * FROM audit_record ORDER BY recorded_at, id LOOP
            PERFORM chain_audit_record(found);
        END LOOP;
    END $$
    """,
    # Deferred: the lock is the last thing a transaction takes, so it can neither wait long nor deadlock with others.
    """
    CREATE CONSTRAINT TRIGGER audit_record_chained AFTER INSERT ON audit_record
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION chain_new_audit_record()
    """,
    """
    CREATE TRIGGER audit_chain_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_chain
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    "GRANT SELECT ON audit_chain TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Bill what is asked for with one idempotency key once, and let projects keep their answers for repeats."""

from alembic import op

revision = "0021_repeats"
down_revision = "0020_limit_beside"
branch_labels = None
depends_on = None

OUTCOMES = "('completed', 'client_abort', 'upstream_error', 'timeout', 'preempted', 'repeat')"
STATEMENTS = (
    # A generation under a key: `repeat_of` names the one that is billed in its place; null: it is billed itself.
    """
    CREATE TABLE usage_idempotency (
        tenant_id uuid NOT NULL,
        digest bytea NOT NULL CHECK (octet_length(digest) = 16),
        event_id uuid NOT NULL,
        admitted_us bigint NOT NULL,
        repeat_of uuid CHECK (repeat_of <> event_id),
        PRIMARY KEY (tenant_id, event_id)
    )
    """,
    "CREATE INDEX usage_idempotency_by_digest ON usage_idempotency (tenant_id, digest)",
    "CREATE INDEX usage_idempotency_by_age ON usage_idempotency (admitted_us)",
    # The poster decides under the lock of the tenant's money; this makes sure that it decided right.
    """
    CREATE FUNCTION keep_one_bill() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.repeat_of IS NULL AND EXISTS (
            SELECT 1 FROM usage_idempotency u
            WHERE u.tenant_id = NEW.tenant_id AND u.digest = NEW.digest AND u.repeat_of IS NULL
              AND abs(u.admitted_us - NEW.admitted_us) < 86400000000
        ) THEN
            RAISE EXCEPTION 'generation % is the second bill of its key', NEW.event_id USING ERRCODE = 'unique_violation';
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER usage_idempotency_one_bill BEFORE INSERT ON usage_idempotency
    FOR EACH ROW EXECUTE FUNCTION keep_one_bill()
    """,
    """
    CREATE TRIGGER usage_idempotency_kept BEFORE UPDATE ON usage_idempotency
    FOR EACH ROW EXECUTE FUNCTION refuse_change()
    """,
    "GRANT SELECT, INSERT, DELETE ON usage_idempotency TO tidegate_app",
    "ALTER TABLE usage_event DROP CONSTRAINT usage_event_outcome_check",
    f"ALTER TABLE usage_event ADD CONSTRAINT usage_event_outcome_check CHECK (outcome IN {OUTCOMES})",
    "ALTER TABLE project ADD COLUMN keep_answers boolean NOT NULL DEFAULT false",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Create plans, limits as rules and their history; move the limits that were columns into rules."""

from alembic import op

revision = "0008_limits"
down_revision = "0007_tenant_life"
branch_labels = None
depends_on = None

DEFAULT_PLAN = "00000000-0000-7000-8000-000000000001"  # tenants.plans.DEFAULT_PLAN_ID

LEVELS = "('tenant', 'project', 'key')"
METRICS = """('requests_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute', 'concurrency',
              'spend_per_day', 'spend_per_month', 'spend_total')"""
MODES = "('hard', 'soft', 'dark')"
# Whose rule it is decides whose id it has: a plan speaks of whole levels, a tenant also of one project or key.
OWNER = """
        CHECK (num_nonnulls(tenant_id, plan_id) = 1),
        CHECK (project_id IS NULL OR (level = 'project' AND tenant_id IS NOT NULL)),
        CHECK (key_id IS NULL OR (level = 'key' AND tenant_id IS NOT NULL))
"""

STATEMENTS = (
    """
    CREATE TABLE plan (
        id uuid PRIMARY KEY,
        name text NOT NULL UNIQUE CHECK (char_length(name) BETWEEN 1 AND 120),
        description text NOT NULL DEFAULT '' CHECK (char_length(description) <= 500),
        price_book_id uuid REFERENCES price_book (id),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    """
    INSERT INTO plan (id, name, description)
    VALUES ('00000000-0000-7000-8000-000000000001', 'default', 'What a new tenant is on.')
    """,
    f"ALTER TABLE tenant ADD COLUMN plan_id uuid NOT NULL DEFAULT '{DEFAULT_PLAN}' REFERENCES plan (id)",
    "CREATE INDEX tenant_by_plan ON tenant (plan_id, id)",
    "DROP INDEX api_key_by_tenant",
    "ALTER TABLE api_key ADD CONSTRAINT api_key_by_tenant UNIQUE (tenant_id, id)",
    # `amount` is a count, or pico of the tenant's currency for spend. No rule means no limit; 0 means nothing is allowed.
    # `author` keeps apart what operators set and what a tenant sets for itself: the lower of the two holds.
    f"""
    CREATE TABLE limit_rule (
        id uuid PRIMARY KEY,
        tenant_id uuid REFERENCES tenant (id),
        plan_id uuid REFERENCES plan (id),
        author text NOT NULL CHECK (author IN ('operator', 'tenant')),
        level text NOT NULL CHECK (level IN {LEVELS}),
        project_id uuid,
        key_id uuid,
        model text NOT NULL DEFAULT '' CHECK (char_length(model) <= 128),
        metric text NOT NULL CHECK (metric IN {METRICS}),
        amount numeric(38, 0) NOT NULL CHECK (amount >= 0),
        mode text NOT NULL CHECK (mode IN {MODES}),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        {OWNER},
        CHECK (author = 'operator' OR tenant_id IS NOT NULL),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id),
        FOREIGN KEY (tenant_id, key_id) REFERENCES api_key (tenant_id, id),
        UNIQUE NULLS NOT DISTINCT (tenant_id, plan_id, author, level, project_id, key_id, model, metric, mode)
    )
    """,
    "CREATE INDEX limit_rule_by_plan ON limit_rule (plan_id) WHERE plan_id IS NOT NULL",
    # Every change of a rule: who, why, before and after (null: no rule). No foreign keys: it outlives what it is about.
    f"""
    CREATE TABLE limit_change (
        id uuid PRIMARY KEY,
        changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        actor_kind text NOT NULL CHECK (char_length(actor_kind) BETWEEN 1 AND 40),
        actor_id uuid,
        reason text NOT NULL CHECK (char_length(reason) BETWEEN 1 AND 500),
        tenant_id uuid,
        plan_id uuid,
        author text NOT NULL CHECK (author IN ('operator', 'tenant')),
        level text NOT NULL CHECK (level IN {LEVELS}),
        project_id uuid,
        key_id uuid,
        model text NOT NULL,
        metric text NOT NULL CHECK (metric IN {METRICS}),
        mode text NOT NULL CHECK (mode IN {MODES}),
        amount_before numeric(38, 0),
        amount_after numeric(38, 0),
        reverts uuid,
        {OWNER},
        CHECK (num_nonnulls(amount_before, amount_after) > 0)
    )
    """,
    "CREATE INDEX limit_change_by_tenant ON limit_change (tenant_id, id) WHERE tenant_id IS NOT NULL",
    "CREATE INDEX limit_change_by_plan ON limit_change (plan_id, id) WHERE plan_id IS NOT NULL",
    """
    CREATE TRIGGER limit_change_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON limit_change
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    # A tenant asks for more; an operator answers with a note.
    f"""
    CREATE TABLE limit_request (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL REFERENCES tenant (id),
        level text NOT NULL CHECK (level IN {LEVELS}),
        project_id uuid,
        key_id uuid,
        model text NOT NULL DEFAULT '' CHECK (char_length(model) <= 128),
        metric text NOT NULL CHECK (metric IN {METRICS}),
        amount numeric(38, 0) NOT NULL CHECK (amount > 0),
        reason text NOT NULL CHECK (char_length(reason) BETWEEN 1 AND 500),
        state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'approved', 'declined')),
        asked_by_kind text NOT NULL CHECK (char_length(asked_by_kind) BETWEEN 1 AND 40),
        asked_by_id uuid,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        decided_by uuid,
        decided_at timestamptz,
        note text NOT NULL DEFAULT '' CHECK (char_length(note) <= 500),
        granted numeric(38, 0),
        CHECK (project_id IS NULL OR level = 'project'),
        CHECK (key_id IS NULL OR level = 'key'),
        CHECK ((state = 'open') = (decided_at IS NULL)),
        CHECK ((state = 'approved') = (granted IS NOT NULL)),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id),
        FOREIGN KEY (tenant_id, key_id) REFERENCES api_key (tenant_id, id)
    )
    """,
    "CREATE INDEX limit_request_by_tenant ON limit_request (tenant_id, id)",
    "CREATE INDEX limit_request_open ON limit_request (id) WHERE state = 'open'",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON plan, limit_rule TO tidegate_app",
    "GRANT SELECT, INSERT ON limit_change TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE ON limit_request TO tidegate_app",
    # 600,000 is what a key without a word about it had; it is the default plan's rule from now on.
    """
    INSERT INTO limit_rule (id, plan_id, author, level, metric, amount, mode)
    SELECT uuidv7(), id, 'operator', 'key', 'requests_per_minute', 600000, 'hard' FROM plan WHERE name = 'default'
    """,
    """
    INSERT INTO limit_rule (id, tenant_id, author, level, metric, amount, mode)
    SELECT uuidv7(), id, 'operator', 'tenant', 'concurrency', concurrency_limit, 'hard'
    FROM tenant WHERE concurrency_limit > 0
    """,
    """
    INSERT INTO limit_rule (id, tenant_id, author, level, project_id, metric, amount, mode)
    SELECT uuidv7(), p.tenant_id, 'operator', 'project', p.id, moved.metric, moved.amount, 'hard'
    FROM project p, LATERAL (VALUES ('requests_per_minute', p.rpm_limit), ('concurrency', p.concurrency_limit))
        AS moved (metric, amount)
    WHERE moved.amount > 0
    """,
    """
    INSERT INTO limit_rule (id, tenant_id, author, level, key_id, metric, amount, mode)
    SELECT uuidv7(), k.tenant_id, 'operator', 'key', k.id, moved.metric, moved.amount, 'hard'
    FROM api_key k, LATERAL (VALUES ('requests_per_minute', nullif(k.rpm_limit, 600000)),
        ('concurrency', k.concurrency_limit)) AS moved (metric, amount)
    WHERE moved.amount > 0
    """,
    "ALTER TABLE tenant DROP COLUMN concurrency_limit",
    "ALTER TABLE project DROP COLUMN rpm_limit, DROP COLUMN concurrency_limit",
    "ALTER TABLE api_key DROP COLUMN rpm_limit, DROP COLUMN concurrency_limit",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

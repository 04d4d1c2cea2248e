"""Keep what tenants and plans are entitled to of a model (weight, guarantee, deserved, capability), and its history."""

from alembic import op

revision = "0031_entitlements"
down_revision = "0028_event_digests"
branch_labels = None
depends_on = None

# A plan says how much its tenants weigh; what is promised in requests in flight is a tenant's own, and of one model.
STATEMENTS = (
    """
    CREATE TABLE entitlement (
        id uuid PRIMARY KEY,
        tenant_id uuid REFERENCES tenant (id),
        plan_id uuid REFERENCES plan (id),
        model text NOT NULL DEFAULT '' CHECK (char_length(model) <= 128),
        weight int CHECK (weight BETWEEN 1 AND 1000),
        guarantee int CHECK (guarantee BETWEEN 0 AND 1000000),
        deserved int CHECK (deserved BETWEEN 0 AND 1000000),
        capability int CHECK (capability BETWEEN 1 AND 1000000),
        updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        CHECK (num_nonnulls(tenant_id, plan_id) = 1),
        CHECK (num_nonnulls(weight, guarantee, deserved, capability) > 0),
        CHECK (num_nonnulls(guarantee, deserved, capability) = 0 OR (tenant_id IS NOT NULL AND model <> '')),
        CHECK (guarantee <= deserved),
        CHECK (deserved <= capability),
        CHECK (guarantee <= capability),
        UNIQUE NULLS NOT DISTINCT (tenant_id, plan_id, model)
    )
    """,
    "CREATE INDEX entitlement_by_model ON entitlement (model) WHERE guarantee > 0",
    """
    CREATE TABLE entitlement_change (
        id uuid PRIMARY KEY,
        changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        actor_kind text NOT NULL CHECK (char_length(actor_kind) BETWEEN 1 AND 40),
        actor_id uuid,
        reason text NOT NULL CHECK (char_length(reason) BETWEEN 1 AND 500),
        tenant_id uuid,
        plan_id uuid,
        model text NOT NULL,
        before jsonb,
        after jsonb,
        reverts uuid,
        CHECK (num_nonnulls(tenant_id, plan_id) = 1),
        CHECK (num_nonnulls(before, after) > 0)
    )
    """,
    "CREATE INDEX entitlement_change_by_tenant ON entitlement_change (tenant_id, id) WHERE tenant_id IS NOT NULL",
    "CREATE INDEX entitlement_change_by_plan ON entitlement_change (plan_id, id) WHERE plan_id IS NOT NULL",
    """
    CREATE TRIGGER entitlement_change_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON entitlement_change
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    "GRANT SELECT, INSERT, UPDATE, DELETE ON entitlement TO tidegate_app",
    "GRANT SELECT, INSERT ON entitlement_change TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Add crossings of budgets' thresholds, alerts on credit, and what a tenant sets about both."""

from alembic import op

revision = "0022_alerts"
down_revision = "0021_repeats"
branch_labels = None
depends_on = None

STATEMENTS = (
    # What is not set here has its default in the code; a tenant without a row has all defaults.
    """
    CREATE TABLE alert_settings (
        tenant_id uuid PRIMARY KEY REFERENCES tenant (id),
        thresholds smallint[] NOT NULL CHECK (
            cardinality(thresholds) BETWEEN 0 AND 10 AND 1 <= ALL (thresholds) AND 1000 >= ALL (thresholds)
        ),
        low_balance_pico numeric(38, 0) CHECK (low_balance_pico > 0),
        days_left smallint CHECK (days_left BETWEEN 1 AND 365),
        updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    # A crossing is made once for all time: what is posted on a budget in one of its periods reached a threshold. The
    # amount is part of what a budget is: raised, it is another one. A total has no period.
    """
    CREATE TABLE budget_crossing (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL,
        level text NOT NULL CHECK (level IN ('tenant', 'project', 'key')),
        owner_id uuid NOT NULL,
        project_id uuid,
        metric text NOT NULL CHECK (metric IN ('spend_per_day', 'spend_per_month', 'spend_total')),
        mode text NOT NULL CHECK (mode IN ('hard', 'soft')),
        model text NOT NULL,
        window_start timestamptz,
        window_end timestamptz,
        threshold smallint NOT NULL CHECK (threshold BETWEEN 1 AND 1000),
        limit_pico numeric(38, 0) NOT NULL CHECK (limit_pico > 0),
        spent_pico numeric(38, 0) NOT NULL,
        crossed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        CHECK ((level = 'tenant') = (project_id IS NULL)),
        CHECK ((metric = 'spend_total') = (window_start IS NULL)),
        CHECK ((window_start IS NULL) = (window_end IS NULL)),
        CHECK (spent_pico * 100 >= threshold * limit_pico),
        CONSTRAINT budget_crossing_once UNIQUE NULLS NOT DISTINCT
            (tenant_id, owner_id, metric, mode, model, window_start, threshold, limit_pico)
    )
    """,
    "CREATE INDEX budget_crossing_by_tenant ON budget_crossing (tenant_id, id)",
    """
    CREATE TRIGGER budget_crossing_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON budget_crossing
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    # At most one open alert of a kind: it ends when the credit rose above its threshold, and only then a next one can be.
    """
    CREATE TABLE balance_alert (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL,
        kind text NOT NULL CHECK (kind IN ('low_balance', 'days_left', 'limit_80', 'limit_100')),
        threshold_pico numeric(38, 0),
        days smallint,
        available_pico numeric(38, 0) NOT NULL,
        raised_at timestamptz NOT NULL,
        cleared_at timestamptz,
        CHECK (cleared_at >= raised_at),
        CHECK ((kind = 'days_left') = (days IS NOT NULL))
    )
    """,
    "CREATE UNIQUE INDEX balance_alert_open ON balance_alert (tenant_id, kind) WHERE cleared_at IS NULL",
    "CREATE INDEX balance_alert_by_tenant ON balance_alert (tenant_id, id)",
    "GRANT SELECT, INSERT, UPDATE ON alert_settings TO tidegate_app",
    "GRANT SELECT, INSERT ON budget_crossing, balance_alert TO tidegate_app",
    "GRANT UPDATE (cleared_at) ON balance_alert TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

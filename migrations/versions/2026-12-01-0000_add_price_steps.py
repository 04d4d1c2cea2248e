"""Add long-context steps, minimum charges and discounts to the price book, and an account for minimum charges."""

from alembic import op

revision = "0017_price_steps"
down_revision = "0016_bound_instants"
branch_labels = None
depends_on = None

METERS = "('input', 'cached_input', 'cache_write', 'output', 'reasoning', 'request', 'min_charge')"

PRICES = (
    "ALTER TABLE price_item DROP CONSTRAINT price_item_meter_check",
    f"ALTER TABLE price_item ADD CONSTRAINT price_item_meter_check CHECK (meter IN {METERS})",
    # A price of a step holds for requests with more input tokens than that; what is per request knows no step.
    """
    ALTER TABLE price_item ADD above_tokens bigint NOT NULL DEFAULT 0,
        ADD CHECK (above_tokens = 0 OR (above_tokens > 0 AND meter NOT IN ('request', 'min_charge')))
    """,
    "ALTER TABLE price_item DROP CONSTRAINT price_item_version_id_model_id_tier_meter_tenant_id_key",
    """
    ALTER TABLE price_item ADD CONSTRAINT price_item_one
        UNIQUE NULLS NOT DISTINCT (version_id, model_id, tier, meter, tenant_id, above_tokens)
    """,
    # How a tenant's own prices came about. Publication turns it into items; they are what is charged.
    """
    CREATE TABLE price_discount (
        version_id uuid NOT NULL REFERENCES price_version (id) ON DELETE CASCADE,
        tenant_id uuid NOT NULL,
        model_id uuid NOT NULL,
        tier smallint NOT NULL CHECK (tier BETWEEN 0 AND 2),
        off_ppm integer NOT NULL CHECK (off_ppm BETWEEN 1 AND 1000000),
        PRIMARY KEY (version_id, tenant_id, model_id, tier)
    )
    """,
    """
    CREATE TRIGGER price_discount_immutable BEFORE INSERT OR UPDATE OR DELETE ON price_discount
    FOR EACH ROW EXECUTE FUNCTION keep_published_items()
    """,
    """
    CREATE TRIGGER price_discount_kept BEFORE TRUNCATE ON price_discount
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    # A draft goes with its prices.
    "ALTER TABLE price_item DROP CONSTRAINT price_item_version_id_fkey",
    """
    ALTER TABLE price_item ADD CONSTRAINT price_item_version_id_fkey
        FOREIGN KEY (version_id) REFERENCES price_version (id) ON DELETE CASCADE
    """,
    "GRANT SELECT, INSERT, UPDATE, DELETE ON price_discount TO tidegate_app",
)

MIN_CHARGE = (
    # The part of an amount that lifts it to the minimum; the rest is the usage's own price.
    """
    ALTER TABLE usage_event ADD min_charge_pico bigint NOT NULL DEFAULT 0
        CHECK (min_charge_pico BETWEEN 0 AND amount_pico)
    """,
    """
    ALTER TABLE usage_rollup ADD min_charge_pico numeric(38, 0) NOT NULL DEFAULT 0
        CHECK (min_charge_pico BETWEEN 0 AND amount_pico)
    """,
    "ALTER TABLE billing_profile ADD min_charge_account uuid REFERENCES ledger_account (id)",
    """
    INSERT INTO ledger_account (id, tenant_id, code, currency, normal)
    SELECT uuidv7(), tenant_id, 'revenue.min_charge', currency, 'credit' FROM billing_profile
    """,
    "INSERT INTO ledger_balance (account_id) SELECT id FROM ledger_account WHERE code = 'revenue.min_charge'",
    """
    UPDATE billing_profile p SET min_charge_account = a.id
    FROM ledger_account a WHERE a.tenant_id = p.tenant_id AND a.code = 'revenue.min_charge'
    """,
    "ALTER TABLE billing_profile ALTER min_charge_account SET NOT NULL",
)


def upgrade() -> None:
    for statement in (*PRICES, *MIN_CHARGE):
        op.execute(statement)

"""Give tenants a billing profile, and an end."""

from alembic import op

revision = "0007_tenant_life"
down_revision = "0006_audit_chain"
branch_labels = None
depends_on = None

STATEMENTS = (
    # What invoices name. Currency and time zone stand in `tenant`, how the tenant pays in `billing_profile`.
    """
    CREATE TABLE legal_profile (
        tenant_id uuid PRIMARY KEY REFERENCES tenant (id),
        legal_name text NOT NULL DEFAULT '' CHECK (char_length(legal_name) <= 200),
        address text[] NOT NULL DEFAULT '{}' CHECK (cardinality(address) <= 6),
        country text NOT NULL DEFAULT '' CHECK (country ~ '^([A-Z]{2})?$'),
        tax_id text NOT NULL DEFAULT '' CHECK (char_length(tax_id) <= 40),
        billing_email text NOT NULL DEFAULT '' CHECK (char_length(billing_email) <= 254),
        language text NOT NULL DEFAULT 'en' CHECK (language IN ('en', 'zh-CN')),
        updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    "ALTER TABLE tenant DROP CONSTRAINT tenant_status_check",
    """
    ALTER TABLE tenant
        ADD CONSTRAINT tenant_status_check CHECK (status IN ('active', 'suspended', 'closed')),
        ADD COLUMN closed_at timestamptz,
        ADD COLUMN erased_at timestamptz,
        ADD CONSTRAINT tenant_closed_check CHECK ((status = 'closed') = (closed_at IS NOT NULL))
    """,
    "GRANT SELECT, INSERT, UPDATE, DELETE ON legal_profile TO tidegate_app",
    "GRANT DELETE ON invite TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

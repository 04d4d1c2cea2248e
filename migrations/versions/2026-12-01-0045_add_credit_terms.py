"""Let how a tenant pays and its credit limit change, each change a row that stays."""

from alembic import op

revision = "0024_credit_terms"
down_revision = "0023_rerating"
branch_labels = None
depends_on = None

STATEMENTS = (
    # The newest row of a tenant is what holds; the profile and the account of unbilled usage say the same.
    """
    CREATE TABLE credit_terms (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL REFERENCES billing_profile (tenant_id),
        number integer NOT NULL CHECK (number > 0),
        mode text NOT NULL CHECK (mode IN ('prepaid', 'postpaid')),
        credit_limit numeric(38, 0) NOT NULL CHECK (credit_limit >= 0),
        since timestamptz NOT NULL,
        changed_by text NOT NULL CHECK (char_length(changed_by) BETWEEN 1 AND 120),
        note text NOT NULL CHECK (char_length(note) BETWEEN 1 AND 500),
        UNIQUE (tenant_id, number)
    )
    """,
    """
    CREATE TRIGGER credit_terms_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON credit_terms
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    """
    INSERT INTO credit_terms (id, tenant_id, number, mode, credit_limit, since, changed_by, note)
    SELECT uuidv7(), p.tenant_id, 1, p.mode, coalesce(b.credit_limit, 0), p.created_at, 'system', 'opened'
    FROM billing_profile p LEFT JOIN ledger_balance b ON b.account_id = p.unbilled_account
    """,
    # A tenant that came from postpaid keeps the account of what is not invoiced: usage admitted before goes there.
    "ALTER TABLE billing_profile DROP CONSTRAINT billing_profile_check",
    """
    ALTER TABLE billing_profile
        ADD prepaid_since timestamptz,
        ADD CONSTRAINT billing_profile_unbilled_check CHECK (mode = 'prepaid' OR unbilled_account IS NOT NULL),
        ADD CONSTRAINT billing_profile_since_check CHECK (
            (prepaid_since IS NOT NULL) = (mode = 'prepaid' AND unbilled_account IS NOT NULL)
        )
    """,
    "GRANT SELECT, INSERT ON credit_terms TO tidegate_app",
    "GRANT UPDATE (mode, unbilled_account, prepaid_since) ON billing_profile TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

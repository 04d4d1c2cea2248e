"""Keep the secrets of API keys apart from the keys: a key may have two for a while, each under several peppers."""

from alembic import op

revision = "0012_key_secrets"
down_revision = "0011_identity"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    ALTER TABLE api_key
        ADD CONSTRAINT api_key_of_tenant UNIQUE (tenant_id, id),
        ADD COLUMN owner_person_id uuid REFERENCES person (id),
        ADD COLUMN owner_service_account_id uuid,
        ADD COLUMN status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended')),
        ADD COLUMN updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        ADD COLUMN created_by uuid,
        ADD FOREIGN KEY (tenant_id, owner_service_account_id) REFERENCES service_account (tenant_id, id),
        ADD CONSTRAINT api_key_one_owner CHECK (owner_person_id IS NULL OR owner_service_account_id IS NULL),
        ADD CONSTRAINT api_key_manage_alone CHECK (
            NOT ('manage' = ANY (scopes) AND scopes && ARRAY['inference', 'batch'])
        )
    """,
    "UPDATE api_key SET updated_at = created_at",
    "CREATE INDEX api_key_by_person ON api_key (owner_person_id) WHERE owner_person_id IS NOT NULL",
    """
    CREATE INDEX api_key_by_service_account ON api_key (owner_service_account_id)
        WHERE owner_service_account_id IS NOT NULL
    """,
    # `digest` is what a secret is found by. One secret (`id`) has a row for every pepper it was met under since.
    """
    CREATE TABLE api_key_secret (
        digest bytea PRIMARY KEY CHECK (octet_length(digest) = 32),
        id uuid NOT NULL,
        tenant_id uuid NOT NULL,
        key_id uuid NOT NULL,
        prefix text NOT NULL CHECK (char_length(prefix) <= 12),
        last4 text NOT NULL CHECK (char_length(last4) = 4),
        pepper_id text NOT NULL CHECK (char_length(pepper_id) IN (0, 12)),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        expires_at timestamptz,
        revoked_at timestamptz,
        UNIQUE (id, pepper_id),
        FOREIGN KEY (tenant_id, key_id) REFERENCES api_key (tenant_id, id)
    )
    """,
    """
    INSERT INTO api_key_secret (digest, id, tenant_id, key_id, prefix, last4, pepper_id, created_at)
    SELECT digest, id, tenant_id, id, prefix, last4, '', created_at FROM api_key
    """,
    "CREATE INDEX api_key_secret_by_key ON api_key_secret (key_id)",
    "ALTER TABLE api_key DROP COLUMN digest, DROP COLUMN prefix, DROP COLUMN last4",
    "ALTER TABLE operator_token ADD COLUMN pepper_id text NOT NULL DEFAULT '' CHECK (char_length(pepper_id) IN (0, 12))",
    "GRANT SELECT, INSERT, UPDATE ON api_key_secret TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Create tenants, projects, API keys, operators and the audit trail."""

from alembic import op

revision = "0002_tenants"
down_revision = "0001_core"
branch_labels = None
depends_on = None

STATEMENTS = (
    # A limit of 0 means none, everywhere. `cache_seed` is a secret of the tenant: its prefix-cache salt comes from it.
    """
    CREATE TABLE tenant (
        id uuid PRIMARY KEY,
        name text NOT NULL UNIQUE CHECK (char_length(name) BETWEEN 1 AND 120),
        currency text NOT NULL CHECK (currency IN ('USD', 'CNY')),
        tz text NOT NULL DEFAULT 'UTC' CHECK (char_length(tz) BETWEEN 1 AND 64),
        status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended')),
        billing_mode text NOT NULL DEFAULT 'prepaid' CHECK (billing_mode IN ('prepaid', 'postpaid')),
        concurrency_limit int NOT NULL DEFAULT 0 CHECK (concurrency_limit BETWEEN 0 AND 1000000),
        cache_seed bytea NOT NULL CHECK (octet_length(cache_seed) = 32),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    """
    CREATE TABLE project (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL REFERENCES tenant (id),
        name text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 120),
        status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended')),
        rpm_limit int NOT NULL DEFAULT 0 CHECK (rpm_limit BETWEEN 0 AND 10000000),
        concurrency_limit int NOT NULL DEFAULT 0 CHECK (concurrency_limit BETWEEN 0 AND 1000000),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        UNIQUE (tenant_id, name),
        UNIQUE (tenant_id, id)
    )
    """,
    # `prefix` and `last4` are what people recognise a key by; the key itself is kept nowhere, only its keyed digest.
    """
    CREATE TABLE api_key (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL,
        project_id uuid NOT NULL,
        name text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 120),
        prefix text NOT NULL CHECK (char_length(prefix) <= 12),
        last4 text NOT NULL CHECK (char_length(last4) = 4),
        digest bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
        scopes text[] NOT NULL,
        tier_default smallint NOT NULL DEFAULT 1 CHECK (tier_default BETWEEN 0 AND 2),
        tier_max smallint NOT NULL DEFAULT 2 CHECK (tier_max BETWEEN 0 AND 2),
        model_patterns text[] NOT NULL DEFAULT '{}',
        allowed_networks text[] NOT NULL DEFAULT '{}',
        rpm_limit int NOT NULL DEFAULT 0 CHECK (rpm_limit BETWEEN 0 AND 10000000),
        concurrency_limit int NOT NULL DEFAULT 0 CHECK (concurrency_limit BETWEEN 0 AND 1000000),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        expires_at timestamptz,
        revoked_at timestamptz,
        last_used_at timestamptz,
        CHECK (tier_default <= tier_max),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id)
    )
    """,
    "CREATE INDEX api_key_by_tenant ON api_key (tenant_id, id)",
    "CREATE INDEX api_key_by_project ON api_key (tenant_id, project_id)",
    """
    CREATE TABLE operator (
        id uuid PRIMARY KEY,
        name text NOT NULL UNIQUE CHECK (char_length(name) BETWEEN 1 AND 120),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        disabled_at timestamptz
    )
    """,
    """
    CREATE TABLE operator_token (
        id uuid PRIMARY KEY,
        operator_id uuid NOT NULL REFERENCES operator (id),
        prefix text NOT NULL CHECK (char_length(prefix) <= 12),
        last4 text NOT NULL CHECK (char_length(last4) = 4),
        digest bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        expires_at timestamptz,
        revoked_at timestamptz
    )
    """,
    "CREATE INDEX operator_token_by_operator ON operator_token (operator_id)",
    # Who did what. No foreign keys: a record outlives what it is about.
    """
    CREATE TABLE audit_record (
        id uuid PRIMARY KEY,
        recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        actor_kind text NOT NULL CHECK (actor_kind IN ('operator', 'api_key', 'system')),
        actor_id uuid,
        tenant_id uuid,
        action text NOT NULL CHECK (char_length(action) BETWEEN 1 AND 80),
        target_id uuid,
        request_id text NOT NULL DEFAULT '',
        details jsonb NOT NULL DEFAULT '{}'
    )
    """,
    "CREATE INDEX audit_record_by_tenant ON audit_record (tenant_id, id)",
    """
    CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
    END $$
    """,
    """
    CREATE TRIGGER audit_record_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_record
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """,
    "GRANT SELECT, INSERT, UPDATE ON tenant, project, api_key, operator, operator_token TO tidegate_app",
    "GRANT SELECT, INSERT ON audit_record TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

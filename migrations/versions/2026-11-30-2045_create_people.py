"""Create people, their memberships, sessions and invites; give operators roles and audit records people."""

from alembic import op

revision = "0005_people"
down_revision = "0004_billing"
branch_labels = None
depends_on = None

ROLES = "('owner', 'admin', 'developer', 'finance', 'viewer')"

STATEMENTS = (
    # A deleted person keeps the id for ever and the address for nobody: who comes later with it is somebody else.
    """
    CREATE TABLE person (
        id uuid PRIMARY KEY,
        email text NOT NULL CHECK (email = lower(email) AND char_length(email) BETWEEN 3 AND 254),
        name text NOT NULL DEFAULT '' CHECK (char_length(name) <= 120),
        language text NOT NULL DEFAULT 'en' CHECK (language IN ('en', 'zh-CN')),
        status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended', 'deleted')),
        password_hash text,
        password_changed_at timestamptz,
        totp_secret bytea,
        totp_confirmed_at timestamptz,
        totp_last_step bigint NOT NULL DEFAULT 0,
        failed_attempts int NOT NULL DEFAULT 0,
        locked_until timestamptz,
        sessions_valid_from timestamptz NOT NULL DEFAULT 'epoch',
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        deleted_at timestamptz,
        CHECK ((status = 'deleted') = (deleted_at IS NOT NULL))
    )
    """,
    "CREATE UNIQUE INDEX person_by_email ON person (email) WHERE status <> 'deleted'",
    # Without a project the role holds in the whole tenant. `origin` is empty, or the identity provider that gives it.
    f"""
    CREATE TABLE member (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL REFERENCES tenant (id),
        project_id uuid,
        person_id uuid NOT NULL REFERENCES person (id),
        role text NOT NULL CHECK (role IN {ROLES}),
        status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended')),
        origin text NOT NULL DEFAULT '',
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT member_unique UNIQUE NULLS NOT DISTINCT (tenant_id, person_id, project_id),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id)
    )
    """,
    "CREATE INDEX member_by_person ON member (person_id)",
    f"""
    CREATE TABLE service_account (
        id uuid PRIMARY KEY,
        tenant_id uuid NOT NULL,
        project_id uuid NOT NULL,
        name text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 120),
        role text NOT NULL CHECK (role IN {ROLES}),
        status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended', 'deleted')),
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        UNIQUE (tenant_id, id),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id)
    )
    """,
    "CREATE UNIQUE INDEX service_account_by_name ON service_account (tenant_id, name) WHERE status <> 'deleted'",
    # Into a tenant with a role, or among the operators with theirs.
    f"""
    CREATE TABLE invite (
        id uuid PRIMARY KEY,
        tenant_id uuid REFERENCES tenant (id),
        project_id uuid,
        role text CHECK (role IN {ROLES}),
        operator_role text CHECK (operator_role IN ('admin', 'finance', 'support')),
        email text NOT NULL CHECK (email = lower(email) AND char_length(email) BETWEEN 3 AND 254),
        digest bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
        invited_by uuid,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        expires_at timestamptz NOT NULL,
        accepted_at timestamptz,
        revoked_at timestamptz,
        CHECK ((tenant_id IS NULL) = (operator_role IS NOT NULL)),
        CHECK ((tenant_id IS NULL) = (role IS NULL)),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id)
    )
    """,
    "CREATE INDEX invite_by_tenant ON invite (tenant_id, id)",
    """
    CREATE TABLE person_session (
        id uuid PRIMARY KEY,
        person_id uuid NOT NULL REFERENCES person (id),
        digest bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
        method text NOT NULL CHECK (method IN ('password', 'oidc')),
        provider_id uuid,
        second_factor boolean NOT NULL DEFAULT false,
        created_at timestamptz NOT NULL,
        seen_at timestamptz NOT NULL,
        expires_at timestamptz NOT NULL,
        ended_at timestamptz,
        ip text NOT NULL DEFAULT '',
        user_agent text NOT NULL DEFAULT '' CHECK (char_length(user_agent) <= 400)
    )
    """,
    "CREATE INDEX person_session_by_person ON person_session (person_id, id)",
    """
    CREATE TABLE person_token (
        id uuid PRIMARY KEY,
        person_id uuid NOT NULL REFERENCES person (id),
        purpose text NOT NULL CHECK (purpose IN ('password_reset')),
        digest bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
        created_at timestamptz NOT NULL,
        expires_at timestamptz NOT NULL,
        used_at timestamptz
    )
    """,
    "CREATE INDEX person_token_by_person ON person_token (person_id, id)",
    """
    CREATE TABLE recovery_code (
        id uuid PRIMARY KEY,
        person_id uuid NOT NULL REFERENCES person (id),
        digest bytea NOT NULL CHECK (octet_length(digest) = 32),
        used_at timestamptz,
        UNIQUE (person_id, digest)
    )
    """,
    """
    ALTER TABLE operator
        ADD COLUMN role text NOT NULL DEFAULT 'admin' CHECK (role IN ('admin', 'finance', 'support')),
        ADD COLUMN person_id uuid UNIQUE REFERENCES person (id)
    """,
    "ALTER TABLE audit_record DROP CONSTRAINT audit_record_actor_kind_check",
    """
    ALTER TABLE audit_record ADD CONSTRAINT audit_record_actor_kind_check
        CHECK (actor_kind IN ('operator', 'api_key', 'person', 'system'))
    """,
    "GRANT SELECT, INSERT, UPDATE ON person, service_account, invite TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE ON person_session, person_token, recovery_code TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON member TO tidegate_app",
    "GRANT DELETE ON recovery_code, person_session TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

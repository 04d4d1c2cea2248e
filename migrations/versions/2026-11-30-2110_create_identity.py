"""Create identity providers, what their groups give, whom they vouch for, and their sessions."""

from alembic import op

revision = "0011_identity"
down_revision = "0010_plan_prices"
branch_labels = None
depends_on = None

ROLES = "('owner', 'admin', 'developer', 'finance', 'viewer')"

STATEMENTS = (
    # Without a tenant it is for the whole platform. The issuer never changes: identities are the issuer's subjects.
    f"""
    CREATE TABLE identity_provider (
        id uuid PRIMARY KEY,
        tenant_id uuid REFERENCES tenant (id),
        name text NOT NULL UNIQUE CHECK (char_length(name) BETWEEN 1 AND 120),
        issuer text NOT NULL CHECK (char_length(issuer) BETWEEN 1 AND 512),
        client_id text NOT NULL CHECK (char_length(client_id) BETWEEN 1 AND 255),
        client_secret bytea NOT NULL DEFAULT '',
        scopes text NOT NULL CHECK (char_length(scopes) BETWEEN 1 AND 512),
        groups_claim text NOT NULL DEFAULT '' CHECK (char_length(groups_claim) <= 255),
        email_domains text[] NOT NULL DEFAULT '{{}}',
        link_by_email boolean NOT NULL DEFAULT false,
        default_role text CHECK (default_role IN {ROLES}),
        gateway_audience text NOT NULL DEFAULT '' CHECK (char_length(gateway_audience) <= 255),
        enabled boolean NOT NULL DEFAULT true,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        UNIQUE (issuer, client_id),
        CHECK (default_role IS NULL OR tenant_id IS NOT NULL)
    )
    """,
    """
    CREATE UNIQUE INDEX identity_provider_by_audience ON identity_provider (issuer, gateway_audience)
        WHERE gateway_audience <> ''
    """,
    f"""
    CREATE TABLE group_mapping (
        id uuid PRIMARY KEY,
        provider_id uuid NOT NULL REFERENCES identity_provider (id),
        group_name text NOT NULL CHECK (char_length(group_name) BETWEEN 1 AND 256),
        operator_role text CHECK (operator_role IN ('admin', 'finance', 'support')),
        tenant_id uuid REFERENCES tenant (id),
        project_id uuid,
        role text CHECK (role IN {ROLES}),
        CONSTRAINT group_mapping_unique
            UNIQUE NULLS NOT DISTINCT (provider_id, group_name, operator_role, tenant_id, project_id, role),
        CHECK ((operator_role IS NULL) = (tenant_id IS NOT NULL)),
        CHECK ((tenant_id IS NULL) = (role IS NULL)),
        FOREIGN KEY (tenant_id, project_id) REFERENCES project (tenant_id, id)
    )
    """,
    """
    CREATE TABLE person_identity (
        id uuid PRIMARY KEY,
        provider_id uuid NOT NULL REFERENCES identity_provider (id),
        subject text NOT NULL CHECK (char_length(subject) BETWEEN 1 AND 255),
        person_id uuid NOT NULL REFERENCES person (id),
        created_at timestamptz NOT NULL,
        seen_at timestamptz NOT NULL,
        UNIQUE (provider_id, subject)
    )
    """,
    "CREATE INDEX person_identity_by_person ON person_identity (person_id)",
    # The provider's tokens, sealed, and when the groups were read last.
    """
    CREATE TABLE provider_session (
        session_id uuid PRIMARY KEY REFERENCES person_session (id) ON DELETE CASCADE,
        provider_id uuid NOT NULL REFERENCES identity_provider (id),
        subject text NOT NULL,
        tokens bytea NOT NULL,
        read_at timestamptz NOT NULL,
        due_at timestamptz NOT NULL
    )
    """,
    # A local membership stands beside those that providers give, which may be several roles.
    "ALTER TABLE member DROP CONSTRAINT member_unique",
    """
    CREATE UNIQUE INDEX member_local_unique ON member (tenant_id, person_id, project_id) NULLS NOT DISTINCT
        WHERE origin = ''
    """,
    """
    CREATE UNIQUE INDEX member_given_unique ON member (tenant_id, person_id, project_id, role, origin)
        NULLS NOT DISTINCT WHERE origin <> ''
    """,
    "ALTER TABLE operator ADD COLUMN origin text NOT NULL DEFAULT ''",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON identity_provider, group_mapping, person_identity, provider_session TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

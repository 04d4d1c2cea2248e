"""Create the catalog: models, versions, aliases, deployments, what is desired of them and what is observed."""

from alembic import op

revision = "0003_catalog"
down_revision = "0002_tenants"
branch_labels = None
depends_on = None

NAME = "'^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}$'"

STATEMENTS = (
    f"""
    CREATE TABLE model (
        id uuid PRIMARY KEY,
        name text NOT NULL UNIQUE CHECK (name ~ {NAME}),
        owned_by text NOT NULL DEFAULT 'tidegate',
        description text NOT NULL DEFAULT '',
        created_at timestamptz NOT NULL,
        retired_at timestamptz
    )
    """,
    """
    CREATE TABLE model_version (
        id uuid PRIMARY KEY,
        model_id uuid NOT NULL REFERENCES model,
        number int NOT NULL CHECK (number > 0),
        source text NOT NULL DEFAULT '',
        sha256 text NOT NULL DEFAULT '' CHECK (sha256 ~ '^([0-9a-f]{64})?$'),
        licence text NOT NULL DEFAULT '',
        context_max int NOT NULL CHECK (context_max > 0),
        template_tokens int NOT NULL DEFAULT 0 CHECK (template_tokens >= 0),
        bytes_per_token_milli int NOT NULL DEFAULT 1000 CHECK (bytes_per_token_milli >= 1000),
        created_at timestamptz NOT NULL,
        UNIQUE (model_id, number)
    )
    """,
    # What callers write. A version switch is one update here, pushed to gateways.
    f"""
    CREATE TABLE model_alias (
        name text PRIMARY KEY CHECK (name ~ {NAME}),
        version_id uuid NOT NULL REFERENCES model_version,
        updated_at timestamptz NOT NULL
    )
    """,
    """
    CREATE TABLE deployment (
        id uuid PRIMARY KEY,
        version_id uuid NOT NULL REFERENCES model_version,
        name text NOT NULL UNIQUE CHECK (name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
        kind text NOT NULL CHECK (kind IN ('local', 'external', 'knative')),
        engine text NOT NULL CHECK (engine IN ('llama.cpp', 'vllm', 'openai', 'simulator')),
        engine_args jsonb NOT NULL DEFAULT '{}',
        endpoints text[] NOT NULL,
        base_url text NOT NULL DEFAULT '',
        sealed_credential bytea NOT NULL DEFAULT '',
        upstream_model text NOT NULL,
        default_max_tokens int NOT NULL CHECK (default_max_tokens > 0),
        inflight_max int NOT NULL DEFAULT 0 CHECK (inflight_max >= 0),
        waiting_max int NOT NULL DEFAULT 256 CHECK (waiting_max >= 0),
        max_wait_s int NOT NULL DEFAULT 30 CHECK (max_wait_s BETWEEN 0 AND 600),
        created_at timestamptz NOT NULL,
        retired_at timestamptz,
        CHECK ((kind = 'external') = (base_url <> '')),
        CHECK (kind = 'external' OR sealed_credential = '')
    )
    """,
    "CREATE INDEX deployment_version_id_idx ON deployment (version_id)",
    # Written by the controller's masters (operators, schedules), read by backends.
    """
    CREATE TABLE desired (
        deployment_id uuid PRIMARY KEY REFERENCES deployment,
        temperature text NOT NULL DEFAULT 'cold' CHECK (temperature IN ('hot', 'cold')),
        min_scale int NOT NULL DEFAULT 0 CHECK (min_scale >= 0),
        max_scale int NOT NULL DEFAULT 1 CHECK (max_scale >= 0),
        epoch bigint NOT NULL DEFAULT 1,
        updated_at timestamptz NOT NULL,
        CHECK (min_scale <= max_scale),
        CHECK ((temperature = 'hot') = (min_scale > 0))
    )
    """,
    # What the backend observes, one row per replica; a row goes when its engine is gone.
    """
    CREATE TABLE replica (
        id uuid PRIMARY KEY,
        deployment_id uuid NOT NULL REFERENCES deployment,
        index int NOT NULL CHECK (index >= 0),
        state text NOT NULL CHECK (state IN ('absent', 'loading', 'ready', 'idle', 'draining', 'failed')),
        host text NOT NULL DEFAULT '',
        pid int,
        pid_started_ms bigint,
        url text NOT NULL DEFAULT '',
        reason text NOT NULL DEFAULT '',
        term bigint NOT NULL,
        epoch bigint NOT NULL,
        state_since timestamptz NOT NULL,
        UNIQUE (deployment_id, index)
    )
    """,
    # How long loads took: the last few per deployment promise the next one.
    """
    CREATE TABLE engine_load (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        deployment_id uuid NOT NULL REFERENCES deployment,
        load_ms int NOT NULL CHECK (load_ms >= 0),
        loaded_at timestamptz NOT NULL
    )
    """,
    "CREATE INDEX engine_load_deployment_id_id_idx ON engine_load (deployment_id, id)",
    # Each leader's term is one larger than the last one's; writes of an older term are void.
    """
    CREATE TABLE controller_term (
        singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
        term bigint NOT NULL DEFAULT 0,
        holder text NOT NULL DEFAULT ''
    )
    """,
    "INSERT INTO controller_term DEFAULT VALUES",
    "GRANT SELECT, INSERT, UPDATE ON model, model_version, deployment, desired TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON model_alias, replica TO tidegate_app",
    "GRANT SELECT, INSERT, DELETE ON engine_load TO tidegate_app",
    "GRANT SELECT, UPDATE ON controller_term TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

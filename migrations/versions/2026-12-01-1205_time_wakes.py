"""How long a deployment is kept awake and may take to load, and each start of an engine by phase."""

from alembic import op

revision = "0040_wakes"
down_revision = "0039_rollout"
branch_labels = None
depends_on = None

STATEMENTS = (
    # 0: as the controller's settings say.
    """
    ALTER TABLE desired
        ADD keep_alive_s int NOT NULL DEFAULT 0 CHECK (keep_alive_s BETWEEN 0 AND 604800),
        ADD load_timeout_s int NOT NULL DEFAULT 0 CHECK (load_timeout_s BETWEEN 0 AND 604800)
    """,
    # The last few hundred of each deployment; written by the controller, read by operators.
    """
    CREATE TABLE wake (
        id uuid PRIMARY KEY,
        deployment_id uuid NOT NULL REFERENCES deployment,
        index int NOT NULL CHECK (index >= 0),
        cause text NOT NULL CHECK (cause IN ('call', 'floor', 'load', 'crash')),
        outcome text NOT NULL CHECK (outcome IN ('ready', 'failed', 'ended')),
        woken_at timestamptz NOT NULL,
        decide_ms int NOT NULL CHECK (decide_ms >= 0),
        fetch_ms int NOT NULL CHECK (fetch_ms >= 0),
        schedule_ms int NOT NULL CHECK (schedule_ms >= 0),
        load_ms int CHECK (load_ms >= 0),
        first_token_ms int CHECK (first_token_ms >= 0),
        held int NOT NULL CHECK (held >= 0),
        attempts int NOT NULL CHECK (attempts > 0),
        reason text NOT NULL DEFAULT ''
    )
    """,
    "CREATE INDEX wake_deployment_id_woken_at_idx ON wake (deployment_id, woken_at DESC, id DESC)",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON wake TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

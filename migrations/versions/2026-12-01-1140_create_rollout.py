"""Create rollouts: versions that take another one's place, and the notes of how they came along."""

from alembic import op

revision = "0039_rollout"
down_revision = "0038_seal_queue"
branch_labels = None
depends_on = None

STATES = (
    "'requested', 'warming', 'shadowing', 'canary', 'switching', 'draining', 'stopping', 'rolling_back', 'returning',"
    " 'done', 'rolled_back', 'cancelled', 'failed'"
)
ENDS = "'done', 'rolled_back', 'cancelled', 'failed'"

STATEMENTS = (
    f"""
    CREATE TABLE rollout (
        id uuid PRIMARY KEY,
        model_id uuid NOT NULL REFERENCES model,
        names text[] NOT NULL CHECK (cardinality(names) > 0),
        from_version_id uuid NOT NULL REFERENCES model_version,
        to_version_id uuid NOT NULL REFERENCES model_version,
        from_deployment_id uuid NOT NULL REFERENCES deployment,
        to_deployment_id uuid NOT NULL REFERENCES deployment,
        moves_engines boolean NOT NULL,
        seed bytea NOT NULL CHECK (length(seed) = 32),
        plan jsonb NOT NULL,
        room text NOT NULL CHECK (room IN ('auto', 'beside', 'instead')),
        state text NOT NULL CHECK (state IN ({STATES})),
        step int NOT NULL CHECK (step >= 0),
        ending text CHECK (ending IN ({ENDS})),
        wish text CHECK (wish IN ('rolled_back', 'cancelled')),
        reason text NOT NULL,
        fence bigint NOT NULL,
        from_min_scale int NOT NULL,
        from_max_scale int NOT NULL,
        to_min_scale int NOT NULL,
        to_max_scale int NOT NULL,
        back_min_scale int NOT NULL,
        back_max_scale int NOT NULL,
        epoch bigint NOT NULL,
        state_since timestamptz NOT NULL,
        created_at timestamptz NOT NULL,
        ended_at timestamptz,
        CHECK (from_version_id <> to_version_id AND from_deployment_id <> to_deployment_id),
        CHECK ((ended_at IS NOT NULL) = (state IN ({ENDS})))
    )
    """,
    "CREATE INDEX rollout_model_id_idx ON rollout (model_id)",
    "CREATE UNIQUE INDEX rollout_live ON rollout (model_id) WHERE ended_at IS NULL",
    # Append-only: what decided each move stays as it was seen.
    """
    CREATE TABLE rollout_note (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        rollout_id uuid NOT NULL REFERENCES rollout,
        at timestamptz NOT NULL,
        state text NOT NULL,
        step int NOT NULL,
        reason text NOT NULL,
        figures jsonb NOT NULL
    )
    """,
    "CREATE INDEX rollout_note_rollout_id_id_idx ON rollout_note (rollout_id, id)",
    "GRANT SELECT, INSERT, UPDATE ON rollout TO tidegate_app",
    "GRANT SELECT, INSERT ON rollout_note TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Keep of a generation how often it was preempted, and what that wasted: the platform's, charged to nobody."""

from alembic import op

revision = "0032_preemptions"
down_revision = "0031_entitlements"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Null for all that were not: seals are over what is set, so those of before stay as they are.
    """
    ALTER TABLE usage_event
        ADD preemptions smallint,
        ADD waste_tokens bigint,
        ADD waste_us bigint,
        ADD CONSTRAINT usage_event_preemptions_check CHECK (
            num_nulls(preemptions, waste_tokens, waste_us) = 3
            OR (num_nulls(preemptions, waste_tokens, waste_us) = 0
                AND preemptions > 0 AND waste_tokens >= 0 AND waste_us >= 0)
        )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

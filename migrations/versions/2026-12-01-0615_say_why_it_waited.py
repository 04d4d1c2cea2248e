"""Keep of a generation that waited for its place why it did."""

from alembic import op

revision = "0035_waits"
down_revision = "0034_fallback_model"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Null for all that did not wait: seals are over what is set, so those of before stay as they are.
    """
    ALTER TABLE usage_event
        ADD wait bigint[],
        ADD CONSTRAINT usage_event_wait_check CHECK (cardinality(wait) = 7 AND array_position(wait, NULL) IS NULL)
    """,
    """
    COMMENT ON COLUMN usage_event.wait IS
        'what was full, its limit, estimated wait us, ahead, then granted before it of batch, standard, priority'
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Keep a limit that takes the place of one of another mode as one change, which is undone as one."""

from alembic import op

revision = "0020_limit_beside"
down_revision = "0019_sealed_records"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The rule of the same slot but for its mode that the same change removed or put back; null: none.
    op.execute(
        """
        ALTER TABLE limit_change
            ADD COLUMN beside_mode text CHECK (beside_mode IN ('hard', 'soft', 'dark')),
            ADD COLUMN beside_before numeric(38, 0),
            ADD COLUMN beside_after numeric(38, 0),
            ADD CHECK ((beside_mode IS NULL) = (num_nonnulls(beside_before, beside_after) = 0)),
            ADD CHECK (beside_mode IS DISTINCT FROM mode)
        """
    )

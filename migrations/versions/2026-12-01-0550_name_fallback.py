"""Let a deployment name the model that serves what it has no capacity for."""

from alembic import op

revision = "0034_fallback_model"
down_revision = "0033_paid_expiry"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A public name as callers write it, resolved when it is needed; empty: none.
    op.execute("ALTER TABLE deployment ADD fallback_model text NOT NULL DEFAULT ''")

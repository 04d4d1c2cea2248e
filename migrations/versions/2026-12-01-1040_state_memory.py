"""Let an operator state an engine's memory and a request's need of it: together they bound its batch."""

from alembic import op

revision = "0036_batch_bound"
down_revision = "0035_waits"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # MB (10^6 bytes) of one engine's accelerators, and KV of one request as it begins; 0: not known, and then both.
    op.execute("""
        ALTER TABLE deployment
            ADD gpu_memory_mb int NOT NULL DEFAULT 0 CHECK (gpu_memory_mb >= 0),
            ADD kv_request_mb int NOT NULL DEFAULT 0 CHECK (kv_request_mb >= 0),
            ADD CONSTRAINT deployment_memory_known CHECK ((gpu_memory_mb = 0) = (kv_request_mb = 0))
    """)

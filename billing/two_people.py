"""Two people for money above a limit: whose sums are added up, who may ask for more, and who may decide (ADR 0030)."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from billing import errors
from tenants import vouching
from tenants.types import Responsible

ALONE_WINDOW = timedelta(hours=24)


def require_answer(by: Responsible) -> None:
    """Let ask for more than one person may do alone only where somebody answers for it.

    Raises:
        PlatformError: NOBODY_ANSWERS.
    """
    if by.answers is None:
        raise errors.nobody_answers()


def is_other(by: Responsible, operator_id: UUID, people: Sequence[UUID] | None) -> bool:
    """Say whether who decides is none of those who asked, and not the operator by which they did."""
    return by.operator_id != operator_id and not set(by.people) & set(people or ())


def require_other(by: Responsible, operator_id: UUID, people: Sequence[UUID] | None) -> None:
    """Let decide only a confirmed person who is there, and is none of those who asked.

    Raises:
        PlatformError: SECOND_PERSON_NEEDED, SIGN_IN_TO_DECIDE, OPERATOR_NOT_CONFIRMED.
    """
    if not is_other(by, operator_id, people):
        raise errors.second_person_needed()
    vouching.require_person(by)

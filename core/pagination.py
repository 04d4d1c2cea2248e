"""Pages of a list: newest first, bounded, continued after the last id seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import UUID

LIMIT_DEFAULT = 50
LIMIT_MAX = 200

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """At most `limit` items; `next_after` is the id to continue after, None at the end."""

    items: Sequence[T]
    next_after: UUID | None


def page_of(found: Sequence[T], limit: int, id_of: Callable[[T], UUID]) -> Page[T]:
    """Cut what was found with `limit + 1` down to a page."""
    items = found[:limit]
    return Page(items, id_of(items[-1]) if len(found) > limit else None)


def page_in_memory(everything: Sequence[T], after: UUID | None, limit: int, id_of: Callable[[T], UUID]) -> Page[T]:
    """Page a short list that is in memory whole, newest first (ids are UUIDv7)."""
    rest = sorted((item for item in everything if after is None or id_of(item) < after), key=id_of, reverse=True)
    return page_of(rest[: limit + 1], limit, id_of)

"""Rows of Postgres that this process cannot read: each is closed to whom it concerns, and told; the others are read.

One row of a newer version, or one that somebody wrote by hand, must not keep a gateway from following all the rest.
"""

from collections.abc import Callable
from uuid import UUID

from core.logging import get_logger

Report = Callable[[str, UUID, Exception], None]
"""Takes what sort of row it is, whose it is, and what was wrong with it."""

log = get_logger(__name__)


def log_unreadable(kind: str, row_id: UUID, error: Exception) -> None:
    """Say it in the log alone; not a word of what stands in the row."""
    log.error("row.unreadable", kind=kind, id=row_id.hex, error=type(error).__name__)

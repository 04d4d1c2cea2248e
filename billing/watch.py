"""Beside the posting: whose usage was posted, and then their budgets and credit looked at.

What is noted and not looked at when the process dies is found by the worker's sweeps.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from uuid import UUID

from billing import credit_alerts, crossings
from billing.crossings import Use
from billing.types import UsageEvent
from core.clock import Clock
from core.db import Sessions

QUARTER_US = 15 * 60 * 1_000_000  # every zone's days begin at a quarter of an hour of UTC
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Watch:
    """Remembers tenants, projects, keys and quarters of an hour, as numbers: a UUID's own hash costs too much here."""

    def __init__(self, sessions: Sessions, clock: Clock) -> None:
        self._sessions = sessions
        self._clock = clock
        self._noted: set[tuple[int, int, int, int]] = set()
        self.took_ms = 0  # the last look

    def note(self, events: Iterable[UsageEvent]) -> None:
        """Remember whose events were posted."""
        self._noted.update(
            (event.tenant_id.int, event.project_id.int, event.key_id.int, event.admitted_at_us // QUARTER_US)
            for event in events
        )

    async def look(self) -> int:
        """Emit crossings and alerts for all that is noted; returns how many are new. After an error it stays noted.

        Raises:
            sqlalchemy.exc.SQLAlchemyError, OSError: Postgres is away.
        """
        started = self._clock.monotonic()
        noted, self._noted = self._noted, set()
        uses: dict[UUID, list[Use]] = {}
        for tenant, project, key, quarter in noted:
            at = EPOCH + timedelta(microseconds=quarter * QUARTER_US)
            uses.setdefault(UUID(int=tenant), []).append((UUID(int=project), UUID(int=key), at))
        try:
            tenant_ids, new = sorted(uses), 0
            for start in range(0, len(tenant_ids), crossings.PAGE):
                page = tenant_ids[start : start + crossings.PAGE]
                new += await crossings.look(self._sessions, page, uses)
                new += await credit_alerts.look(self._sessions, page, self._clock)
        except BaseException:
            self._noted |= noted
            raise
        finally:
            self.took_ms = int(1000 * (self._clock.monotonic() - started))
        return new

"""Whether a request that its engine never answered may be sent to another replica: rarely, or retries feed an overload.

The rules of the SRE book (Handling Overload): a tenth of what was accepted for the model in the last ten seconds, and
nothing while most of its replicas are full, because then the error must reach those who can wait.
"""

from uuid import UUID

WINDOW_S = 10
SHARE = 0.1  # of what was sent to the deployment's engines in the window
FEW = 3  # in the window, where a tenth is less: a replica that dies must not fail a model that is seldom called
FULL_PART = 0.5  # of the replicas: with more of them full nothing is sent again
DEPLOYMENTS_MAX = 10_000


class _Window:
    """Counts by second of the last ten: accepted, sent again."""

    __slots__ = ("accepted", "again", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.accepted = [0] * WINDOW_S
        self.again = [0] * WINDOW_S

    def turn(self, second: int) -> None:
        """Forget the seconds that have left the window."""
        for passed in range(max(self.second, second - WINDOW_S) + 1, second + 1):
            self.accepted[passed % WINDOW_S] = self.again[passed % WINDOW_S] = 0
        self.second = max(self.second, second)


class RetryBudget:
    """By deployment, at this gateway; a second sending counts where it is allowed, a first one always."""

    def __init__(self) -> None:
        self._windows: dict[UUID, _Window] = {}

    def accept(self, deployment_id: UUID, now_s: float) -> None:
        """Count a request that goes to an engine for the first time."""
        second = int(now_s)
        window = self._windows.get(deployment_id)
        if window is None:
            window = self._add(deployment_id, second)
        elif window.second != second:
            window.turn(second)
        window.accepted[second % WINDOW_S] += 1

    def spend(self, deployment_id: UUID, now_s: float) -> bool:
        """Whether one more may be sent again now; it counts."""
        second = int(now_s)
        window = self._windows.get(deployment_id) or self._add(deployment_id, second)
        window.turn(second)
        if sum(window.again) + 1 > max(float(FEW), SHARE * sum(window.accepted)):
            return False
        window.again[second % WINDOW_S] += 1
        return True

    def _add(self, deployment_id: UUID, second: int) -> _Window:
        if len(self._windows) >= DEPLOYMENTS_MAX:  # of deployments that are gone, nearly all
            self._windows.clear()
        window = self._windows[deployment_id] = _Window(second)
        return window

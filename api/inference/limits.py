"""The x-ratelimit headers: exact on what was admitted or refused by a limit, else as this replica last saw them.

Of several limits of one kind the one nearest to its end is shown: of requests, of input tokens and of output tokens per
minute, and of requests at once. What OpenAI's clients read of tokens is the nearer of input and output.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from core.demand import Demand, DemandKind, Unit
from core.errors import PlatformError
from tenants import quotas
from tenants.types import LimitMetric, Principal

KEYS_MAX = 50_000
WHENEVER = datetime(1970, 1, 2, tzinfo=UTC)  # rates and concurrencies do not depend on the day
_NAMES = {Unit.REQUEST: b"Requests", Unit.INPUT_TOKEN: b"Input-Tokens", Unit.OUTPUT_TOKEN: b"Output-Tokens"}
_TOKENS, _CONCURRENCY = b"Tokens", b"Concurrency"
_UNIT_OF_METRIC = {
    LimitMetric.REQUESTS_PER_MINUTE: Unit.REQUEST,
    LimitMetric.INPUT_TOKENS_PER_MINUTE: Unit.INPUT_TOKEN,
    LimitMetric.OUTPUT_TOKENS_PER_MINUTE: Unit.OUTPUT_TOKEN,
}
_FIRST = 5  # of a grant's answer that speaks of limits
# Where an answer tells the places of limits and their numbers, by whether it tells of concurrency and of which units.
_GETTERS: dict[tuple[object, ...], tuple[Any, Any]] = {
    (True,): (itemgetter(6), itemgetter(5)),
    (False, Unit.REQUEST): (itemgetter(7), itemgetter(5, 6)),
    (True, Unit.REQUEST): (itemgetter(6, 9), itemgetter(5, 7, 8)),
}


def _template(name: bytes, limit: int, reset: bytes = b"%d") -> bytes:
    """Lines with places for what remains and for the reset in s."""
    return b"X-Ratelimit-Limit-%b: %d\r\nX-Ratelimit-Remaining-%b: %%d\r\nX-Ratelimit-Reset-%b: %bs\r\n" % (
        *(name, limit),
        *(name, name, reset),
    )


class LimitLines:
    """The header lines of an offer, ready but for their numbers. `named`: the demands that a grant's answer names."""

    __slots__ = ("known", "named", "numbers", "of_tokens", "places", "shows_concurrency", "templates", "units")

    def __init__(self, named: Sequence[Demand]) -> None:
        self.named = tuple(named)
        self.templates = [_template_of(demand) if demand.enforced else b"" for demand in named]
        self.of_tokens = [_template(_TOKENS, demand.limit) if demand.unit else b"" for demand in named]
        shown = [demand for demand in named if demand.enforced]
        self.shows_concurrency = any(demand.kind is DemandKind.CONCURRENCY for demand in shown)
        self.units = sorted({demand.unit for demand in shown if demand.kind is DemandKind.RATE})
        # Without limits of tokens the lines of an answer are one template, found by the limits that it names.
        self.known: dict[object, bytes] = {}
        self.places, self.numbers = _GETTERS.get((self.shows_concurrency, *self.units), (None, None))

    def of(self, reply: Sequence[int]) -> bytes:
        """Return the lines of what was granted; see `scheduler.types.Grant.reply`."""
        if len(reply) <= _FIRST:
            return b""
        if self.places is not None and self.numbers is not None:
            template = self.known.get(self.places(reply)) or self._learn(reply)
            lines: bytes = template % self.numbers(reply)
            return lines
        at, lines, templates = _FIRST, b"", self.templates
        if self.shows_concurrency:
            lines = templates[reply[6]] % reply[5]
            at = 7
        least, tokens = -1, b""
        for unit in self.units:
            remaining, reset_s, place = reply[at : at + 3]
            at += 3
            lines += templates[place] % (remaining, reset_s)
            if unit and (least < 0 or remaining < least):
                least, tokens = remaining, self.of_tokens[place] % (remaining, reset_s)
        return lines + tokens

    def _learn(self, reply: Sequence[int]) -> bytes:
        """Make the template of an answer that names these limits."""
        at = _FIRST + 1
        template = b""
        if self.shows_concurrency:
            template, at = self.templates[reply[at]], at + 2
        if self.units:
            template += self.templates[reply[at + 1]]
        if self.places is not None:
            self.known[self.places(reply)] = template
        return template

    def rates(self, reply: Sequence[int]) -> "list[State]":
        """Return the rates that the answer speaks of."""
        at = _FIRST + 2 * self.shows_concurrency
        return [
            State(remaining, self.named[place].limit, reset_s, self.named[place])
            for remaining, reset_s, place in (reply[at + 3 * n : at + 3 * n + 3] for n in range(len(self.units)))
        ]


NO_LIMITS = LimitLines(())


class State(NamedTuple):
    """A rate as last seen; ordered by what remains."""

    remaining: int
    limit: int
    reset_s: int
    demand: Demand


class SeenLimits:
    """What the last admitted request of each key said of its limits, and when (monotonic s)."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Sequence[int], LimitLines, float]] = {}  # by key id, as a number: quick to hash

    def note(self, key_id: UUID, reply: Sequence[int], lines: LimitLines, now: float) -> None:
        if len(self._seen) >= KEYS_MAX:
            self._seen.clear()
        self._seen[key_id.int] = (reply, lines, now)

    def headers(self, principal: Principal, now: float, error: PlatformError | None = None) -> bytes:
        """Header lines of an answer to a request that took nothing of its key's limits.

        The limit that `error` names has nothing left; a rate stands as last seen, or whole once its window is over.
        How many requests run now is not known here, so no other concurrency is shown.
        """
        known = self._known(principal, now)
        nearest: dict[Unit, tuple[int, int, int]] = {}  # remaining, limit, reset
        for demand in quotas.limits(principal, WHENEVER):
            if demand.kind is DemandKind.RATE and demand.enforced:
                remaining, limit, reset_s = known.get(demand.counter, (demand.limit, demand.limit, demand.window_s))
                used = limit - remaining  # of the limit as it was then; it may have been changed since
                state = (max(demand.limit - used, 0), demand.limit, reset_s)
                nearest[demand.unit] = min(nearest.get(demand.unit, state), state)
        lines = b""
        metric = error.fields.get("metric") if error is not None else None
        if error is not None and metric is not None and error.retry_after_s is not None:
            refused = (0, int(str(error.fields["limit"])), error.retry_after_s)
            unit = _UNIT_OF_METRIC.get(LimitMetric(str(metric)))
            if unit is None:
                lines = _lines(_CONCURRENCY, refused)
            else:
                nearest[unit] = refused
        lines += b"".join(_lines(_NAMES[unit], nearest[unit]) for unit in sorted(nearest))
        tokens = [state for unit, state in nearest.items() if unit]
        return lines + _lines(_TOKENS, min(tokens)) if tokens else lines

    def _known(self, principal: Principal, now: float) -> dict[str, tuple[int, int, int]]:
        """What still holds of what was seen, by counter."""
        seen = self._seen.get(principal.key_id.int)
        if seen is None:
            return {}
        reply, lines, at = seen
        return {state.demand.counter: state[:3] for state in lines.rates(reply) if at + state.reset_s > now}


def _template_of(demand: Demand) -> bytes:
    """A place at once comes back whenever a request ends: its reset is always 0 s."""
    reset = b"%d" if demand.kind is DemandKind.RATE else b"0"
    return _template(_name(demand), demand.limit, reset)


def _name(demand: Demand) -> bytes:
    return _NAMES[demand.unit] if demand.kind is DemandKind.RATE else _CONCURRENCY


def _lines(name: bytes, state: tuple[int, int, int]) -> bytes:
    remaining, limit, reset_s = state
    return _template(name, limit) % (remaining, reset_s)

"""One block: what a caller's requests on one deployment may take at this replica without asking. Pure; see ADR 0032."""

from typing import TYPE_CHECKING

from core.tiers import Tier

if TYPE_CHECKING:
    from scheduler.types import Grant, Packed, Prepared

NO_LIMIT = 10**15  # of a rate that the caller has no limit of
SECOND_US = 1_000_000
KEPT_US = 62 * SECOND_US  # what is older has left every window of a minute
Used = tuple[int, int, int]
"""Places, tokens reserved by them, nano."""

NOTHING = (0, 0, 0, 0, 0, 0)
PLACES_MIN, REQUESTS_MIN = 16, 64  # wanted, whatever was used


class Block:
    """What is held in Valkey (`size`, `reserved`, `total`), and how much of it is free here.

    `places`, `tokens` and `nano` come back when a request ends, but for what it was charged. `requests`, `input` and
    `output` are of rates and good until `until`, which is 0 while nothing may be taken.
    """

    __slots__ = (
        *("again_at", "calling", "charges", "gone", "holds", "input", "key", "made_at", "nano", "output", "packed"),
        *("places", "prepared", "recalled", "reply", "requests", "reserved", "said", "size", "taken_of", "tier"),
        *("tokens", "total", "unsure", "until", "unused"),
    )

    def __init__(self, key: bytes, prepared: "Prepared", packed: "Packed", tier: Tier) -> None:
        self.key = key
        self.prepared = prepared
        self.packed = packed
        self.tier = tier
        self.size = self.reserved = self.total = 0
        self.places = self.tokens = self.nano = 0
        self.requests = self.input = self.output = 0
        self.taken_of = (0, 0, 0)  # what it had of rates at first
        self.holds = 0  # sum of what was held for those admitted since
        self.until = self.made_at = self.again_at = 0.0  # monotonic
        self.reply: list[int] = []  # see `scheduler.types.Grant.reply`
        self.charges: list[bytes | str | int] = []  # request, nano, … that Valkey has not been told
        self.unsure: list[list[bytes | str | int]] = []  # those that it was told and has not answered
        self.unused: dict[int, list[int]] = {}  # of rates by the second of the server: requests, input, output tokens
        self.said = 0  # the total when Valkey was last asked
        self.calling = self.recalled = self.gone = False

    def take(self, now: float, hold: int, input_tokens: int, output_tokens: int) -> bool:
        """Take what a request needs, all or nothing."""
        tokens = input_tokens + output_tokens
        if (
            now >= self.until
            or self.places < 1
            or self.requests < 1
            or hold > self.nano
            or tokens > self.tokens
            or input_tokens > self.input
            or output_tokens > self.output
        ):
            return False
        self.places -= 1
        self.requests -= 1
        self.nano -= hold
        self.tokens -= tokens
        self.input -= input_tokens
        self.output -= output_tokens
        self.holds += hold
        return True

    def give(
        self, grant: "Grant", charge: int, input_tokens: int, output_tokens: int, *, event: bool, unserved: bool = False
    ) -> None:
        """Give back what a request has that was taken here, but for its charge; `event`: that will be posted.

        `unserved`: no rate is to count it.
        """
        self.places += 1
        self.tokens += grant.input_tokens + grant.output_tokens
        self.nano += grant.hold - charge
        if event and self.prepared.tenant:
            self.total -= charge
            self.charges += (grant.key, charge)
        if unserved:
            has = {demand.unit for demand in self.prepared.rates}
            taken = (1, grant.input_tokens, grant.output_tokens)
            self._note_unused(grant.reply[3], *(n if unit in has else 0 for unit, n in enumerate(taken)))
        elif self.prepared.tokens:
            more_input = grant.input_tokens - input_tokens if input_tokens >= 0 else 0
            more_output = grant.output_tokens - output_tokens if output_tokens >= 0 else 0
            self._note_unused(grant.reply[3], 0, more_input, more_output)

    def _note_unused(self, at_us: int, requests: int, input_tokens: int, output_tokens: int) -> None:
        entry = self.unused.setdefault(at_us // SECOND_US, [0, 0, 0])
        entry[0] += requests
        entry[1] += input_tokens
        entry[2] += output_tokens

    @property
    def used(self) -> Used:
        """What its requests have that run."""
        return self.size - self.places, self.reserved - self.tokens, self.total - self.nano

    @property
    def taken(self) -> int:
        """How many were admitted since it was made or renewed."""
        return self.taken_of[0] - self.requests

    def wanted(self, now: float) -> tuple[int, ...]:
        """Return what the next second is likely to need: places, tokens, requests, input, output tokens, nano."""
        taken = max(1, self.taken)
        requests = max(REQUESTS_MIN, int(1.25 * taken / max(0.02, now - self.made_at)))
        places = max(PLACES_MIN, self.used[0] // 2)
        input_tokens = -(-(self.taken_of[1] - self.input) // taken)
        output_tokens = -(-(self.taken_of[2] - self.output) // taken)
        return wanted_of(places, requests, input_tokens, output_tokens, -(-self.holds // taken))

    def returned(self) -> list[tuple[int, int, int, int]]:
        """Return what of rates is given back, by when it was taken (µs); it can be taken no more."""
        if self.until:
            has = {demand.unit for demand in self.prepared.rates}
            left = (self.requests, self.input, self.output)
            self._note_unused(self.reply[3], *(n if unit in has else 0 for unit, n in enumerate(left)))
        self.requests = self.input = self.output = 0
        self.taken_of = (0, 0, 0)
        unused, self.unused = self.unused, {}
        oldest = (self.reply[3] - KEPT_US) // SECOND_US if self.reply else 0
        return [
            (second * SECOND_US, requests, input_tokens, output_tokens)
            for second, (requests, input_tokens, output_tokens) in unused.items()
            if second >= oldest
        ]

    def begin_call(self) -> Used:
        """Stop taking until the answer is in; returns what is used."""
        self.calling, self.until, self.said = True, 0.0, self.total
        return self.used

    def answered(self, held: Used, rates: tuple[int, int, int], reply: list[int]) -> None:
        """Take over what Valkey holds now. Meanwhile requests may have ended, and been charged."""
        places, tokens, nano = self.used
        charged = self.said - self.total
        self.size, self.reserved, self.total = held[0], held[1], held[2] - charged
        self.places, self.tokens, self.nano = self.size - places, self.reserved - tokens, self.total - nano
        self.calling = False
        if reply:
            has = {demand.unit for demand in self.prepared.rates}
            self.requests, self.input, self.output = (n if unit in has else NO_LIMIT for unit, n in enumerate(rates))
            self.taken_of = self.requests, self.input, self.output
            self.reply, self.holds = reply, 0


def wanted_of(places: int, requests: int, input_tokens: int, output_tokens: int, hold: int) -> tuple[int, ...]:
    """Return what so many requests need; tokens and hold are of one."""
    tokens = input_tokens + output_tokens
    return places, 2 * places * tokens, requests, requests * input_tokens, requests * output_tokens, requests * hold

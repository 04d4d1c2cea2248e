"""A plain model of admission: replays what the server executed and says of each step whether it was right.

It knows the limits from the test and all else from leases: who runs, who waits, what was taken when. It keeps no
counter that a script could share a mistake with: what a cap holds is the number of leases that name it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

import msgspec

from core.load import LAYOUT as LOAD
from core.tiers import Tier
from scheduler import commands
from tests.factories.server_log import Call

LEASE, ACQUIRE, RELEASE, FIGURE = Struct("<cBddddd"), Struct("<Bdddd"), Struct("<dddd"), Struct("<ddd")
FORM_ID, KINDS, PREEMPTED_MAX = 32, 4, 2
CAP, RECORD, LEASES, LOADS, OUT, CREDIT, FORM = (
    f"{{tg}}:{kind}:" for kind in ("c", "o", "lease", "m", "out", "credit", "form")
)
CEILINGS = {Tier.BATCH: 70, Tier.STANDARD: 90, Tier.PRIORITY: 100}
WINDOW_S, BUCKET_S = 60, 1
WRITES = frozenset({b"SET", b"MSET", b"HSETNX", b"HSET", b"HDEL", b"DEL", b"ZADD", b"ZREM"})
NEEDED = frozenset(WRITES | {b"FCALL"})


@dataclass(eq=False)
class Lease:
    """One request, as the scripts wrote it down."""

    request: str
    replica: str
    deployment: str
    owner: str
    names: tuple[str, ...]
    tier: Tier
    tokens: tuple[int, int]
    at_s: float
    deadline_s: float
    granted: bool
    at_the_door: bool
    preempted: int = 0
    used: tuple[int, int] | None = None  # as its release says; nobody said so of one whose process was killed
    asked_s: float = 0.0
    granted_s: float | None = None
    ended_s: float | None = None

    @property
    def cost(self) -> int:
        """In tenths of an input token: as used, else as estimated."""
        prompt, output = self.used or self.tokens
        return 10 * prompt + 20 * output


class Event(NamedTuple):
    """A step in a lease's life.

    It ``asks`` (and waits), is granted at the ``door``, is ``granted`` later, goes ``back`` (it gave its place and
    waits again), has ``ended``.
    """

    at_s: float
    kind: str
    lease: Lease


@dataclass
class Rules:
    """What the test set up.

    `limits`: key of a cap or of a record → how many leases may name it. `rates`: key of a record → requests and input
    tokens a minute. `guarantees`: deployment → owner → places kept for it.
    """

    limits: dict[str, int]
    deployments: dict[str, int]
    platform: int
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    guarantees: dict[str, dict[str, int]] = field(default_factory=dict)


class Ledger:
    """Every lease that ever was, and what held when."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.leases: dict[str, Lease] = {}  # by request; none is ever made twice
        self.live: dict[str, Lease] = {}
        self.events: list[Event] = []
        self.whys: dict[str, set[str]] = defaultdict(set)  # request → what could refuse it when it asked
        self.passed: set[str] = set()  # were let in by `acquire`, to run or to wait
        self.calls: Counter[str] = Counter()
        self.counted = 0  # counters that were compared
        self._forms: dict[str, str] = {}  # form → deployment
        self._held: Counter[str] = Counter()  # by key of a cap or record
        self._running: Counter[str] = Counter()  # by deployment
        self._waiting: dict[str, dict[str, Lease]] = defaultdict(dict)
        self._by_owner: Counter[tuple[str, str]] = Counter()  # running, by deployment and owner
        self._out: dict[str, dict[str, int]] = defaultdict(dict)  # tenant → request → nano
        self._available: dict[str, int] = {}
        self._rated: dict[str, deque[Lease]] = defaultdict(deque)  # by record, in the order they were let in
        self._unserved: set[str] = set()  # all that they took is given back
        self._adaptive: dict[str, tuple[float, float]] = {}  # deployment → requests and tokens, 0: none
        self._unclaimed: set[str] = set()  # grants in the post
        self._withdrawn: set[str] = set()  # grants that the present call takes back because nobody claimed them

    def replay(self, calls: Iterable[Call]) -> None:
        for call in calls:
            name = call.parts[0]
            if name == b"FCALL":
                self._function(call)
            elif name in WRITES:
                self._write([call.parts], {}, within_script=False)

    def _function(self, call: Call) -> None:
        name = call.parts[1].decode().removeprefix("tg_").rpartition("_")[0]
        keys = [key.decode() for key in call.parts[3 : 3 + int(call.parts[2])]]
        arguments = call.parts[3 + len(keys) :]
        self.calls[name] += 1
        request = ""
        if name == "acquire":
            request = arguments[3].decode()
            before = self._could_refuse(keys, arguments)
        elif name == "caps":
            self._adaptive[arguments[1].decode()] = float(arguments[2]), float(arguments[3])
        elif name == "release":
            request = arguments[2].decode()
            self._note_used(request, arguments)
        written: dict[str, bytes] = {}
        had = request in self.leases
        self._withdrawn.clear()
        self._write(call.inner, written, within_script=True)
        if name == "acquire" and not had:
            self._check_door(request, before)
        self._check_counters(written)

    # what was written

    def _write(self, writes: list[list[bytes]], written: dict[str, bytes], *, within_script: bool) -> None:
        for name, *parts in writes:
            key = parts[0].decode() if parts else ""
            command = name.decode()
            if key.startswith(LEASES):
                self._write_lease(command, key.removeprefix(LEASES), parts[1:])
            elif key.startswith(OUT):
                self._write_out(command, key.removeprefix(OUT), parts[1:])
            elif command in {"ZADD", "ZREM"}:
                if key == commands.UNCLAIMED:
                    self._write_unclaimed(command, parts[-1].decode().split(" ")[0], within_script=within_script)
            elif command in {"SET", "MSET"}:
                pairs = parts[:2] if command == "SET" else parts
                for one, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._write_value(one.decode(), value, written)
            elif command == "DEL":
                for one in parts:
                    assert not self._held[one.decode()], f"{one.decode()} is removed and in use"

    def _write_unclaimed(self, command: str, request: str, *, within_script: bool) -> None:
        if command == "ZADD":
            self._unclaimed.add(request)
        elif request in self._unclaimed:
            self._unclaimed.remove(request)
            if within_script:
                self._withdrawn.add(request)

    def _write_value(self, key: str, value: bytes, written: dict[str, bytes]) -> None:
        if key == commands.OFFSET:
            self.now_s = int(value.lstrip(b"@")) / 1e6
        elif key.startswith(FORM):
            self._forms[key.removeprefix(FORM)] = msgspec.msgpack.decode(value)[0]
        elif key.startswith(CREDIT):
            self._available[key.removeprefix(CREDIT)] = int(FIGURE.unpack(value)[0])
            written[key] = value
        else:
            written[key] = value

    def _write_out(self, command: str, tenant: str, parts: list[bytes]) -> None:
        out, request = self._out[tenant], parts[0].decode()
        if command == "HDEL":
            out.pop(request, None)
        elif command == "HSET" or request not in out:
            out[request] = int(float(parts[1]))

    def _write_lease(self, command: str, replica: str, parts: list[bytes]) -> None:
        request = parts[0].decode()
        known = self.live.get(request)
        if command == "HDEL":
            if known is not None:
                self._end(known)
            return
        if command == "HSETNX" and known is not None:
            return
        text = parts[1]
        state, kind, at, prompt, output, _, deadline = LEASE.unpack(text[: LEASE.size])
        granted = state == b"G"
        if known is None:
            assert request not in self.leases, f"{request} has ended and is made again"
            owner, *names = text[LEASE.size + FORM_ID :].decode().split(" ")
            form = text[LEASE.size : LEASE.size + FORM_ID].decode()
            lease = Lease(
                *(
                    request,
                    replica,
                    self._forms[form],
                    owner,
                    tuple(names),
                    Tier(kind % KINDS),
                    (int(prompt), int(output)),
                ),
                *(at / 1e6, deadline / 1e6, False, granted),
                asked_s=self.now_s,
            )
            self.leases[request] = self.live[request] = lease
            self._enter(lease, granted=granted)
            return
        known.deadline_s = deadline / 1e6
        if granted and not known.granted:
            self._check_turn(known)
            self._grant(known, "granted")
        elif known.granted and not granted:
            assert kind // KINDS == known.preempted + 1 <= PREEMPTED_MAX, f"{request} is preempted too often"
            known.preempted += 1
            self._take_back(known)
            self._waiting[known.deployment][request] = known
            self.events.append(Event(self.now_s, "back", known))

    def _enter(self, lease: Lease, *, granted: bool) -> None:
        for name in lease.names:
            if name.startswith(RECORD):
                self._hold(name, 1)
                if name in self.rules.rates:
                    self._rated[name].append(lease)
        if granted:
            self._grant(lease, "door")
        else:
            self._waiting[lease.deployment][lease.request] = lease
            self.events.append(Event(self.now_s, "asks", lease))

    def _hold(self, name: str, change: int) -> None:
        self._held[name] += change
        limit = self.rules.limits.get(name)
        assert limit is None or self._held[name] <= limit, f"{self._held[name]} hold {name}, {limit} may"

    def _grant(self, lease: Lease, kind: str) -> None:
        self._waiting[lease.deployment].pop(lease.request, None)
        lease.granted, lease.granted_s = True, self.now_s
        self._running[lease.deployment] += 1
        self._by_owner[lease.deployment, lease.owner] += 1
        most, tokens_max = self._most(lease.deployment), self._adaptive.get(lease.deployment, (0, 0))[1]
        assert self._running[lease.deployment] <= most, f"{self._running[lease.deployment]} run where {most} may"
        tokens = self._tokens(lease.deployment)
        assert not tokens_max or self._running[lease.deployment] == 1 or tokens <= tokens_max, (
            f"{tokens} of {tokens_max}"
        )
        assert sum(self._running.values()) <= self.rules.platform
        for name in lease.names:
            if name.startswith(CAP):
                self._hold(name, 1)
        self.events.append(Event(self.now_s, kind, lease))

    def _take_back(self, lease: Lease) -> None:
        lease.granted = False
        self._running[lease.deployment] -= 1
        self._by_owner[lease.deployment, lease.owner] -= 1
        for name in lease.names:
            if name.startswith(CAP):
                self._hold(name, -1)

    def _end(self, lease: Lease) -> None:
        del self.live[lease.request]
        if not lease.granted or lease.request in self._withdrawn:
            self._unserved.add(lease.request)
        if lease.granted:
            self._take_back(lease)
        else:
            self._waiting[lease.deployment].pop(lease.request)
        for name in lease.names:
            if name.startswith(RECORD):
                self._hold(name, -1)
        lease.ended_s = self.now_s
        self.events.append(Event(self.now_s, "ended", lease))

    # what is right

    def within(self, deployment: str, owner: str) -> bool:
        """Has this tenant less than is guaranteed to it?"""
        guarantee = self.rules.guarantees.get(deployment, {}).get(owner, 0)
        return self._by_owner[deployment, owner] < guarantee

    def _most(self, deployment: str) -> int:
        most, adaptive = self.rules.deployments[deployment], int(self._adaptive.get(deployment, (0, 0))[0])
        return min(most, adaptive) if adaptive else most

    def _tokens(self, deployment: str) -> int:
        return sum(sum(one.tokens) for one in self.live.values() if one.granted and one.deployment == deployment)

    def _fits_tokens(self, deployment: str, tier: Tier, need: int) -> bool:
        top = self._adaptive.get(deployment, (0, 0))[1]
        if not top or not self._running[deployment]:
            return True
        return self._tokens(deployment) + need <= top * CEILINGS[tier] / 100

    def _fits_model(self, deployment: str, owner: str, tier: Tier, *, to_the_cap: bool = False) -> bool:
        most, guaranteed = self._most(deployment), self.rules.guarantees.get(deployment, {})
        kept = sum(max(0, n - self._by_owner[deployment, who]) for who, n in guaranteed.items())
        others = most - sum(guaranteed.values())
        held_back = 0 if to_the_cap else others - max(1, others * CEILINGS[tier] // 100)
        running = self._running[deployment]
        if self.within(deployment, owner):
            return running < most
        return running + kept + held_back < most

    def _check_turn(self, lease: Lease) -> None:
        """Of a grant out of the queue: it fits, and of its tenant's requests its time ends first."""
        floor = lease.tier is not Tier.PRIORITY
        assert self._fits_model(lease.deployment, lease.owner, lease.tier, to_the_cap=floor), f"{lease} does not fit"
        assert lease.deadline_s > self.now_s, f"{lease} is granted after its time"
        for other in self._waiting[lease.deployment].values():
            if (other.owner, other.tier) == (lease.owner, lease.tier):
                assert other.deadline_s >= lease.deadline_s - 1e-6, f"{other} should go before {lease}"

    def _could_refuse(self, keys: list[str], arguments: list[bytes]) -> set[str]:
        """What stands in the way of a request that asks now: codes of limits, and ``full`` where it has to wait."""
        form, owner = arguments[1].decode(), arguments[2].decode()
        tier, hold, _, prompt, output = ACQUIRE.unpack(arguments[4])
        if form not in self._forms:
            if len(arguments) <= 5:
                return {"unknown"}
            self._forms[form] = msgspec.msgpack.decode(arguments[5])[0]
        deployment, found = self._forms[form], set()
        for name in keys[1:]:
            found |= self._refused_by(name, Tier(tier), int(hold), int(prompt))
        waits = any(other.tier >= tier for other in self._waiting[deployment].values())
        if (
            not self._fits_model(deployment, owner, Tier(tier))
            or not self._fits_tokens(deployment, Tier(tier), int(prompt) + int(output))
            or (waits and not self.within(deployment, owner))
        ):
            found.add("full")
        return found

    def _refused_by(self, name: str, tier: Tier, hold: int, prompt: int) -> set[str]:
        """What one of its names says."""
        most = self.rules.limits.get(name, 10**9)
        if name.startswith(RECORD):
            over = {"CONCURRENCY_LIMITED"} if self._held[name] + 1 > most else set()
            return over | self._over_rate(name, prompt) if name in self.rules.rates else over
        if name.startswith(CREDIT):
            tenant = name.removeprefix(CREDIT)
            left = self._available.get(tenant, 0) - sum(self._out[tenant].values())
            return {"INSUFFICIENT_CREDIT"} if left < hold else set()
        if name == CAP + commands.GLOBAL:
            most = max(1, most * CEILINGS[tier] // 100)
        return {"full"} if name.startswith(CAP) and self._held[name] + 1 > most else set()

    def _over_rate(self, name: str, prompt: int) -> set[str]:
        """Which of its rates are over: surely (the code), or perhaps (with a mark), at the edge of the window."""
        found, rated = set(), self._rated[name]
        while rated and rated[0].at_s <= self.now_s - WINDOW_S - 2 * BUCKET_S:
            rated.popleft()
        requests_max, tokens_max = self.rules.rates[name]
        for length, mark in ((WINDOW_S, ""), (WINDOW_S + 2 * BUCKET_S, "?")):
            recent = [one for one in rated if one.at_s > self.now_s - length and one.request not in self._unserved]
            if len(recent) + 1 > requests_max:
                found.add("RATE_LIMITED" + mark)
            if sum((one.used or one.tokens)[0] for one in recent) + prompt > tokens_max:
                found.add("TOKENS_LIMITED" + mark)
        return found

    def _check_door(self, request: str, before: set[str]) -> None:
        lease = self.leases.get(request)
        refusing = before - {"full"}
        if lease is None:
            self.whys[request] = before
            assert before, f"{request} is refused for nothing"
            return
        self.passed.add(request)
        assert not {why for why in refusing if not why.endswith("?")}, f"{request} is let in past {refusing}"
        assert lease.at_the_door != ("full" in before), f"{lease} at the door: {before}"

    def _note_used(self, request: str, arguments: list[bytes]) -> None:
        lease = self.live.get(request)
        charge, prompt, output, _ = RELEASE.unpack(arguments[3])
        if lease is not None and lease.granted and prompt >= 0 and charge >= -2:
            lease.used = int(prompt), int(output)

    def _check_counters(self, written: dict[str, bytes]) -> None:
        """Each counter that a script wrote says what the leases come to."""
        for key, value in written.items():
            self.counted += 1
            if key.startswith(LOADS):
                waiting = self._waiting[key.removeprefix(LOADS)].values()
                load = LOAD.unpack(value)
                found = (self._running[key.removeprefix(LOADS)], len(waiting))
                assert load[:2] == found, f"{key} says {load[:2]}, there are {found}"
                tokens = self._tokens(key.removeprefix(LOADS))
                assert load[3] == tokens, f"{key} says {load[3]} tokens, there are {tokens}"
                tiers = tuple(sum(one.tier is tier for one in waiting) for tier in (Tier.BATCH, Tier.STANDARD))
                assert load[8:] == tiers
            elif key.startswith(CAP):
                assert int(float(value)) == self._held[key], f"{key} says {value!r}, there are {self._held[key]}"
            elif key.startswith(RECORD):
                assert Struct("<d").unpack_from(value)[0] == self._held[key], f"{key} is not {self._held[key]}"
            elif key.startswith(CREDIT):
                available, _, outstanding = FIGURE.unpack(value)
                assert outstanding == sum(self._out[key.removeprefix(CREDIT)].values())
                assert outstanding <= available, f"{key}: more is held than there is"

"""What a gateway knows of keys, models and prices, sealed on its disk: for a start without Postgres or Valkey.

Two files of mode 600 in the replica's folder, each replaced in one step. `policy`: digests of keys with their
principals, models, prices; written when something changed. `pulse`: until when that was known to hold, what callers had
here in the last minute, where engines listen; written all the time. Both are sealed with the installation's key, which
hides them and shows when a byte was changed: what is in them lets callers in.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from struct import Struct

import msgspec
import structlog

from api.inference.directory import Directory
from api.inference.snapshot import opened_credentials
from billing.price_table import PriceTable, VersionParts, VersionPrices
from catalog.types import ServedModel
from core.clock import Clock
from core.errors import PlatformError
from core.files import write_private
from core.sealing import NONCE_BYTES, seal, unseal
from knative.types import DeploymentState
from scheduler.fail_static import Figures
from tenants.types import Principal

EVERY_S = 15.0
LOOK_S = 0.25  # between looks whether something changed: a key that was revoked must not come back with a crash
PAUSE_S, PAUSES = 1.0, 4  # between writes at least so long, and so many times what the last one took
AHEAD_S = 5.0  # clocks are corrected by less; a file from later than that says nothing of its age
FRESH_S = 10.0  # what was confirmed longer ago is not written down: the file has it already
SLICE = 500  # keys encoded before other work has its turn
MICRO = 1_000_000
FORMAT = 1  # what another one wrote does not open
_LENGTH = Struct("<I")
_encode = msgspec.msgpack.encode

_log = structlog.get_logger("gateway")


class Head(msgspec.Struct):
    """A policy file begins with it; slices of keys follow. `at_us`: when it was known to hold."""

    revision: int
    at_us: int
    models: list[ServedModel]
    prices: list[tuple[int, VersionParts]]


class Pulse(msgspec.Struct):
    """`at_us`: the policy of this revision was known to hold then."""

    revision: int
    at_us: int
    shares: Figures
    states: list[DeploymentState]


class Policy(msgspec.Struct):
    """What was read."""

    head: Head
    principals: dict[bytes, Principal]


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _parted(text: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(text):
        (size,) = _LENGTH.unpack_from(text, at)
        parts.append(text[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


def read(folder: Path, key: bytes) -> Policy | None:
    """Return the policy in the folder; None when there is none that can be read."""
    plain = _plain(folder, "policy", key)
    if plain is None:
        return None
    try:
        head, *slices = _parted(plain)
        found = Policy(msgspec.msgpack.decode(head, type=Head), {})
        for part in slices:
            found.principals.update(msgspec.msgpack.decode(part, type=list[tuple[bytes, Principal]]))
    except (msgspec.MsgspecError, ValueError) as error:
        _log.warning("policy.unreadable", error=type(error).__name__)
        return None
    return found


def read_pulse(folder: Path, key: bytes) -> Pulse | None:
    """Return the pulse in the folder; None when there is none that can be read."""
    plain = _plain(folder, "pulse", key)
    try:
        return msgspec.msgpack.decode(plain, type=Pulse) if plain is not None else None
    except msgspec.MsgspecError as error:
        _log.warning("pulse.unreadable", error=type(error).__name__)
        return None


def _context(name: str) -> bytes:
    return b"tidegate %b %d" % (name.encode(), FORMAT)


def _plain(folder: Path, name: str, key: bytes) -> bytes | None:
    try:
        return unseal(key, (folder / name).read_bytes(), context=_context(name))
    except FileNotFoundError:
        return None
    except (OSError, PlatformError) as error:
        _log.warning("policy.unreadable", file=name, error=type(error).__name__)
        return None


def take(folder: Path, directory: Directory, clock: Clock, *, sealing: bytes, trust_s: int) -> bool:
    """Fill the directory with what the folder holds, unless it is older than `trust_s`; `/ready` says why not."""
    found, pulse = read(folder, sealing), read_pulse(folder, sealing)
    if found is None:
        directory.disk_note = "loading; no policy on disk"
        return False
    at_us = found.head.at_us
    if pulse is not None and pulse.revision == found.head.revision:
        at_us = max(at_us, pulse.at_us)
    age_s = (clock.now_us() - at_us) / MICRO
    if age_s < -AHEAD_S:
        directory.disk_note = f"loading; the policy on disk is {-age_s:.0f} s from the future: the clock was set back"
        return False
    age_s = max(0, age_s)
    if age_s > trust_s:
        directory.disk_note = f"loading; the policy on disk is {age_s:.0f} s old, more than {trust_s} s"
        return False
    directory.models = {model.name: model for model in found.head.models}
    directory.credentials = opened_credentials(sealing, found.head.models)
    versions = [(at, VersionPrices.of(parts)) for at, parts in found.head.prices]
    directory.prices = PriceTable(versions, as_of_us=clock.now_us())
    directory.principals = found.principals
    directory.revision, directory.fresh_at = found.head.revision, clock.monotonic() - age_s
    directory.changed()
    directory.loaded = directory.from_disk = True
    _log.warning("policy.taken_from_disk", age_s=round(age_s), keys=len(found.principals))
    return True


class PolicyKeeper:
    """Writes both files while Postgres is followed.

    Args:
        folder: of this replica; made when it is missing.
        key: 32 bytes, the installation's sealing key.
        directory: what is written down.
        clock: wall time and monotonic.
        shares: what callers had here; None while Valkey is away, as it says nothing then.
        states: of deployments.
    """

    def __init__(
        self,
        folder: Path,
        key: bytes,
        directory: Directory,
        clock: Clock,
        *,
        shares: Callable[[], Figures | None],
        states: Callable[[], list[DeploymentState]],
    ) -> None:
        self._folder = folder
        self._key = key
        self._directory = directory
        self._clock = clock
        self._shares = shares
        self._states = states
        self._written = -1  # the revision in the file
        self._last = Figures()
        self._tried_at, self._pause_s = clock.monotonic(), PAUSE_S

    async def run(self) -> None:
        """Write for ever. A disk that does not take it is told of, and does not end the traffic."""
        failing = False
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.due():
                continue
            began = self._clock.monotonic()
            try:
                await self.write()
                failing = False
            except OSError as error:
                if not failing:
                    _log.warning("policy.not_written", error=type(error).__name__)
                failing = True
            self._tried_at = self._clock.monotonic()
            self._pause_s = max(PAUSE_S, PAUSES * (self._tried_at - began))

    def due(self) -> bool:
        """Whether to write now: soon after a change, and else now and then."""
        since_s = self._clock.monotonic() - self._tried_at
        return since_s >= (self._pause_s if self._directory.revision != self._written else EVERY_S)

    async def write(self) -> None:
        """Write what is known, unless it is not known to hold now.

        Raises:
            OSError: the disk does not take it.
        """
        directory = self._directory
        age_s = self._clock.monotonic() - directory.fresh_at
        if not directory.loaded or directory.from_disk or age_s > FRESH_S:
            return
        at_us, revision = self._clock.now_us() - int(age_s * MICRO), directory.revision
        if revision != self._written and isinstance(directory.prices, PriceTable):
            head = Head(revision, at_us, list(directory.models.values()), directory.prices.parts())
            parts = [_encode(head)]
            keys = list(directory.principals.items())
            for start in range(0, len(keys), SLICE):
                parts.append(_encode(keys[start : start + SLICE]))
                await asyncio.sleep(0)
            await asyncio.to_thread(self._put, "policy", _joined(parts))
            self._written = revision
        if revision == self._written:
            self._last = self._shares() or self._last
            pulse = _encode(Pulse(revision, at_us, self._last, self._states()))
            await asyncio.to_thread(self._put, "pulse", pulse)

    async def close(self) -> None:
        """Write it a last time, if the disk takes it."""
        try:
            await self.write()
        except OSError as error:
            _log.warning("policy.not_written", error=type(error).__name__)

    def _put(self, name: str, plain: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sealed = seal(self._key, plain, context=_context(name), nonce=os.urandom(NONCE_BYTES))
        write_private(self._folder / name, sealed)

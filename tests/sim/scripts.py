"""The scheduler's own scripts on a virtual clock: a Valkey whose time stands still until it is set."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hiredis

from catalog.types import ServedModel
from core import keyspace
from core.demand import Demand, DemandKind
from core.load import LAYOUT
from core.resp import pack
from core.tiers import Tier
from scheduler import commands
from scheduler.caps import Caps
from scheduler.types import Entitlement, Prepared

REPLICA = "sim"
EPOCH_US = 1_000_000_000_000  # the virtual clock begins here
FOREVER_MS = 10**14
GLOBAL = Demand(DemandKind.CAP, commands.GLOBAL, 1, 10**6, "MODEL_BUSY")


class Scripts:
    """One gateway's view of the scheduler, without waiting: each call is answered before the next event."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._reader = hiredis.Reader()
        self.send("FLUSHALL")
        self.send("FUNCTION", "FLUSH")
        self.send("FUNCTION", "LOAD", commands.LIBRARY)
        self.send("ZADD", keyspace.BEAT, FOREVER_MS, REPLICA)
        self.epoch = b"sim"
        self.send("SET", keyspace.EPOCH, self.epoch)

    def close(self) -> None:
        self._socket.close()

    def send(self, *parts: object) -> Any:
        return self._exchange(pack(*parts))  # type: ignore[arg-type]

    def _exchange(self, command: bytes) -> Any:
        self._socket.sendall(command)
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def set_time(self, seconds: float) -> None:
        self.send("SET", commands.OFFSET, f"@{EPOCH_US + round(seconds * 1e6)}")

    def acquire(
        self,
        request: str,
        model: ServedModel,
        tenant: str,
        tier: Tier,
        *,
        weight: float = 1.0,
        tokens: tuple[int, int] = (100, 100),
        wait_s: float = 1000.0,
        entitlements: tuple[Entitlement, ...] = (),
    ) -> list[int]:
        """Ask for a place; the answer is the script's."""
        prepared = Prepared((), model, "", owner=tenant, weight=weight, entitlements=entitlements)
        caps = (GLOBAL, *prepared.caps)
        text, names = commands.form_text(prepared, caps), commands.packed_names(prepared, caps)
        form = commands.form_id(text)
        prefix = commands.acquire_prefix(names, form, tenant, epoch=self.epoch, replica=REPLICA, text=text)
        call = commands.acquire_call(prefix, _id(request), tier, 0, round(wait_s * 1e6), *tokens)
        reply: list[int] = self._exchange(commands.with_form(call, text))
        return reply

    def release(self, request: str, tokens: tuple[int, int], *, cached: int = 0) -> None:
        prefix = commands.release_prefix("", [], epoch=self.epoch, replica=REPLICA)
        self._exchange(commands.release_call(prefix, _id(request), commands.REMOVE, *tokens, cached))

    def yield_place(self, request: str, wait_s: float) -> int:
        """Answer that the request's place is given and it waits so long again; below 0: it keeps it."""
        wait_us = commands.KEEP_PLACE if wait_s < 0 else round(wait_s * 1e6)
        reply = self._exchange(commands.yield_call(_id(request), wait_us, epoch=self.epoch, replica=REPLICA))
        return int(reply[0])

    def press(self, model: ServedModel) -> None:
        self._exchange(commands.press_call(model.deployment_id.hex, epoch=self.epoch))

    def tick(self) -> None:
        keys = [keyspace.EPOCH, commands.OFFSET, keyspace.BEAT, commands.UNCLAIMED]
        self.send("FCALL", commands.TICK, 4, *keys, self.epoch, 100)

    def messages(self) -> Iterator[tuple[str, str]]:
        """Yield what the scheduler told this replica since the last time: kind and request. Grants are claimed."""
        while item := self.send("LPOP", keyspace.grants(REPLICA)):
            kind, request, *_ = item.decode().split(" ")
            if kind == "G":
                self.send("ZREM", commands.UNCLAIMED, f"{request} {REPLICA}")
            yield kind, request.rstrip("_")

    def load(self, model: ServedModel) -> tuple[float, ...]:
        raw = self.send("GET", keyspace.deployment(model.deployment_id))
        return LAYOUT.unpack(raw) if raw else (0.0,) * 10

    def set_caps(self, model: ServedModel, caps: Caps) -> None:
        self._exchange(commands.caps_call(model.deployment_id.hex, caps, epoch=self.epoch))


def _id(request: str) -> bytes:
    """Ids are 32 characters on the wire."""
    return request.ljust(32, "_").encode()

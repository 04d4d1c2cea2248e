"""A small Valkey client for the hot path: one connection, calls of one loop tick joined in one write.

Replies come back in the order of the calls, so a call that waits too long costs the whole connection: it is closed,
every call on it fails with `RespUnavailable`, and a late reply can never be taken for the answer to another call. A
failed call may or may not have been executed; callers make theirs idempotent. Reconnecting goes on in the background
for ever, with bounded backoff; meanwhile every call fails at once.
"""

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit

import hiredis
import msgspec

_MORE: Any = object()
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 1.0
PUBSUB_QUIET_S = 10.0  # a subscription that hears nothing for so long pings, for twice so long is opened anew
LIST_BLOCK_S = 5
LIST_BATCH = 100
NOT_NOW = ("LOADING", "MASTERDOWN", "CLUSTERDOWN")  # errors of a server that is there and cannot answer yet

Part = bytes | str | int


class RespError(Exception):
    """The server's answer is an error; the text begins with its code, e.g. ``NOSCRIPT``."""


class RespUnavailable(Exception):  # noqa: N818 - a state of the server, named as callers speak of it
    """No answer: not connected, connection lost, too late, or too many calls in flight."""


class Script(msgspec.Struct, frozen=True):
    """A Lua script and the name it has in the server's cache."""

    text: str
    sha: str


def script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def pack(*parts: Part) -> bytes:
    """Return the command as it goes over the wire."""
    arguments: Any = parts
    packed: bytes = hiredis.pack_command(arguments)
    return packed


class Address(msgspec.Struct, frozen=True):
    """Where the server is: a unix socket when `path` is set, else host and port."""

    path: str = ""
    host: str = "127.0.0.1"
    port: int = 6379
    username: str = ""
    password: str = ""
    database: int = 0


def parse_url(url: str) -> Address:
    """Return the address in ``unix:///path[?db=1]`` or ``redis://[[user]:password@]host[:port][/db]``.

    Raises:
        ValueError: another scheme, or a database that is not a number. The text never holds the password.
    """
    parts = urlsplit(url)
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        database = parts.query.removeprefix("db=") or "0"
        return Address(path=unquote(parts.path), username=username, password=password, database=int(database))
    if parts.scheme in {"redis", "valkey"}:
        return Address(
            host=parts.hostname or "127.0.0.1",
            port=parts.port or 6379,
            username=username,
            password=password,
            database=int(parts.path.strip("/") or 0),
        )
    raise ValueError(f"A Valkey URL begins with unix:// or redis://, not {parts.scheme[:20]!r}.")


def _fail(future: asyncio.Future[Any] | None, error: Exception) -> None:
    """Fail it without a complaint when nobody asks: a call may be sent and forgotten."""
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()


class _Connection(asyncio.Protocol):
    """One socket. `pending` holds the calls that wait for a reply, oldest first, with the time they were made."""

    def __init__(self, timeout_s: float, in_flight_max: int, push: Callable[[Any], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._in_flight_max = in_flight_max
        self._push = push
        self._reader = hiredis.Reader(replyError=RespError, notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None
        self._pending: deque[tuple[asyncio.Future[Any] | None, float]] = deque()  # None: nobody waits
        self._out: list[bytes] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._now = self._loop.time
        self._heard = self._written_at = self._now()
        self._overdue: tuple[asyncio.Future[Any] | None, float] | None = None
        self.on_error: Callable[[RespError], None] | None = None
        self._open = False
        self.pushing = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own are not instances of it
        self._open = True
        self._sweeper = self._loop.call_later(self._timeout_s / 4, self._sweep_again)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self.abort("the connection to Valkey was lost")

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if not self._open or len(self._pending) >= self._in_flight_max:
            _fail(future, RespUnavailable("too many calls in flight" if self._open else "not connected to Valkey"))
            return future
        if not self._out:
            self._begin_turn()
        self._out.append(packed)
        self._pending.append((future, self._written_at))
        return future

    def post(self, packed: bytes) -> None:
        """Send and forget; without a connection it is not sent."""
        if self._open and len(self._pending) < self._in_flight_max:
            if not self._out:
                self._begin_turn()
            self._out.append(packed)
            self._pending.append((None, self._written_at))

    def write(self, packed: bytes) -> None:
        """Send what has no reply of its own."""
        if not self._out:
            self._begin_turn()
        self._out.append(packed)

    def _begin_turn(self) -> None:
        """All calls of one turn of the loop go out together, and count as made when it began."""
        self._written_at = self._now()
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._open and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._heard = self._now()
        reader, take = self._reader, self._take
        reader.feed(data)
        try:
            while self._open and (reply := reader.gets()) is not _MORE:
                take(reply)
        except hiredis.ProtocolError:
            self.abort("Valkey's answer is not RESP")

    def _take(self, reply: Any) -> None:
        if self.pushing and self._push is not None:
            self._push(reply)
        elif not self._pending:
            self.abort("an answer without a call")
        else:
            future, _ = self._pending.popleft()
            if future is None:
                if isinstance(reply, RespError) and self.on_error is not None:
                    self.on_error(reply)
            elif not future.done():
                if type(reply) is RespError:
                    _fail(future, RespUnavailable(str(reply)) if str(reply).startswith(NOT_NOW) else reply)
                else:
                    future.set_result(reply)

    def _sweep_again(self) -> None:
        self.sweep(self._loop.time())
        if self._open:
            self._sweeper = self._loop.call_later(self._timeout_s / 4, self._sweep_again)

    def sweep(self, now: float) -> None:
        """Close when the oldest call is too old, or a subscription has been silent for too long.

        A call has to be overdue twice in a row: after the loop itself was held up, its answer may lie unread.
        """
        if self._pending and now - self._pending[0][1] >= self._timeout_s:
            oldest = self._pending[0]
            if self._overdue is oldest:
                self.abort(f"no answer from Valkey within {self._timeout_s:g} s")
            self._overdue = oldest
        elif self.pushing and now - self._heard >= 2 * PUBSUB_QUIET_S:
            self.abort("the subscription to Valkey fell silent")
        elif self.pushing and now - self._heard >= PUBSUB_QUIET_S:
            self.write(pack("PING"))

    def abort(self, reason: str) -> None:
        self._open = False
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._transport is not None:
            self._transport.abort()
        pending, self._pending = self._pending, deque()
        for future, _ in pending:
            if future is not None:
                _fail(future, RespUnavailable(reason))
        if not self.lost.done():
            self.lost.set_result(None)


class RespClient:
    """Calls on one connection that is kept up. Made by `connect`, ended by `close`.

    Args of `connect`:
        url: see `parse_url`.
        timeout_s: a call without a reply for so long fails and closes the connection.
        in_flight_max: calls beyond it fail at once.
    """

    def __init__(self, address: Address, timeout_s: float, in_flight_max: int, jitter: Callable[[], float]) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._in_flight_max = in_flight_max
        self._jitter = jitter
        self._connection: _Connection | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[Callable[[bool], None]] = []
        self._on_post_error: Callable[[RespError], None] | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        timeout_s: float = 1.0,
        in_flight_max: int = 20_000,
        required: bool = True,
        jitter: Callable[[], float] = random.random,
    ) -> Self:
        """Return the client, connected.

        Raises:
            RespUnavailable: there is no connection within `timeout_s`; with `required=False` the client is returned
                all the same and goes on trying.
            RespError: the server refused password or database.
        """
        client = cls(parse_url(url), timeout_s, in_flight_max, jitter)
        try:
            first: _Connection | None = await client._open(timeout_s)
        except RespUnavailable:
            if required:
                raise
            first = None
        client._connection = first
        if first is not None:
            first.on_error = client._post_failed
        client._start(client._keep(client._serve_calls, timeout_s, None, first))
        return client

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def watch(self, watcher: Callable[[bool], None]) -> None:
        """Call `watcher` on the loop with True after each reconnection and False after each loss."""
        self._watchers.append(watcher)

    def call(self, *parts: Part) -> asyncio.Future[Any]:
        """Send a command; the future holds the reply, `RespError` or `RespUnavailable`. May be forgotten."""
        return self.send(pack(*parts))

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Send one command made by `pack`; answers as `call` does."""
        connection = self._connection
        if connection is not None:
            return connection.send(packed)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        _fail(future, RespUnavailable("not connected to Valkey"))
        return future

    def post(self, packed: bytes) -> None:
        """Send one command and forget it, cheaper than `send`; it may be lost. See `on_post_error`."""
        if self._connection is not None:
            self._connection.post(packed)

    def on_post_error(self, callback: Callable[[RespError], None]) -> None:
        """Call `callback` with each error that the server answers to a posted command."""
        self._on_post_error = callback

    async def eval(self, what: Script, keys: Sequence[Part], args: Sequence[Part]) -> Any:
        """Run the script by its name, with its text when the server does not have it."""
        try:
            return await self.call("EVALSHA", what.sha, len(keys), *keys, *args)
        except RespError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
        return await self.call("EVAL", what.text, len(keys), *keys, *args)

    async def subscribe(
        self,
        channels: Sequence[str],
        callback: Callable[[bytes, bytes], None],
        on_gap: Callable[[], None] | None = None,
    ) -> None:
        """Call `callback(channel, payload)` for each message, on a connection of its own, until `close`.

        Returns once subscribed, or after `timeout_s` when the server is away (it goes on trying). Messages are lost
        while there is no connection: `on_gap` is called after each renewed subscription, to read the state anew.
        """
        ready = asyncio.Event()
        waiting = len(channels)

        def push(reply: Any) -> None:
            nonlocal waiting
            if reply[0] == b"message":
                self._run(callback, reply[1], reply[2])
            elif reply[0] == b"subscribe":
                waiting -= 1
                if waiting == 0 and ready.is_set() and on_gap is not None:
                    self._run(on_gap)
                if waiting == 0:
                    ready.set()

        async def serve(connection: _Connection) -> None:
            nonlocal waiting
            waiting = len(channels)
            connection.pushing = True
            connection.write(pack("SUBSCRIBE", *channels))
            await connection.lost

        self._start(self._keep(serve, self._timeout_s, push, None))
        await self._wait_for(ready)

    async def read_list(self, key: str, callback: Callable[[bytes], None]) -> None:
        """Call `callback(item)` for what is pushed to the right of the list, on a connection of its own, until `close`.

        Returns once listening, or after `timeout_s`. An item is delivered at most once: one in flight when the
        connection breaks is lost.
        """
        ready = asyncio.Event()
        command = pack("BLMPOP", LIST_BLOCK_S, 1, key, "LEFT", "COUNT", LIST_BATCH)

        async def serve(connection: _Connection) -> None:
            ready.set()
            while True:
                reply = await connection.send(command)
                for item in reply[1] if reply else ():
                    self._run(callback, item)

        self._start(self._keep(serve, LIST_BLOCK_S + self._timeout_s, None, None))
        await self._wait_for(ready)

    async def close(self) -> None:
        """End every connection and task; calls still waiting fail."""
        self._watchers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connection = None
        for connection in list(self._connections):
            connection.abort("closed")

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for(self, ready: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(ready.wait(), self._timeout_s)
        except TimeoutError:
            return

    def _post_failed(self, error: RespError) -> None:
        if self._on_post_error is not None:
            self._run(self._on_post_error, error)

    def _run(self, callback: Callable[..., None], *args: Any) -> None:
        """Call back without letting its trouble end the connection."""
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 - the callback is not ours; the loop's handler reports it
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a callback of the Valkey client failed", "exception": error}
            )

    async def _open(self, timeout_s: float, push: Callable[[Any], None] | None = None) -> _Connection:
        address = self._address
        loop = asyncio.get_running_loop()

        def make() -> _Connection:
            return _Connection(timeout_s, self._in_flight_max, push)

        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                if address.path:
                    _, connection = await loop.create_unix_connection(make, address.path)
                else:
                    _, connection = await loop.create_connection(make, address.host, address.port)
                self._connections.add(connection)
                if address.password:
                    user = (address.username,) if address.username else ()
                    await connection.send(pack("AUTH", *user, address.password))
                if address.database:
                    await connection.send(pack("SELECT", address.database))
        except (OSError, TimeoutError) as error:
            self._discard(connection)
            raise RespUnavailable(f"cannot connect to Valkey: {error or 'no answer'}") from error
        except BaseException:
            self._discard(connection)
            raise
        return connection

    def _discard(self, connection: _Connection | None) -> None:
        if connection is not None:
            connection.abort("closed")
            self._connections.discard(connection)

    async def _keep(
        self,
        serve: Callable[[_Connection], Awaitable[None]],
        timeout_s: float,
        push: Callable[[Any], None] | None,
        connection: _Connection | None,
    ) -> None:
        """Open a connection, let `serve` have it until it is lost, and again."""
        delay = BACKOFF_MIN_S
        while True:
            try:
                if connection is None:
                    connection = await self._open(timeout_s, push)
                delay = BACKOFF_MIN_S
                await serve(connection)
            except (RespUnavailable, RespError):
                pass
            finally:
                self._discard(connection)
                connection = None
            await asyncio.sleep(delay * (0.5 + self._jitter() / 2))
            delay = min(delay * 2, BACKOFF_MAX_S)

    async def _serve_calls(self, connection: _Connection) -> None:
        connection.on_error = self._post_failed
        renewed = self._connection is None
        self._connection = connection
        if renewed:
            self._tell(connected=True)
        try:
            await connection.lost
        finally:
            self._connection = None
            self._tell(connected=False)

    def _tell(self, *, connected: bool) -> None:
        for watcher in list(self._watchers):
            self._run(watcher, connected)

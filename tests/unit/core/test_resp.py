"""The Valkey client against a scripted server: split replies, order, timeouts, reconnection."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from core.resp import Address, RespClient, RespError, RespUnavailable, _Connection, pack, parse_url, script


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.aborted = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True


def connected(**values: Any) -> tuple[_Connection, FakeTransport]:
    connection = _Connection(**{"timeout_s": 1.0, "in_flight_max": 100} | values)
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


def test_pack_is_the_wire_form() -> None:
    assert pack("SET", b"k\r\n", 12) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n12\r\n"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("unix:///run/v.sock", Address(path="/run/v.sock")),
        ("unix:///run/v.sock?db=2", Address(path="/run/v.sock", database=2)),
        ("redis://host:7000/3", Address(host="host", port=7000, database=3)),
        ("redis://:p%40ss@host", Address(host="host", password="p@ss")),
        ("redis://me:pass@127.0.0.1:1/0", Address(port=1, username="me", password="pass")),
    ],
)
def test_url_names_an_address(url: str, address: Address) -> None:
    assert parse_url(url) == address


def test_url_of_another_scheme_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="redis://") as caught:
        parse_url("http://:secret@host")
    assert "secret" not in str(caught.value)


REPLIES = b"+OK\r\n:42\r\n$5\r\na\r\nbc\r\n$-1\r\n-NOSCRIPT none\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n"


async def answers(connection: _Connection, feed: Callable[[], None]) -> list[Any]:
    futures = [connection.send(pack("X", n)) for n in range(6)]
    feed()
    return await asyncio.gather(*futures, return_exceptions=True)


async def test_replies_split_at_every_byte_are_the_same_replies() -> None:
    for cut in range(len(REPLIES) + 1):
        connection, _ = connected()

        def feed(connection: _Connection = connection, cut: int = cut) -> None:
            connection.data_received(REPLIES[:cut])
            connection.data_received(REPLIES[cut:])

        got = await answers(connection, feed)
        assert got[:4] == [b"OK", 42, b"a\r\nbc", None]
        assert isinstance(got[4], RespError)
        assert got[5] == [1, [b""]]
        connection.abort("end of test")


async def test_replies_byte_by_byte() -> None:
    connection, _ = connected()

    def feed() -> None:
        for byte in REPLIES:
            connection.data_received(bytes([byte]))

    got = await answers(connection, feed)
    assert got[5] == [1, [b""]]
    connection.abort("end of test")


async def test_calls_of_one_tick_share_a_write() -> None:
    connection, transport = connected()
    for n in range(3):
        connection.send(pack("GET", n))
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [pack("GET", 0) + pack("GET", 1) + pack("GET", 2)]
    connection.abort("end of test")


async def test_a_cancelled_call_does_not_shift_the_replies() -> None:
    connection, _ = connected()
    first, second = connection.send(pack("A")), connection.send(pack("B"))
    first.cancel()
    connection.data_received(b"+a\r\n+b\r\n")
    assert await second == b"b"
    connection.abort("end of test")


async def test_a_late_reply_is_matched_to_nobody() -> None:
    connection, transport = connected()
    loop = asyncio.get_running_loop()
    late = connection.send(pack("A"))
    connection.sweep(loop.time() + 0.9)
    assert not late.done()
    connection.sweep(loop.time() + 1.1)
    assert not late.done()  # its answer may lie unread when the loop itself was held up
    connection.sweep(loop.time() + 1.2)
    with pytest.raises(RespUnavailable, match="within 1 s"):
        await late
    assert transport.aborted
    after = connection.send(pack("B"))
    connection.data_received(b"+a\r\n")
    with pytest.raises(RespUnavailable):
        await after


async def test_calls_in_flight_are_bounded() -> None:
    connection, _ = connected(in_flight_max=2)
    held = [connection.send(pack("A")), connection.send(pack("B"))]
    with pytest.raises(RespUnavailable, match="too many"):
        await connection.send(pack("C"))
    connection.data_received(b"+a\r\n+b\r\n")
    assert await asyncio.gather(*held) == [b"a", b"b"]
    connection.abort("end of test")


@pytest.mark.parametrize("data", [b"?what\r\n", b"+nobody asked\r\n"])
async def test_nonsense_closes_the_connection(data: bytes) -> None:
    connection, transport = connected()
    connection.data_received(data)
    assert transport.aborted
    assert connection.lost.done()


async def test_a_loading_server_counts_as_away() -> None:
    connection, _ = connected()
    call = connection.send(pack("GET", "k"))
    connection.data_received(b"-LOADING dataset in memory\r\n")
    with pytest.raises(RespUnavailable, match="LOADING"):
        await call
    connection.abort("end of test")


async def test_a_silent_subscription_pings_and_then_gives_up() -> None:
    connection, transport = connected(push=lambda _: None)
    connection.pushing = True
    now = asyncio.get_running_loop().time()
    connection.sweep(now + 10.5)
    await asyncio.sleep(0)
    assert transport.writes == [pack("PING")]
    assert not transport.aborted
    connection.sweep(now + 20.5)
    assert transport.aborted


class Server:
    """A server on a unix socket whose answer to each command is `answer(name)`; `None` hangs up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: Callable[[bytes], bytes | None] = lambda _: b"+OK\r\n"
        self.commands: list[bytes] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    parts.append((await reader.readexactly(size + 2))[:-2])
                self.commands.append(parts[0])
                reply = self.answer(parts[0])
                if reply is None:
                    break
                writer.write(reply)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "s")
    await server.start()
    yield server
    await server.stop()


def watching(client: RespClient) -> asyncio.Queue[bool]:
    states: asyncio.Queue[bool] = asyncio.Queue()
    client.watch(states.put_nowait)
    return states


async def test_reconnects_after_a_loss_and_fails_calls_meanwhile(server: Server) -> None:
    client = await RespClient.connect(f"unix://{server.path}", jitter=lambda: 0.0)
    states = watching(client)
    assert await client.call("GET", "k") == b"OK"
    await server.stop()
    assert await asyncio.wait_for(states.get(), 5) is False
    with pytest.raises(RespUnavailable):
        await client.call("GET", "k")
    await server.start()
    assert await asyncio.wait_for(states.get(), 5) is True
    assert await client.call("GET", "k") == b"OK"
    await client.close()


async def test_a_hang_up_fails_the_calls_in_flight(server: Server) -> None:
    client = await RespClient.connect(f"unix://{server.path}", jitter=lambda: 0.0)
    states = watching(client)
    server.answer = lambda name: None if name == b"QUIT" else b"+OK\r\n"
    got = await asyncio.gather(client.call("GET", "k"), client.call("QUIT"), return_exceptions=True)
    assert isinstance(got[1], RespUnavailable)
    assert [await asyncio.wait_for(states.get(), 5) for _ in range(2)] == [False, True]
    await client.close()


async def test_connect_needs_a_server_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(RespUnavailable):
        await RespClient.connect(f"unix://{tmp_path}/none")
    client = await RespClient.connect(f"unix://{tmp_path}/none", required=False, jitter=lambda: 0.0)
    assert not client.connected
    states = watching(client)
    server = Server(tmp_path / "none")
    await server.start()
    assert await asyncio.wait_for(states.get(), 5) is True
    await client.close()
    await server.stop()


async def test_a_wrong_password_is_said(server: Server) -> None:
    server.answer = lambda _: b"-WRONGPASS no\r\n"
    with pytest.raises(RespError, match="WRONGPASS"):
        await RespClient.connect(f"unix://:wrong@localhost{server.path}")


async def test_an_unknown_script_is_sent_with_its_text(server: Server) -> None:
    client = await RespClient.connect(f"unix://{server.path}")
    server.answer = lambda name: b"-NOSCRIPT No matching script.\r\n" if name == b"EVALSHA" else b":7\r\n"
    assert await client.eval(script("return 7"), ["k"], [1]) == 7
    assert server.commands == [b"EVALSHA", b"EVAL"]
    server.answer = lambda _: b"-ERR other\r\n"
    with pytest.raises(RespError, match="other"):
        await client.eval(script("return 7"), [], [])
    await client.close()


async def test_forgotten_failures_are_silent(server: Server) -> None:
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    try:
        client = await RespClient.connect(f"unix://{server.path}")
        server.answer = lambda _: b"-ERR no\r\n"
        client.call("A")
        await client.close()
        client.call("B")
        await asyncio.sleep(0)
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert troubles == []

"""The parser-safety list: each row as raw bytes, whole, split at every byte, and byte by byte."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from api.inference.protocol import CUTS_MAX, STASH_MAX, Phase
from core.clock import ManualClock
from core.settings import Gateway as GatewaySettings
from tests.factories.gateway import Rig, rig
from tests.factories.memory import MemoryTransport

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
BODY = b'{"model":"none","messages":[{"role":"user","content":"x"}]}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
KEY = b"Authorization: Bearer %KEY%\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@dataclass(frozen=True)
class Row:
    """Raw bytes and the statuses they get; `ends`: the connection must end by itself."""

    name: str
    raw: bytes
    statuses: tuple[int, ...]
    ends: bool = True


ROWS = (
    Row("duplicate content-length, different", POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", (400,)),
    Row("duplicate content-length, equal", POST + LENGTH + LENGTH + b"\r\n" + BODY, (400,)),
    Row("content-length list", POST + b"Content-Length: 3, 3\r\n\r\nabc", (400,)),
    Row("content-length with plus", POST + b"Content-Length: +59\r\n\r\n" + BODY, (400,)),
    Row("space before the colon", POST + b"Content-Length : 3\r\n\r\nabc", (400,)),
    Row("te with cl", POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", (400,)),
    Row("cl with te", POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    Row("te xchunked", POST + b"Transfer-Encoding: xchunked\r\n\r\n", (400,)),
    Row("te chunked, identity", POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", (400,)),
    Row("two te", POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    Row("te gzip, chunked", POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (501,)),
    Row(
        "te on http/1.0",
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (400,),
    ),
    Row(
        "chunk size in hex notation", POST + KEY + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n", (400,)
    ),
    Row("chunk size overflow", POST + KEY + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc", (400,)),
    Row("bad chunk end", POST + KEY + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcX0\r\n\r\n", (400,)),
    Row(
        "content-length in a trailer",
        POST + KEY + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nContent-Length: 3\r\n\r\n",
        (400,),
    ),
    Row("obs-fold", POST + b"X-A: b\r\n c\r\n\r\n", (400,)),
    Row("bare lf", b"POST /v1/chat/completions HTTP/1.1\nHost: a\n\n", (400,)),
    Row("bare cr", POST + b"X-A: b\rc\r\n\r\n", (400,)),
    Row("nul in a header", POST + b"X-A: b\x00c\r\n\r\n", (400,)),
    Row("two hosts", POST + b"Host: b\r\n\r\n", (400,)),
    Row("no host", b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    Row("two authorizations", POST + KEY + KEY + LENGTH + b"\r\n" + BODY, (400,)),
    Row("ten gigabytes announced", POST + KEY + b"Content-Length: 10000000000\r\n\r\n", (413,)),
    Row("expect something else", POST + KEY + b"Expect: 200-ok\r\n" + LENGTH + b"\r\n", (417,)),
    Row("expect with a bad key", POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n", (401,)),
    Row(
        "h2c upgrade", GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n\r\n", (400,)
    ),
    Row("connect", b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", (405,)),
    Row("absolute uri", b"GET http://a/health HTTP/1.1\r\nHost: a\r\n\r\n", (400,)),
    Row("http/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Row("http/3.0", b"GET /health HTTP/3.0\r\nHost: a\r\n\r\n", (400,)),
    Row("nonsense", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 20, (400,)),
    Row("bytes after connection close", GET + b"Connection: close\r\n\r\n" + GET + b"\r\n", (200,)),
    Row("get on a hot path", b"GET /v1/embeddings HTTP/1.1\r\nHost: a\r\n\r\n", (405,), ends=False),
    Row("bad key, small body is read", POST + LENGTH + b"\r\n" + BODY + GET + b"\r\n", (401, 200), ends=False),
    Row("bad key, chunked body is not", POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", (401,)),
    Row("unknown model", POST + KEY + LENGTH + b"\r\n" + BODY, (404,), ends=False),
    Row(
        "expect with a good key",
        POST + KEY + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY,
        (100, 404),
        ends=False,
    ),
    Row(
        "chunked body with trailer, then another request",
        POST
        + KEY
        + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nX-T: 1\r\n\r\n" % (len(BODY), BODY)
        + GET
        + b"\r\n",
        (404, 200),
        ends=False,
    ),
    Row("content-encoding", POST + KEY + b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, (415,), ends=False),
)


@pytest.fixture(scope="module")
async def made() -> AsyncIterator[Rig]:
    async with rig({}, listen=False) as built:
        yield built


async def play(made: Rig, pieces: list[bytes]) -> MemoryTransport:
    protocol = made.connection()
    transport = MemoryTransport(protocol)
    for piece in pieces:
        if not transport.closed and piece:
            protocol.data_received(piece)
    for _ in range(50):
        if protocol.phase is not Phase.BUSY:
            break
        await made.settled()
    return transport


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_row_split_at_every_byte(made: Rig, row: Row) -> None:
    raw = row.raw.replace(b"%KEY%", made.key.encode())
    splits = [[raw[:place], raw[place:]] for place in range(len(raw))]
    splits.append([raw[place : place + 1] for place in range(len(raw))])
    for pieces in splits:
        transport = await play(made, pieces)
        statuses = tuple(transport.statuses)
        if row.name.startswith("expect with a good key") and statuses == (404,):
            continue  # the body was there before we had to ask for it
        assert statuses == row.statuses, (row.name, [len(piece) for piece in pieces][:2], bytes(transport.written))
        assert transport.ended == row.ends, (row.name, len(pieces[0]))


def test_no_cl_and_te_combination_is_missing() -> None:
    """The study's list has these rows; a row that goes missing here would go unnoticed."""
    assert len(ROWS) >= 36
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        pytest.param(GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431, id="100 KB header"),
        pytest.param(GET + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n", 431, id="1,000 headers"),
        pytest.param(GET + b"".join(b"X-%d: a\r\n" % i for i in range(99)) + b"\r\n", 200, id="100 headers are fine"),
        pytest.param(b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, id="long target"),
    ],
)
async def test_large_heads(made: Rig, raw: bytes, status: int) -> None:
    for step in (len(raw), 4096, 1000):
        transport = await play(made, [raw[place : place + step] for place in range(0, len(raw), step)])
        assert transport.statuses == [status]
        assert transport.ended == (status != 200)


async def test_chunked_body_beyond_the_limit() -> None:
    async with rig({}, listen=False, settings=GatewaySettings(body_max_bytes=1000)) as made:
        head = (POST + KEY).replace(b"%KEY%", made.key.encode()) + b"Transfer-Encoding: chunked\r\n\r\n"
        transport = await play(made, [head, *[b"64\r\n" + b"a" * 100 + b"\r\n"] * 20])
        assert transport.statuses == [413]
        assert transport.ended


@pytest.mark.parametrize("sent", [b"HEAD /v1/embeddings HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD /x HTTP/1.1\r\n\r\n"])
async def test_a_refusal_of_head_has_no_body(made: Rig, sent: bytes) -> None:
    """A client, or a proxy before us, would take it for the next answer."""
    transport = await play(made, [sent])
    assert transport.written.endswith(b"\r\n\r\n")
    assert b"{" not in transport.written


async def test_a_chunked_body_full_of_what_looks_like_its_end(made: Rig) -> None:
    """It once cost the whole rest of the read for every four bytes: 9 MB stopped the process for 20 s."""
    head = (POST + KEY).replace(b"%KEY%", made.key.encode()) + b"Transfer-Encoding: chunked\r\n\r\n"
    for size, status in ((7_000, 400), (9_000_000, 400)):
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"\r\n\r\n" * (size // 4))
        transport = await play(made, [head + body])
        assert transport.statuses == [status]
        assert transport.ended == (size > 4 * CUTS_MAX)


async def test_a_body_in_many_small_chunks_is_kept_as_one(made: Rig) -> None:
    """An object for each chunk would be twenty times the body."""
    protocol = made.connection()
    transport = MemoryTransport(protocol)
    head = (POST + KEY).replace(b"%KEY%", made.key.encode()) + b"Transfer-Encoding: chunked\r\n\r\n"
    protocol.data_received(head + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY))
    assert bytes(protocol.body) == BODY
    protocol.data_received(b"0\r\n\r\n")
    await made.settled()
    assert transport.statuses == [404]


async def test_a_thousand_pipelined_requests_wait_unparsed(made: Rig) -> None:
    """One is answered at a time; the rest stays bytes, and beyond a bound unread in the socket."""
    protocol = made.connection()
    transport = MemoryTransport(protocol)
    hot = POST + KEY.replace(b"%KEY%", made.key.encode()) + LENGTH + b"\r\n" + BODY
    protocol.data_received(hot * 1000)
    assert not transport.written
    assert len(protocol.stash) == len(hot) * 999
    protocol.data_received(hot)
    assert len(hot) * 1000 > STASH_MAX
    assert not transport.is_reading()
    for _ in range(3000):
        if len(transport.statuses) == 1001:
            break
        await made.settled()
    assert transport.statuses == [404] * 1001
    assert transport.is_reading()
    assert protocol.phase is Phase.IDLE


@pytest.mark.parametrize(
    ("sent", "seconds", "status"),
    [
        pytest.param(b"", 5.1, None, id="a new connection that sends nothing"),
        pytest.param(b"GET /hea", 10.1, 408, id="a head dripped in"),
        pytest.param(POST + KEY + LENGTH + b"\r\n{", 60.1, 408, id="a body dripped in"),
        pytest.param(GET + b"\r\n", 75.1, 200, id="idle after an answer"),
    ],
)
async def test_deadlines(sent: bytes, seconds: float, status: int | None) -> None:
    clock = ManualClock()
    async with rig({}, listen=False, clock=clock) as made:
        protocol = made.connection()
        transport = MemoryTransport(protocol)
        protocol.data_received(sent.replace(b"%KEY%", made.key.encode())) if sent else None
        await made.settled()
        clock.advance(seconds - 0.2)
        protocol.sweep(clock.monotonic())
        early = transport.ended
        clock.advance(0.2)
        protocol.sweep(clock.monotonic())
        assert (early, transport.ended) == (False, True)
        assert transport.statuses == ([status] if status else [])


async def test_a_dripping_head_gets_no_more_time_with_every_byte() -> None:
    clock = ManualClock()
    async with rig({}, listen=False, clock=clock) as made:
        protocol = made.connection()
        transport = MemoryTransport(protocol)
        for byte in b"GET /healt":
            made.gateway.now = clock.monotonic()
            protocol.data_received(bytes([byte]))
            clock.advance(1.01)
            protocol.sweep(clock.monotonic())
        assert transport.statuses == [408]
        assert transport.ended


async def test_a_refused_connection_does_not_linger_for_ever() -> None:
    clock = ManualClock()
    async with rig({}, listen=False, clock=clock) as made:
        protocol = made.connection()
        transport = MemoryTransport(protocol)
        protocol.data_received(b"nonsense\r\n\r\n")
        assert transport.eof
        assert not transport.closed
        protocol.data_received(b"more nonsense that is not looked at")
        clock.advance(2.1)
        protocol.sweep(clock.monotonic())
        assert transport.aborted
        assert transport.statuses == [400]

"""A request like one that was checked before skips the parser, and nothing else gets past it that way."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from api.inference.protocol import InferenceProtocol
from core.heads import HEAD_MAX, KNOWN_MAX, remember, without_length
from core.settings import Gateway as GatewaySettings
from tests.factories.gateway import Rig, rig
from tests.factories.memory import MemoryTransport

BODY = b'{"model":"none","messages":[{"role":"user","content":"x"}]}'


@pytest.fixture(scope="module")
async def made() -> AsyncIterator[Rig]:
    async with rig({}, listen=False) as built:
        yield built


def request(key: str, body: bytes = BODY, more: bytes = b"", version: bytes = b"1.1") -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/%b\r\nHost: a\r\n%bAuthorization: Bearer %b\r\nAccept: */*\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (version, more, key.encode(), len(body), body)
    )


async def play(made: Rig, raw: bytes, *, parsing: bool = True) -> tuple[list[int], bool]:
    protocol = made.connection()
    transport = MemoryTransport(protocol)
    if not parsing:
        protocol.parser = cast("Any", None)
    protocol.data_received(raw)
    await answered(made, protocol)
    return transport.statuses, transport.ended


async def answered(made: Rig, protocol: InferenceProtocol) -> None:
    for _ in range(20):
        await made.settled()
        if protocol.task is None:
            return


async def test_another_client_with_the_same_head_needs_no_parser(made: Rig) -> None:
    other, _ = made.add_key()
    assert await play(made, request(made.key)) == ([404], False)
    assert await play(made, request(made.key, BODY.replace(b"x", b"a longer text")), parsing=False) == ([404], False)
    assert await play(made, request(other), parsing=False) == ([404], False)


async def test_a_connection_goes_on_after_it_and_remembers_nothing_of_it(made: Rig) -> None:
    protocol = made.connection()
    transport = MemoryTransport(protocol)
    close = request(made.key, more=b"Connection: close\r\n")
    for raw in (request(made.key), request(made.key), b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", request(made.key)):
        protocol.data_received(raw)
        await answered(made, protocol)
    assert (transport.statuses, transport.ended) == ([404, 404, 200, 404], False)
    protocol.data_received(close)
    await answered(made, protocol)
    assert (transport.statuses[-1], transport.ended) == (404, True)
    assert await play(made, close, parsing=False) == ([404], True)


async def test_what_is_not_whole_or_has_something_behind_it_is_parsed(made: Rig) -> None:
    raw = request(made.key)
    await play(made, raw)
    assert (await play(made, raw + raw))[0] == [404, 404]
    protocol = made.connection()
    transport = MemoryTransport(protocol)
    for place in range(0, len(raw), 7):
        protocol.data_received(raw[place : place + 7])
    await answered(made, protocol)
    assert transport.statuses == [404]


async def test_limits_and_keys_hold(made: Rig) -> None:
    assert (await play(made, request("tg_unknown")))[0] == [401]
    async with rig({}, listen=False, settings=GatewaySettings(body_max_bytes=len(BODY))) as small:
        assert (await play(small, request(small.key)))[0] == [404]
        assert (await play(small, request(small.key, BODY + b" ")))[0] == [413]
    async with rig({}, listen=False) as fresh:
        await play(fresh, request(fresh.key, more=b"Expect: 100-continue\r\n"))
        await play(fresh, request("tg_unknown"))
        await play(fresh, request(fresh.key, more=b"X: " + b"a" * HEAD_MAX + b"\r\n"))
        assert not fresh.gateway.heads
        assert (await play(fresh, request(fresh.key)))[0] == [404]
        (shape,) = fresh.gateway.heads
        assert fresh.key.encode() not in shape


def tampered(raw: bytes) -> Iterator[bytes]:
    """Every line twice, foreign lines at every place, and every byte of the head changed."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    foreign = (
        *(b"Content-Length: %d" % len(body), b"content-length: 3", b"Content-Length: 0", b"Transfer-Encoding: chunked"),
        *(b"Host: b", b"Authorization: Bearer x", b"authorization: bearer x", b"Expect: 100-continue", b" folded", b""),
        *(b"Content-Encoding: gzip", b"Connection: close", b"Upgrade: h2c", b"X : y", b"X: \x00", b"X: y\nZ: u"),
    )
    for place in range(len(lines) + 1):
        for line in (*foreign, *lines):
            yield b"\r\n".join([*lines[:place], line, *lines[place:]]) + b"\r\n\r\n" + body
    for place in range(len(head)):
        for byte in (b"\r", b"\n", b" ", b"\x00", b":", b"\t", b"A", b"\r\n", b""):
            yield head[:place] + byte + head[place + 1 :] + b"\r\n\r\n" + body


async def test_whatever_is_changed_is_answered_as_if_nothing_had_been_seen(made: Rig) -> None:
    raw = request(made.key)
    await play(made, raw)
    learned = dict(made.gateway.heads)
    for other in tampered(raw):
        made.gateway.heads.clear()
        first = await play(made, other)
        made.gateway.heads.clear()
        made.gateway.heads.update(learned)
        assert await play(made, other) == first, other


def test_only_a_whole_message_has_a_shape() -> None:
    message = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nA: b\r\n\r\n{}"
    assert without_length(message) == (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", 44)
    assert without_length(message.replace(b"Content-L", b"content-l")) == (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", 44)
    for other in (message[:-1], message + b"x", message[:20], b"", message.replace(b"Length: ", b"Length:")):
        assert without_length(other) == (b"", 0)


def test_so_many_heads_are_known_and_no_more() -> None:
    known: dict[bytes, int] = {}
    for number in range(3 * KNOWN_MAX):
        remember(known, b"%d" % number, number)
        assert len(known) <= KNOWN_MAX
    remember(known, b"a" * (HEAD_MAX + 1), 0)
    assert b"a" * (HEAD_MAX + 1) not in known

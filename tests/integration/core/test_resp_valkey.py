"""The Valkey client against a real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from core.resp import RespClient, RespUnavailable, pack, script


@pytest.fixture
async def client(valkey: Path) -> AsyncIterator[RespClient]:
    client = await RespClient.connect(f"unix://{valkey}", jitter=lambda: 0.0)
    yield client
    await client.close()


async def test_ten_thousand_calls_each_get_their_own_answer(client: RespClient) -> None:
    got = await asyncio.gather(*(client.call("ECHO", n) for n in range(10_000)))
    assert got == [str(n).encode() for n in range(10_000)]


async def test_scripts_run_by_name_and_after_a_flush(client: RespClient) -> None:
    twice = script("return tonumber(ARGV[1]) * 2")
    assert await client.eval(twice, [], [21]) == 42
    assert await client.call("EVALSHA", twice.sha, 0, 4) == 8
    await client.call("SCRIPT", "FLUSH")
    assert await client.eval(twice, [], [21]) == 42


async def test_subscription_hears_and_resumes_after_its_connection_is_killed(client: RespClient) -> None:
    heard: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
    gap = asyncio.Event()
    await client.subscribe(["a", "b"], lambda channel, data: heard.put_nowait((channel, data)), gap.set)
    await client.call("PUBLISH", "b", "1")
    assert await asyncio.wait_for(heard.get(), 5) == (b"b", b"1")
    await client.call("CLIENT", "KILL", "TYPE", "pubsub")
    await asyncio.wait_for(gap.wait(), 5)
    await client.call("PUBLISH", "a", "2")
    assert await asyncio.wait_for(heard.get(), 5) == (b"a", b"2")


async def test_list_reader_takes_items_in_order_without_holding_up_calls(client: RespClient) -> None:
    items: asyncio.Queue[bytes] = asyncio.Queue()
    await client.read_list("l", items.put_nowait)
    assert await client.send(pack("PING")) == b"PONG"
    client.call("RPUSH", "l", *range(5))
    client.call("RPUSH", "l", 5)
    assert [await asyncio.wait_for(items.get(), 5) for _ in range(6)] == [str(n).encode() for n in range(6)]


async def test_a_stalled_server_fails_calls_and_the_client_recovers(valkey: Path) -> None:
    client = await RespClient.connect(f"unix://{valkey}", timeout_s=0.1, jitter=lambda: 0.0)
    other = await RespClient.connect(f"unix://{valkey}")
    states: asyncio.Queue[bool] = asyncio.Queue()
    client.watch(states.put_nowait)
    await other.call("CLIENT", "PAUSE", 400)
    with pytest.raises(RespUnavailable, match="no answer"):
        await client.call("ECHO", "late")
    assert [await asyncio.wait_for(states.get(), 5) for _ in range(2)] == [False, True]
    assert await other.call("CLIENT", "UNPAUSE") == b"OK"
    assert await client.call("ECHO", "mine") == b"mine"
    await client.close()
    await other.close()


async def test_works_on_the_loop_of_the_gateway(valkey: Path) -> None:
    async def ping() -> object:
        client = await RespClient.connect(f"unix://{valkey}")
        try:
            return await client.call("PING")
        finally:
            await client.close()

    def on_uvloop() -> object:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(ping())

    assert await asyncio.to_thread(on_uvloop) in {"PONG", b"PONG"}


async def test_a_posted_command_is_executed_in_its_place(client: RespClient) -> None:
    answers = [client.call("INCR", "posted")]
    client.post(pack("INCR", "posted"))
    client.post(pack("LPUSH", "posted", "x"))  # an error nobody hears
    answers.append(client.call("INCR", "posted"))
    assert await asyncio.gather(*answers) == [1, 3]

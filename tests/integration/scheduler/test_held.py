"""Callers that are held for a wake, over several gateways and a real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import keyspace
from core.ids import new_uuid
from core.resp import RespClient
from core.tiers import Tier
from scheduler.commands import OFFSET
from scheduler.held import FIRST_STEP, GO, REFUSED, WAIT, HeldEverywhere, Place, Waiter

TIDE = UUID(int=0x71DE)
STANDARD, BATCH, PRIORITY = Tier.STANDARD, Tier.BATCH, Tier.PRIORITY


@pytest.fixture
async def client(valkey: Path) -> AsyncIterator[RespClient]:
    client = await RespClient.connect(f"unix://{valkey}")
    yield client
    await client.close()


async def alive(client: RespClient, *replicas: str) -> None:
    """Their heartbeats hold for an hour."""
    seconds = int((await client.call("TIME"))[0])
    for replica in replicas:
        await client.call("ZADD", keyspace.BEAT, (seconds + 3600) * 1000, replica)


def waiter(tier: Tier = STANDARD, patience_s: float = 30.0) -> Waiter:
    return Waiter(TIDE, new_uuid(), tier, int(patience_s * 1000))


async def enter(held: HeldEverywhere, who: Waiter, *, most: int = 64, opened: int = 0, engines: int = 1) -> Place:
    return await held.enter(who, most=most, opened=opened, engines=engines)


async def count(client: RespClient) -> int:
    return int(await client.call("ZCARD", keyspace.held(TIDE)))


async def test_over_all_gateways_no_more_are_held_than_may_be_and_who_leaves_frees_a_place(client: RespClient) -> None:
    await alive(client, "a", "b")
    gateways = [HeldEverywhere(client, "a"), HeldEverywhere(client, "b")]
    herd = [(gateways[number % 2], waiter()) for number in range(300)]
    told = await asyncio.gather(*(enter(held, who) for held, who in herd))
    assert (told.count(WAIT), told.count(REFUSED), await count(client)) == (64, 236, 64)
    assert sum(held.here for held in gateways) == 64
    held, gone = next(pair for pair, place in zip(herd, told, strict=True) if place == WAIT)
    held.leave(gone)
    late, later = waiter(), waiter()
    assert [await enter(gateways[0], who) for who in (late, later, late)] == [WAIT, REFUSED, WAIT]


async def test_once_ready_they_go_by_tier_and_arrival_in_steps_that_double(client: RespClient) -> None:
    await alive(client, "a")
    held = HeldEverywhere(client, "a")
    first = [waiter(BATCH) for _ in range(20)]
    second = [waiter(PRIORITY) for _ in range(20)]
    for who in (*first, *second):
        assert await enter(held, who) == WAIT
        await client.call("INCRBY", OFFSET, 1000)  # a millisecond later
    in_line = [*second, *first]

    async def go() -> list[int]:
        """Ask for all who still wait, the last first; return the places in line of those who went."""
        asked = [(place, who) for place, who in reversed(list(enumerate(in_line))) if who is not None]
        gone = []
        for place, who in asked:
            if await enter(held, who, opened=7) == GO:
                gone.append(place)
                in_line[place] = None  # type: ignore[call-overload]
        return sorted(gone)

    assert FIRST_STEP == 8
    assert await go() == list(range(8))
    waiting = await enter(held, next(who for who in in_line if who is not None), opened=7)
    assert 0 < waiting.again_s <= 1
    await client.call("INCRBY", OFFSET, 1_000_000)
    assert await go() == list(range(8, 16))  # 16 by the second second
    await client.call("INCRBY", OFFSET, 1_000_000)
    assert await go() == list(range(16, 32))
    late = waiter(PRIORITY)
    assert (await enter(held, late, opened=7)).again_s  # who comes meanwhile is part of the steps
    await client.call("INCRBY", OFFSET, 1_000_000)
    assert await go() == list(range(32, 40))
    assert await enter(held, late, opened=7) == GO
    assert await enter(held, waiter(), opened=8) == GO  # it slept again: the steps begin anew
    assert held.here == await count(client) == 0


async def test_a_dead_gateway_and_one_whose_time_is_over_hold_nobodys_place(client: RespClient) -> None:
    await alive(client, "a", "b")
    here, there = HeldEverywhere(client, "a"), HeldEverywhere(client, "b")
    assert await enter(there, waiter(), most=2) == WAIT
    assert await enter(here, waiter(patience_s=20), most=2) == WAIT
    assert await enter(here, waiter(), most=2) == REFUSED
    await client.call("ZREM", keyspace.BEAT, "b")
    await client.call("INCRBY", OFFSET, 1_100_000)
    assert await enter(here, waiter(), most=2) == WAIT
    await client.call("INCRBY", OFFSET, 20_000_000)
    again = HeldEverywhere(client, "a")  # its former life could not say that they left
    assert await enter(again, waiter(), most=2) == WAIT


async def test_with_valkey_away_each_gateway_holds_as_many_as_all_may(tmp_path: Path) -> None:
    client = await RespClient.connect(f"unix://{tmp_path}/nothing", required=False)
    held = HeldEverywhere(client, "a")
    told = [await enter(held, waiter(), most=3) for _ in range(5)]
    assert (told.count(WAIT), told.count(REFUSED), held.here) == (3, 2, 3)
    assert await enter(held, waiter(), most=9, opened=1) == GO
    await client.close()


steps = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "leave", "again"])), max_size=40)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.integers(0, 6))
async def test_whatever_comes_and_goes_the_count_is_that_of_those_who_were_told_to_wait(
    client: RespClient, steps: list[tuple[int, str]], most: int
) -> None:
    await client.call("FLUSHALL")
    await alive(client, "r0", "r1", "r2")
    gateways = [HeldEverywhere(client, f"r{number}") for number in range(3)]
    inside: list[list[Waiter]] = [[], [], []]
    for number, what in steps:
        held, mine = gateways[number], inside[number]
        if what == "enter":
            who = waiter()
            full = sum(map(len, inside)) >= most
            assert await enter(held, who, most=most) == (REFUSED if full else WAIT)
            mine += [] if full else [who]
        elif mine and what == "leave":
            held.leave(mine.pop())
        elif mine:
            assert await enter(held, mine[0], most=most) == WAIT
        assert await count(client) == sum(map(len, inside))

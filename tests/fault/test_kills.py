"""Whatever is killed under load: no answered request goes unbilled, none is billed twice, and the books verify."""

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from uuid import UUID

import psycopg
import pytest

from tests.fault import bills
from tests.fault.bills import Bill
from tests.fault.real_platform import MODEL, PICO, ROOT, Platform
from tests.fault.traffic import Answer, Traffic
from tests.waiting import until

CALLERS = 60
IN_FLIGHT_MIN = 50
# 30 tokens 20 ms apart: long enough that many are in the middle when the victim dies
PROMPT = "[[sim n=30 d=20000 p=11 cached=3]]"
VICTIMS = ("gateway", "poster", "worker", "controller", "api", "postgres", "valkey", "engine", "up")


@pytest.fixture(scope="module")
async def platform(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Platform]:
    made = Platform(tmp_path_factory.mktemp("kills"))
    try:
        await made.start_engine()
        await made.start()
        made.offer_simulator()
        yield made
    finally:
        await asyncio.to_thread(made.stop)


def by_hand(bill: Bill) -> int:
    """Re-rate at the prices of `real_platform.PER_MILLION`."""
    return (
        bill.input_uncached * PICO["input"]
        + bill.input_cached * PICO["cached_input"]
        + (bill.output + bill.reasoning) * PICO["output"]
    )


async def everything_posted(platform: Platform, traffic: Traffic) -> list[Bill]:
    """Return the books once all whole answers are in them; what never arrives is reported by `bills.check`."""
    wanted = {answer.generation_id for answer in traffic.answers if answer.whole}

    async def arrived() -> bool:
        try:
            found = await asyncio.to_thread(bills.read_bills, platform.database_url)
        except psycopg.OperationalError:  # still recovering
            return False
        return wanted <= {bill.generation_id for bill in found}

    with contextlib.suppress(TimeoutError):
        await until(arrived, 30.0)
    return await asyncio.to_thread(bills.read_bills, platform.database_url)


async def kill_under_load(platform: Platform, victim: str, seed: int) -> Traffic:
    """Bring traffic up, kill, wait until answers flow again, and let everything end."""
    key = str(platform.facts["api_key"])
    traffic = Traffic(platform.facts["base_url"], key, MODEL, CALLERS, PROMPT)
    await traffic.start()
    # When within the flow of requests the blow falls is up to the seed.
    enough = random.Random(seed).randrange(CALLERS, 3 * CALLERS)
    await traffic.until(lambda: traffic.whole() >= enough and traffic.in_flight >= IN_FLIGHT_MIN, "traffic")
    platform.kill(victim)
    if victim == "engine":
        await platform.start_engine()
    if victim == "up":
        await traffic.stop()
        assert platform.up is not None
        await asyncio.to_thread(platform.up.wait, 30)
        await platform.start()
        traffic = Traffic(platform.facts["base_url"], key, MODEL, CALLERS, PROMPT, answers=traffic.answers)
        await traffic.start()
    seen = traffic.whole()
    await traffic.until(lambda: traffic.whole() >= seen + 2 * CALLERS, f"answers after the loss of {victim}", 60.0)
    await traffic.stop()
    return traffic


async def killed_and_exact(platform: Platform, victim: str, seed: int) -> None:
    traffic = await kill_under_load(platform, victim, seed)
    found = await everything_posted(platform, traffic)
    bills.check(traffic.answers, found, bills.read_engine_log(platform.engine_log), by_hand)
    verified = await asyncio.to_thread(verify, platform)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def verify(platform: Platform) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cli.main", "ledger", "verify", "--home", str(platform.home)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_kill_nine_loses_nothing_and_doubles_nothing(platform: Platform, victim: str) -> None:
    await killed_and_exact(platform, victim, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("victim", VICTIMS)
async def test_kill_nine_at_twenty_moments(platform: Platform, victim: str, seed: int) -> None:
    await killed_and_exact(platform, victim, seed)


def test_the_comparison_bites() -> None:
    """A missing bill, a wrong count and a wrong amount are each found."""
    good = Bill(UUID(int=1), "completed", 8, 3, 30, 0, 8 * 3_000_000 + 3 * 300_000 + 30 * 15_000_000)
    log = {good.generation_id: [{"ended": "completed", "prompt_tokens": 11, "cached_tokens": 3, "generated": 30}]}
    answers = [Answer(good.generation_id, 200, whole=True)]
    bills.check(answers, [good], log, by_hand)
    wrong_count = Bill(UUID(int=1), "completed", 8, 3, 29, 0, good.amount_pico - 15_000_000)
    wrong_amount = Bill(UUID(int=1), "completed", 8, 3, 30, 0, good.amount_pico + 1)
    for found in ([], [good, good], [wrong_count], [wrong_amount]):
        with pytest.raises(AssertionError):
            bills.check(answers, found, log, by_hand)

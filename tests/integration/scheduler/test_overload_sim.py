"""What `make sim` shows at length, on a load of seconds: the scripts under three times what fits."""

from pathlib import Path

import pytest

from catalog.types import ServedModel
from scheduler.caps import WAITING_PER_POD
from tests.factories.scheduler import served_model
from tests.sim.overload import TTFT_S, World, simulate
from tests.sim.scripts import Scripts
from tests.sim.small import SEATS, TOKENS, YARD, schedule

TIMES_FULL, SECONDS = 3.0, 40.0
BURST_S = 15.0


def overload(valkey: Path, model: ServedModel, *, seed: int = 0, seconds: float = SECONDS) -> World:
    scripts = Scripts(valkey)
    try:
        meta, rows = schedule(times_full=TIMES_FULL, seconds=seconds, seed=seed)
        return simulate(YARD, scripts, model, meta, rows, per_pod=SEATS)
    finally:
        scripts.close()


def in_time(world: World) -> dict[str, float]:
    """Return the part of each tier's requests whose answer began in time, retries included."""
    came = {attempt.row["id"]: attempt.row for attempt in world.attempts.values()}
    limits = {tier.label: limit for tier, limit in TTFT_S.items()}
    met = {
        one["id"]
        for one in world.outcomes
        if one["result"] == "ok" and one["first_s"] - came[one["id"]]["time_s"] <= limits[came[one["id"]]["tier"]]
    }
    tiers = {tier: [name for name, row in came.items() if row["tier"] == tier] for tier in limits}
    return {tier: len(met.intersection(names)) / len(names) for tier, names in tiers.items()}


def test_priority_is_in_time_at_three_times_what_fits_and_nobody_starves(valkey: Path) -> None:
    world = overload(valkey, served_model(inflight_max=SEATS, waiting_max=200, max_wait_s=300))
    met = in_time(world)
    assert met["priority"] >= 0.95  # three quarters of what fits are priority's
    assert met["standard"] >= 0.1
    assert met["batch"] > 0
    ended = [row for row in world.log if row["event"] == "end"]
    assert all(row["state"] == "finished" for row in ended if row["s"] < SECONDS)  # what was generated was wanted
    assert max(row["in_flight"] for row in world.log) <= SEATS
    assert all(one["retry_after"] >= 1 for one in world.outcomes if one["result"] == "refused")


def test_the_same_seed_gives_the_same_run(valkey: Path) -> None:
    model = served_model(inflight_max=SEATS)
    first, second = (overload(valkey, model, seed=7, seconds=8) for _ in range(2))
    assert first.outcomes == second.outcomes


@pytest.mark.parametrize("calm", [0.0, 0.5, 1.0])
def test_five_hundred_at_once_wait_with_us_and_not_in_the_engine(valkey: Path, calm: float) -> None:
    """By figures up to a second old: 5 for the replica, and one batch more, which is what it holds.

    `calm`: how full it was before. Of an engine that has had nothing to do only the seats are known.
    """
    meta, rows = schedule(times_full=calm or 1e-9, seconds=30, seed=3)
    one = {"tenant": "t0", "tier": "standard", "prompt_tokens": 50, "output_tokens": TOKENS, "max_tokens": 32}
    burst = [{**one, "id": f"b{n}", "time_s": BURST_S + n / 2500, "timeout_s": 30.0} for n in range(500)]
    scripts = Scripts(valkey)
    try:
        asked = sorted(rows + burst, key=lambda row: row["time_s"])
        world = simulate(YARD, scripts, served_model(waiting_max=1000), meta, asked, per_pod=2 * SEATS)
    finally:
        scripts.close()
    waiting = [row["in_flight"] - SEATS for row in world.log if row["s"] >= BURST_S]
    assert max(waiting) <= WAITING_PER_POD + SEATS
    ended = {outcome["id"] for outcome in world.outcomes}
    assert ended >= {row["id"] for row in burst}

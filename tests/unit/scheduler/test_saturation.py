"""Which part of the replicas is full: what keeps a request from being sent to a second one."""

import pytest

from engine.figures import EngineFigures
from scheduler.saturation import part_full
from scheduler.scraper import Reading

IDLE, QUEUES, SWAPS = EngineFigures(), EngineFigures(waiting=5), EngineFigures(kv_used=0.9)
NOW_US = 1_000_000_000


@pytest.mark.parametrize(
    ("replicas", "part"),
    [([], 0.0), ([IDLE], 0.0), ([QUEUES, IDLE], 0.5), ([QUEUES, SWAPS, IDLE], 2 / 3), ([EngineFigures(4, 4)], 0.0)],
)
def test_full_is_an_engine_with_a_queue_or_without_memory(replicas: list[EngineFigures], part: float) -> None:
    reading = Reading(NOW_US, {str(number): figures for number, figures in enumerate(replicas)})
    assert part_full(reading, NOW_US) == part


@pytest.mark.parametrize(("age_us", "part"), [(5_000_000, 1.0), (5_000_001, 0.0), (-5_000_001, 0.0)])
def test_old_figures_say_nothing(age_us: int, part: float) -> None:
    assert part_full(Reading(NOW_US - age_us, {"r": QUEUES}), NOW_US) == part

"""Who is served by the new version: always the same conversations, more as the weight rises, nobody by choice."""

from uuid import UUID

from catalog.arms import point
from catalog.rollout_types import PARTS
from core.ids import new_uuid

SEED, OTHER = bytes(range(32)), bytes(range(1, 33))
TENANT = UUID(int=7)


def points(seed: bytes, count: int = 20_000) -> list[int]:
    return [point(seed, TENANT, b"conversation %d" % number) for number in range(count)]


def test_a_conversation_stays_and_a_larger_weight_only_adds() -> None:
    assert points(SEED, 100) == points(SEED, 100)
    one, ten = ({place for place, at in enumerate(points(SEED)) if at < parts} for parts in (100, 1000))
    assert one < ten


def test_weights_are_kept_within_chance() -> None:
    # binomial: 20,000 at 1 % is 200 ± 14, at 50 % 10,000 ± 71; five standard deviations
    for parts, mean, most in ((100, 200, 71), (5000, 10_000, 354)):
        assert abs(sum(at < parts for at in points(SEED)) - mean) < most
    assert max(points(SEED)) < PARTS


def test_another_rollout_begins_with_others_and_tenants_do_not_share() -> None:
    first, second = ({place for place, at in enumerate(points(seed)) if at < 1000} for seed in (SEED, OTHER))
    assert len(first & second) < 400  # 200 by chance
    assert point(SEED, TENANT, b"same") != point(SEED, new_uuid(), b"same")

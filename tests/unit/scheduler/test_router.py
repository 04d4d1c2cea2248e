from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from scheduler.router import pick


@dataclass(eq=False)
class Replica:
    inflight: int = 0
    silent_since: float = 0.0


def test_the_least_loaded_wins() -> None:
    a, b, c = Replica(2), Replica(1), Replica(3)
    assert pick((a, b, c)) is b
    assert pick((c,)) is c


def test_equals_take_turns() -> None:
    a, b, c = Replica(), Replica(), Replica()
    assert [pick((a, b, c), turn=turn) for turn in range(4)] == [a, b, c, a]


def test_another_one_is_asked_when_there_is_another() -> None:
    a, b = Replica(0), Replica(9)
    assert pick((a, b), besides=a) is b
    assert pick((a,), besides=a) is a


def test_a_silent_one_is_asked_where_no_other_speaks_and_once_in_a_while() -> None:
    hung, busy = Replica(0, silent_since=10.0), Replica(9)
    assert pick((hung, busy), now=11.0) is hung  # not long enough to say
    assert pick((hung, busy), now=11.5) is busy
    assert pick((hung,), now=11.5) is hung
    assert pick((hung, Replica(2, silent_since=9.0)), now=12.0) is hung
    assert [pick((hung, busy), now=now) is hung for now in (41.4, 41.5, 41.6, 71.4, 71.5)] == [
        False,
        True,
        False,
        False,
        True,
    ]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 7))
def test_nobody_else_has_fewer_in_flight_than_the_one_picked(loads: list[int], turn: int, asked: int) -> None:
    replicas = [Replica(load) for load in loads]
    besides = replicas[asked % len(replicas)]
    picked = pick(replicas, besides=besides, turn=turn)
    others = [replica for replica in replicas if replica is not besides] or replicas
    assert picked in others
    assert picked.inflight == min(replica.inflight for replica in others)

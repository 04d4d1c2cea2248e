"""How far apart tenants that wait can be: the bound of virtual token counters, at every moment and not in the mean."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from core.tiers import Tier
from scheduler.types import Entitlement
from tests.factories.scheduler import served_model
from tests.sim.scripts import Scripts

PLACES, INPUT_MAX, OUTPUT_MAX = 4, 400, 100
WEIGHTS = {"light": 0.5, "usual": 1.0, "heavy": 4.0}
LARGEST = 10 * INPUT_MAX + 20 * OUTPUT_MAX  # the cost of a request, in tenths of an input token


@pytest.mark.parametrize("guess", [1, 3], ids=["told right", "told thrice at the door"])
def test_two_that_wait_are_never_further_apart_than_the_bound(valkey: Path, guess: int) -> None:
    """|S_f/w_f - S_g/w_g| is at most two of the largest requests over the least weight.

    What is told too high at the door is put right at the end: that is how much more each of the places can be off. And
    nobody is passed over: with so bounded a difference each tenant's service grows as that of all does.
    """
    scripts, model, dice = Scripts(valkey), served_model(inflight_max=PLACES, waiting_max=1000), random.Random(guess)
    scripts.set_time(0)
    number, sizes, service = itertools.count(), {}, Counter[str]()

    def join(tenant: str) -> None:
        name = f"{tenant}{next(number)}"
        sizes[name] = tenant, (dice.randint(1, INPUT_MAX), dice.randint(1, OUTPUT_MAX))
        told = tuple(guess * tokens for tokens in sizes[name][1])
        scripts.acquire(name, model, tenant, Tier.PRIORITY, weight=WEIGHTS[tenant], tokens=(told[0], told[1]))

    running = [f"first{n}" for n in range(PLACES)]
    for name in running:
        sizes[name] = "", (1, 1)
        scripts.acquire(name, model, "somebody", Tier.PRIORITY)
    for tenant in WEIGHTS:
        for _ in range(10):
            join(tenant)
    bound = (2 * LARGEST + PLACES * (guess - 1) * LARGEST) / min(WEIGHTS.values())
    for step in range(500):
        scripts.set_time(step * 0.1)
        ended = running.pop(dice.randrange(len(running)))
        scripts.release(ended, sizes[ended][1])
        for kind, name in scripts.messages():
            assert kind == "G"
            tenant, (prompt, output) = sizes[name]
            running.append(name)
            service[tenant] += 10 * prompt + 20 * output
            join(tenant)
        each = [service[tenant] / weight for tenant, weight in WEIGHTS.items()]
        assert max(each) - min(each) <= bound
    assert max(each) > 5 * bound / guess  # so that it says something
    scripts.close()


def test_who_is_granted_by_right_does_not_put_newcomers_behind(valkey: Path) -> None:
    """A tenant that had much by what it deserves is ahead in time; one that comes anew stands where the others do."""
    scripts, model = Scripts(valkey), served_model(inflight_max=2)
    scripts.set_time(0)
    entitled = (Entitlement("rich", deserved=2),)

    def ask(name: str, tenant: str) -> None:
        scripts.acquire(name, model, tenant, Tier.PRIORITY, entitlements=entitled)

    for name in ("first", "second"):
        ask(name, "somebody")
    for n in range(20):
        ask(f"rich{n}", "rich")
    ask("poor0", "poor")
    ask("poor1", "poor")
    running = ["first", "second"]
    for _ in range(12):  # all of it by right
        scripts.release(running.pop(0), (100, 100))
        running += [name for _, name in scripts.messages()]
    assert all(name.startswith("rich") for name in running)
    ask("new0", "new")
    scripts.send("DEL", f"{{tg}}:h:{model.deployment_id.hex}")  # from now on nobody is entitled to anything
    order = []
    for _ in range(3):
        scripts.release(running.pop(0), (100, 100))
        granted = [name for _, name in scripts.messages()]
        order += granted
        running += granted
    assert set(order[:2]) == {"poor0", "new0"}
    assert order[2] == "poor1"
    scripts.close()

"""Entitlements by their definition, whatever happens in whatever order, by the scripts themselves on a real Valkey.

A tenant below its guarantee waits for nothing but the cap; nobody else takes a place that is kept for it; nobody has
more than its capability; within a tier, who has less than it deserves goes first. And what fits does not wait.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.types import ServedModel
from core.tiers import Tier
from scheduler.caps import Caps
from scheduler.commands import Code
from scheduler.types import NO_CAPABILITY, Entitlement
from tests.factories.scheduler import served_model
from tests.sim.scripts import Scripts

CAP = 12
TENANTS = "abcdef"  # the last two are entitled to nothing
NUMBERS = itertools.count()
CEILINGS = {Tier.BATCH: 70, Tier.STANDARD: 90, Tier.PRIORITY: 100}


@pytest.fixture
def scripts(valkey: Path) -> Iterator[Scripts]:
    scripts = Scripts(valkey)
    scripts.set_time(0)
    yield scripts
    scripts.close()


@dataclass
class World:
    """What runs and what waits, told by the scripts' answers alone."""

    scripts: Scripts
    entitlements: dict[str, Entitlement]
    most: int = CAP
    model: ServedModel = field(default_factory=lambda: served_model(inflight_max=CAP, waiting_max=10_000))
    running: dict[str, tuple[str, Tier]] = field(default_factory=dict)
    waiting: dict[str, tuple[str, Tier]] = field(default_factory=dict)

    def entitlement(self, tenant: str) -> Entitlement:
        return self.entitlements.get(tenant, Entitlement(tenant))

    def count(self, tenant: str) -> int:
        return sum(owner == tenant for owner, _ in self.running.values())

    def guarantee(self, tenant: str) -> int:
        """Of a cap that has shrunk a guarantee is the same part."""
        return self.entitlement(tenant).guarantee * self.most // CAP

    def within(self, tenant: str) -> bool:
        return self.count(tenant) < self.guarantee(tenant)

    def kept(self) -> int:
        return sum(max(0, self.guarantee(tenant) - self.count(tenant)) for tenant in self.entitlements)

    def held_back(self, tier: Tier) -> int:
        """For higher tiers, of what is not guaranteed."""
        others = self.most - sum(self.guarantee(tenant) for tenant in self.entitlements)
        return others - max(1, others * CEILINGS[tier] // 100)

    def fits(self, tenant: str, tier: Tier, *, to_the_cap: bool = False) -> bool:
        if self.count(tenant) >= self.entitlement(tenant).capability or len(self.running) >= self.most:
            return False
        held_back = 0 if to_the_cap else self.held_back(tier)
        return self.within(tenant) or len(self.running) + self.kept() + held_back < self.most

    def ask(self, tenant: str, tier: Tier) -> None:
        name = f"{tenant}{next(NUMBERS)}"
        code = self.scripts.acquire(name, self.model, tenant, tier, entitlements=tuple(self.entitlements.values()))[0]
        if code == Code.GRANTED:
            assert self.fits(tenant, tier)
            self.running[name] = tenant, tier
        else:
            assert code == Code.QUEUED
            self.waiting[name] = tenant, tier
        self.take_grants()

    def end(self, name: str) -> None:
        del self.running[name]
        self.scripts.release(name, (100, 100))
        self.take_grants()

    def set_cap(self, most: int) -> None:
        self.most = most
        self.scripts.set_caps(self.model, Caps(requests=most))
        self.take_grants()

    def take_grants(self) -> None:
        for kind, name in self.scripts.messages():
            assert kind == "G"
            tenant, tier = self.waiting.pop(name)
            assert self.fits(tenant, tier, to_the_cap=tier is not Tier.PRIORITY)  # a tier below its floor
            if not self.within(tenant):
                assert not any(self.within(other) and self.fits(other, t) for other, t in self.waiting.values())
                if self.count(tenant) >= self.entitlement(tenant).deserved:
                    assert not any(
                        self.count(other) < self.entitlement(other).deserved and self.fits(other, t)
                        for other, t in self.waiting.values()
                        if t is tier
                    )
            self.running[name] = tenant, tier

    def check(self) -> None:
        assert not [(tenant, tier) for tenant, tier in self.waiting.values() if self.fits(tenant, tier)]
        assert self.scripts.load(self.model)[:2] == (len(self.running), len(self.waiting))
        for tenant, entitlement in self.entitlements.items():
            counter = f"{{tg}}:c:entitled:{self.model.deployment_id.hex}:{tenant}"
            assert int(self.scripts.send("GET", counter) or 0) == self.count(tenant) <= entitlement.capability


@st.composite
def some_entitlements(draw: st.DrawFn) -> dict[str, Entitlement]:
    """Guarantees that the cap holds; each at most what is deserved, and that at most the capability."""
    entitlements, left = {}, CAP - 1
    for tenant in TENANTS[:4]:
        guarantee = draw(st.integers(0, min(4, left)))
        left -= guarantee
        deserved = draw(st.integers(guarantee, 6))
        capability = draw(st.just(NO_CAPABILITY) | st.integers(max(1, deserved), 8))
        entitlements[tenant] = Entitlement(tenant, guarantee, deserved, capability)
    return entitlements


STEPS = st.lists(
    st.tuples(st.just("ask"), st.sampled_from(TENANTS), st.sampled_from(Tier))
    | st.tuples(st.just("end"), st.integers(0, 99), st.just(0))
    | st.tuples(st.just("cap"), st.integers(3, CAP), st.just(0)),
    min_size=10,
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(entitlements=some_entitlements(), steps=STEPS)
def test_entitlements_hold_by_their_definition(
    scripts: Scripts, entitlements: dict[str, Entitlement], steps: list[Any]
) -> None:
    world = World(scripts, entitlements)
    for what, which, tier in steps:
        if what == "ask":
            world.ask(which, tier)
        elif what == "cap":
            world.set_cap(which)
        elif world.running:
            world.end(sorted(world.running)[which % len(world.running)])
        world.check()
    while world.running:  # all are served in the end
        world.end(min(world.running))
    assert not world.waiting


def test_however_many_are_at_their_capability_those_behind_them_are_served(scripts: Scripts) -> None:
    """Ten that may have one each are first in turn, more than are ever tried of a tier; two others wait behind."""
    entitlements = {f"full{n}": Entitlement(f"full{n}", 0, 0, 1) for n in range(10)}
    world = World(scripts, entitlements)
    for tenant in [*entitlements, "e", "f"] * 2:
        world.ask(tenant, Tier.PRIORITY)
    assert [tenant for tenant, _ in world.waiting.values()] == [*entitlements, "e", "f"]
    for first in ("e", "f"):
        world.end(next(name for name, (tenant, _) in world.running.items() if tenant == first))
        world.check()
    assert not {tenant for tenant, _ in world.waiting.values()} & {"e", "f"}

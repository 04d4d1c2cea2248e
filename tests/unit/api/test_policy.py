"""What a gateway keeps on disk is whole, private, and taken only while it may be believed."""

import stat
from pathlib import Path
from uuid import uuid4

import pytest

from api.inference import policy
from api.inference.directory import Directory
from api.inference.policy import PolicyKeeper
from billing.price_table import PriceTable, VersionPrices
from billing.types import Meter, PriceItem
from core.clock import ManualClock
from core.money import Currency
from core.tiers import Tier
from knative.types import DeploymentState, ReplicaState
from scheduler.fail_static import Figures, ShareFigures
from tenants.types import Limit, LimitLevel, LimitMetric, Principal
from tests.factories.scheduler import served_model

KEY, TRUST_S = bytes(32), 900
STATE = DeploymentState("d" * 32, ReplicaState.READY)
SHARES = Figures(3, (ShareFigures((uuid4(), "t", ("key:k:conc",), ()), 5.0, 1.5, 100.0, 7),))


class World:
    """A gateway's former life, which wrote its policy down, and the start of the next."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.before, self.after = folder, ManualClock(), Directory(), Directory()
        self.shares: Figures | None = SHARES
        self.keeper = PolicyKeeper(
            *(folder, KEY, self.before, self.clock), shares=lambda: self.shares, states=lambda: [STATE]
        )
        tenant, model, before = uuid4(), served_model(), self.before
        items = [PriceItem(model.model_id, Tier.STANDARD, meter, 5) for meter in (Meter.INPUT, Meter.OUTPUT)]
        items += [PriceItem(item.model_id, item.tier, item.meter, 3, tenant) for item in items]
        before.prices = PriceTable([(0, VersionPrices(uuid4(), Currency.USD, items))], as_of_us=0)
        self.priced = (model.model_id, Tier.STANDARD, Currency.USD, tenant)
        before.models = {model.name: model}
        limits = (Limit(LimitLevel.KEY, LimitMetric.CONCURRENCY, 4),)
        principal = Principal(
            *(tenant, uuid4(), uuid4(), Currency.USD, frozenset({"inference"}), Tier.STANDARD, Tier.PRIORITY),
            limits=limits,
            cache_salt="a salt of the tenant",
        )
        before.principals = {bytes([number % 256, number // 256]) * 16: principal for number in range(1200)}
        before.revision, before.loaded = 7, True

    def take(self) -> bool:
        return policy.take(self.folder, self.after, self.clock, sealing=KEY, trust_s=TRUST_S)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path / "g1")
    await world.keeper.write()
    return world


async def test_what_was_written_is_what_is_taken(world: World) -> None:
    world.clock.advance(600)
    assert world.take()
    before, after = world.before, world.after
    assert (after.principals, after.models, after.revision) == (before.principals, before.models, 7)
    assert before.prices is not None
    assert after.prices is not None
    assert after.prices.schedule(*world.priced, 5) == before.prices.schedule(*world.priced, 5) is not None
    assert (after.loaded, after.from_disk, world.clock.monotonic() - after.fresh_at) == (True, True, 600)
    pulse = policy.read_pulse(world.folder, KEY)
    assert pulse is not None
    assert (pulse.shares, pulse.states) == (SHARES, [STATE])


async def test_the_files_are_private_and_nothing_in_them_is_in_clear(world: World) -> None:
    for name in ("policy", "pulse"):
        assert stat.S_IMODE((world.folder / name).stat().st_mode) == 0o600
        text = (world.folder / name).read_bytes()
        assert b"a salt of the tenant" not in text
        assert not any(digest in text for digest in world.before.principals)


async def test_what_is_older_than_it_may_be_is_not_taken(world: World) -> None:
    world.clock.advance(TRUST_S + 1)
    assert not world.take()
    assert not world.after.loaded
    assert world.after.disk_note == "loading; the policy on disk is 901 s old, more than 900 s"


async def test_a_pulse_says_that_the_policy_still_holds(world: World) -> None:
    world.clock.advance(TRUST_S)
    world.before.fresh_at = world.clock.monotonic()
    await world.keeper.write()
    world.clock.advance(TRUST_S)
    assert world.take()


async def test_what_is_not_known_to_hold_now_is_not_written(world: World) -> None:
    world.clock.advance(TRUST_S)  # Postgres is away all the time
    await world.keeper.write()
    world.clock.advance(1)
    assert not world.take()


@pytest.mark.parametrize("place", [0, 20, -1])
async def test_a_file_with_a_byte_changed_is_not_taken(world: World, place: int) -> None:
    file = world.folder / "policy"
    text = bytearray(file.read_bytes())
    text[place] ^= 1
    file.write_bytes(text)
    assert not world.take()
    assert world.after.disk_note == "loading; no policy on disk"


async def test_in_an_outage_of_valkey_the_shares_before_it_stay(world: World) -> None:
    world.shares = None
    await world.keeper.write()
    pulse = policy.read_pulse(world.folder, KEY)
    assert pulse is not None
    assert pulse.shares == SHARES


async def test_a_file_from_the_future_is_not_taken(world: World) -> None:
    world.clock.advance(-6)
    assert not world.take()
    assert "from the future" in world.after.disk_note


async def test_a_change_is_written_soon_and_what_did_not_change_now_and_then(world: World) -> None:
    world.clock.advance(1)
    assert not world.keeper.due()
    world.before.revision = 8
    assert world.keeper.due()
    await world.keeper.write()
    assert not world.keeper.due()
    world.clock.advance(14)
    assert world.keeper.due()

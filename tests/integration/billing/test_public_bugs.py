"""What went wrong in public, on our ledger, with the right values.

What of the list stands elsewhere: holds that are checked and taken apart (one-api 2440, new-api 6609, litellm 34732) in
`scheduler/test_admission.py` and over gateways in `contract/test_platform.py`; upstream ids that are null or repeated
(litellm 6633, 39749) in `test_poster.py`; the door without Valkey and Postgres (litellm 33923) in `scheduler`.
"""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from sqlalchemy.exc import DBAPIError

from billing import adjustments, credit_figures, lots, posting_queries, reconcile, verify
from billing.credits import balance
from billing.posting import Posting
from core import keyspace
from core.clock import SystemClock
from core.db import transaction
from core.errors import PlatformError
from core.money import nano_up, parse_pico
from core.usage import TokenUsage
from scheduler.types import Grant
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.billing_world import World, write
from tests.factories.scheduler import Fleet, ask, money, served_model

COST = parse_pico("0.012258")


@pytest.fixture
async def fleet(world: World, valkey: Path) -> AsyncIterator[Fleet]:
    opened = await Fleet.open(valkey)
    yield opened
    await opened.close()


async def counted(world: World, tenant_id: UUID) -> tuple[int, int, int]:
    """Return events, requests of the rollup and what was billed."""
    (row,) = await world.rows(
        f"SELECT (SELECT count(*) FROM usage_event WHERE tenant_id = '{tenant_id}'),"
        f" coalesce(sum(requests), 0), coalesce(sum(amount_pico), 0) FROM usage_rollup WHERE tenant_id = '{tenant_id}'"
    )
    return int(str(row[0])), int(str(row[1])), int(str(row[2]))


async def is_right(world: World) -> None:
    async with transaction(world.sessions) as session:
        assert await verify.verify(session) is None


async def test_litellm_15740_a_call_emitted_twice_is_charged_once(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    event = make.event(tenant_id, s)
    await write(world.spool_dir / "direct", [event])
    await write(world.spool_dir / "bridge", [event])
    await world.post_all()
    assert await counted(world, tenant_id) == (1, 1, COST)
    assert await world.available(tenant_id) == parse_pico("1") - COST


async def test_openmeter_5118_a_write_that_failed_once_is_written_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id is claimed by the row itself, in the transaction of the posting, and nowhere before."""
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s)])
    insert = posting_queries.insert_incoming
    failed: list[int] = []

    async def fail_once(session: object) -> object:
        rows = await insert(session)  # type: ignore[arg-type]
        if not failed:
            failed.append(1)
            raise DBAPIError("insert", None, OSError("the connection is gone"))
        return rows

    monkeypatch.setattr(posting_queries, "insert_incoming", fail_once)
    with pytest.raises(DBAPIError):
        await world.poster.step()
    assert await counted(world, tenant_id) == (0, 0, 0)
    await world.post_all()
    assert await counted(world, tenant_id) == (1, 1, COST)


async def test_lago_5359_one_id_with_other_properties_and_two_ids_at_one_instant(world: World) -> None:
    """Counts are 1 and 2 at once, in the answer of the posting and in every sum; the first copy stays."""
    tenant_id, s = await world.tenant("1")
    first = make.event(tenant_id, s)
    other = msgspec.structs.replace(first, usage=TokenUsage(1, 0, 0, 0, 0), amount_pico=2_000_000)
    twins = [msgspec.structs.replace(make.event(tenant_id, s), ended_at_us=first.ended_at_us) for _ in range(2)]
    posting = Posting(world.sessions, SystemClock(), world.poster._metrics)
    for batch, right in (([first], (1, 1, COST)), ([other], (1, 1, COST)), (twins, (3, 3, 3 * COST))):
        await posting.post(batch)
        assert await counted(world, tenant_id) == right
    assert await world.rows("SELECT DISTINCT input_uncached FROM usage_event") == [(2105,)]
    await is_right(world)


async def test_langfuse_16292_a_replay_is_delivered_and_holds_up_nobody(world: World) -> None:
    tenants = [await world.tenant("1") for _ in range(3)]
    replayed = [make.event(*tenants[0]) for _ in range(3)]
    await write(world.spool_dir / "r1", replayed)
    await world.post_all()
    await write(world.spool_dir / "r2", [*replayed, make.event(*tenants[1]), *replayed, make.event(*tenants[2])])
    await world.post_all()
    found = [await counted(world, tenant_id) for tenant_id, _ in tenants]
    assert found == [(3, 3, 3 * COST), (1, 1, COST), (1, 1, COST)]


async def test_litellm_39455_three_attempts_are_one_request_and_one_charge(world: World) -> None:
    """Attempts that failed before the first byte bill nothing; the one that answered has the request's one id."""
    tenant_id, s = await world.tenant("1")
    served = make.event(tenant_id, s, upstream_id="chatcmpl-3")
    for upstream in ("chatcmpl-1", "chatcmpl-2"):  # as a gateway would that wrote one per attempt
        attempt = msgspec.structs.replace(served, upstream_id=upstream)
        await write(world.spool_dir / upstream, [attempt])
    await write(world.spool_dir / "served", [served])
    await world.post_all()
    assert await counted(world, tenant_id) == (1, 1, COST)


async def test_litellm_27639_a_hundred_calls_of_killed_workers_leak_nothing(world: World, fleet: Fleet) -> None:
    """Of 64 units 14 were used and 36 more held: what is in the spool is billed, the rest given back."""
    tenant_id, s = await world.tenant("64")
    await fleet.replica("keeper")
    victim = await fleet.replica("victim", credit_loader=credit_figures.make_loader(world.sessions, world.client))
    hold = nano_up(parse_pico("0.5"))
    held = [await ask(victim, served_model(), money=money(tenant_id, hold)) for _ in range(100)]
    half = TokenUsage(250_000, 0, 0, 0, 0)  # 0.50 at 2.00 per million
    await write(world.spool_dir / "victim", [make.event(tenant_id, s, half, event_id=g.request_id) for g in held[:28]])
    await fleet.clients[1].close()
    for _ in range(14):
        await fleet.advance(1)
        await fleet.replicas[0].heartbeat()
    assert await fleet.replicas[0].tick() == 100
    assert await fleet.credit_left(tenant_id) == nano_up(parse_pico("14"))
    await world.post_all()
    assert await world.available(tenant_id) == parse_pico("50")
    assert await fleet.credit_left(tenant_id) == nano_up(parse_pico("14"))  # what is unknown stays held
    lost = await reconcile.write_off(world.client, "victim")
    assert len(lost[tenant_id]) == 100
    assert await world.client.call("HGETALL", keyspace.outstanding(tenant_id)) == []
    assert await fleet.credit_left(tenant_id) == nano_up(parse_pico("50"))


async def test_new_api_4429_six_of_eight_holds_that_broke_are_restored_to_the_pico(world: World, fleet: Fleet) -> None:
    tenant_id, s = await world.tenant("2.000000000001")
    replica = await fleet.replica(credit_loader=credit_figures.make_loader(world.sessions, world.client))
    held = [await ask(replica, served_model(), money=money(tenant_id, nano_up(parse_pico("0.17")))) for _ in range(8)]
    for grant in held[2:]:
        replica.release(grant, None)  # what the pipeline's `finally` does when a handler raises
    for grant in held[:2]:
        replica.release(grant, nano_up(COST))
    await replica.heartbeat()
    await write(world.spool_dir / "r1", [make.event(tenant_id, s, event_id=grant.request_id) for grant in held[:2]])
    await world.post_all()
    assert await world.available(tenant_id) == parse_pico("2.000000000001") - 2 * COST
    assert await world.figures(tenant_id) == ((parse_pico("2") - 2 * COST) // 1000, 0, 0)


async def test_blnk_182_a_hold_is_resolved_once(world: World, fleet: Fleet) -> None:
    """Settled, it cannot be voided; voided, it cannot be settled; given back twice, it is given back once."""
    tenant_id, _ = await world.tenant("1")
    replica = await fleet.replica(credit_loader=credit_figures.make_loader(world.sessions, world.client))
    for first, second, left in ((7, None, 10**9 - 7), (None, 7, 10**9), (3, 9, 10**9 - 3)):
        grant = await ask(replica, served_model(), money=money(tenant_id, 100))
        assert isinstance(grant, Grant)
        replica.release(grant, first)
        replica.release(grant, second)
        await replica.heartbeat()
        assert await fleet.credit_left(tenant_id) == left
        await credit_figures.settle(world.client, tenant_id, None, [grant.request_id])
        await credit_figures.settle(world.client, tenant_id, None, [grant.request_id])
        assert await fleet.credit_left(tenant_id) == 10**9


async def test_blnk_203_balance_and_transaction_are_both_or_neither(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id, _ = await world.tenant("1")

    async def fail(*_: object) -> None:
        raise OSError("after the balances were moved")

    monkeypatch.setattr(posting_queries, "raise_versions", fail)
    with pytest.raises(OSError, match="after the balances"):
        await make.add_credit(world.sessions, tenant_id, "10.85", "k")
    assert await world.available(tenant_id) == parse_pico("1")
    assert await world.rows("SELECT count(*) FROM ledger_tx") == [(1,)]
    monkeypatch.undo()
    await make.add_credit(world.sessions, tenant_id, "10.85", "k")
    assert await world.available(tenant_id) == 11_850_000_000_000
    with pytest.raises(PlatformError) as refused:
        parse_pico("10.8500000000001")  # not a whole number of pico
    assert refused.value.kind.name == "INVALID"
    await is_right(world)


async def test_midaz_2317_a_reversal_restores_the_balance_there_was(world: World) -> None:
    """Usage beyond the credit, reversed: credit, overrun and revenue are what they were, each."""
    tenant_id, s = await world.tenant("0.01")
    event = make.event(tenant_id, s)
    before = await sums(world, tenant_id)
    await write(world.spool_dir / "r1", [event])
    await world.post_all()
    assert (await sums(world, tenant_id))["expense.overrun"] == COST - parse_pico("0.01")
    (row,) = await world.rows("SELECT id FROM ledger_tx WHERE kind = 'usage'")
    async with transaction(world.sessions) as session:
        await adjustments.reverse(session, tenant_id, UUID(str(row[0])), credit.asked(SystemClock().now()))
    assert await sums(world, tenant_id) == before
    await is_right(world)


async def sums(world: World, tenant_id: UUID) -> dict[str, int]:
    """Debits less credits of each account of the tenant."""
    rows = await world.rows(
        "SELECT a.code, b.debit - b.credit FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id"
        f" WHERE a.tenant_id = '{tenant_id}'"
    )
    return {str(code): int(str(amount)) for code, amount in rows}


async def test_tigerbeetle_2118_what_expired_and_is_not_taken_back_yet_is_shown_apart(world: World) -> None:
    """It is no credit any more; its lot still shows it, with its expiry, until it is taken back."""
    tenant_id, _ = await world.tenant("1")
    now = SystemClock().now().replace(second=0, microsecond=0)
    await credit.give(world.sessions, tenant_id, "3", now - timedelta(hours=1), expires_at=now - timedelta(minutes=3))
    async with transaction(world.sessions) as session:
        assert (await balance(session, tenant_id)).available_pico == parse_pico("1")
        expired = [lot for lot in await lots.all_of(session, tenant_id) if lot.expires_at is not None]
    assert [(lot.available_pico, lot.expires_at) for lot in expired] == [(parse_pico("3"), now - timedelta(minutes=3))]
    assert await credit.expire(world.sessions, tenant_id, now) == 0
    assert await credit.expire(world.sessions, tenant_id, now + timedelta(minutes=8)) == parse_pico("3")
    assert await world.available(tenant_id) == parse_pico("1")

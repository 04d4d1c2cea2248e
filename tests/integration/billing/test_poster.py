"""The poster against real Postgres and Valkey: every event once, whatever is offered how often, and Valkey agrees."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest
from structlog.testing import capture_logs

from billing import assess, credit_figures, queries, terms
from billing import spool_format as fmt
from billing.price_table import VersionPrices
from billing.types import Balance, BillingMode, Outcome, PriceSchedule, UsageEvent
from core import keyspace
from core.clock import SystemClock
from core.db import transaction
from core.ids import new_uuid
from core.money import Currency, format_pico, parse_pico
from core.resp import RespClient, RespUnavailable
from core.settings import Database
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.factories.credit_figures import add_outstanding, set_figure

COST = parse_pico("0.012258")


async def test_events_are_posted_once_with_their_parts(world: World) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    event = make.event(
        tenant_id, make.schedule(world.prices, tenant_id), upstream_id="chatcmpl-1\t\\N\n", model="a b\\c"
    )
    await write(world.spool_dir / "r1", [event, event])
    assert await world.poster.step() == 2
    assert await world.poster.step() == 0
    assert await world.available(tenant_id) == parse_pico("0.987742")
    stored = await world.rows(
        "SELECT id, input_uncached, input_cached, output, reasoning, amount_pico, upstream_id, model, outcome,"
        " (extract(epoch FROM admitted_at) * 1000000)::bigint, stream, tier FROM usage_event",
    )
    assert stored == [
        (
            event.id,
            2105,
            10240,
            360,
            640,
            COST,
            event.upstream_id,
            "a b\\c",
            "completed",
            event.admitted_at_us,
            False,
            1,
        )
    ]
    rollup = await world.rows("SELECT requests, input_cached, amount_pico FROM usage_rollup")
    assert rollup == [(1, 10240, COST)]


async def test_what_is_offered_again_changes_nothing(world: World) -> None:
    """Lost checkpoints, a copied spool, an event in two batches: one charge."""
    tenant_id, s = await world.tenant("10")
    events = [make.event(tenant_id, s) for _ in range(50)]
    folder = world.spool_dir / "r1"
    await write(folder, events, segment_bytes=4096)
    await write(world.spool_dir / "copy", [*events[::-1], make.event(tenant_id, s)])
    for _ in range(3):
        poster = world.new_poster()
        while await poster.step():
            pass
        (folder / "checkpoint.json").unlink()
    assert await world.available(tenant_id) == parse_pico("10") - 51 * COST
    assert await world.rows("SELECT sum(requests), sum(amount_pico) FROM usage_rollup") == [(51, 51 * COST)]


async def test_null_and_repeated_upstream_ids_are_events_of_their_own(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    events = [
        make.event(tenant_id, s, upstream_id=upstream) for upstream in ("", "None", "chatcmpl-424", "chatcmpl-424")
    ]
    await write(world.spool_dir / "r1", events)
    await world.poster.step()
    assert await world.available(tenant_id) == parse_pico("1") - 4 * COST


async def test_a_million_tiny_events_would_add_up_exactly(world: World) -> None:
    """A thousand of them here, on the way of all events: 7 tokens at 0.0375 are 262,500 pico, below a nano each."""
    items = make.items({"input": "1", "cached_input": "0.0375", "output": "0"})
    prices = await make.publish_prices(world.sessions, items, Currency.CNY)
    tenant_id = await make.tenant(world.sessions, "1", currency=Currency.CNY)
    s = make.schedule(prices, tenant_id)
    await write(world.spool_dir / "r1", [make.event(tenant_id, s, TokenUsage(input_cached=7)) for _ in range(1000)])
    while await world.poster.step():
        pass
    assert format_pico(parse_pico("1") - await world.available(tenant_id)) == "0.000262500000"


async def test_endings_that_are_ours_cost_nothing_and_are_counted(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s, outcome=outcome) for outcome in Outcome])
    await world.poster.step()
    assert await world.available(tenant_id) == parse_pico("1") - 2 * COST  # completed, and left by the client
    found = await world.rows("SELECT outcome, requests, amount_pico FROM usage_rollup ORDER BY outcome")
    assert {str(outcome): amount for outcome, _, amount in found} == {
        outcome.value: COST if outcome in {Outcome.COMPLETED, Outcome.CLIENT_ABORT} else 0 for outcome in Outcome
    }


async def test_usage_beyond_the_credit_is_the_platforms_and_credit_stops_at_zero(world: World) -> None:
    prepaid, postpaid = await make.tenant(world.sessions, "0.03"), await make.tenant(world.sessions, limit="0.02")
    events = [make.event(t, make.schedule(world.prices, t)) for t in (prepaid, postpaid) for _ in range(3)]
    await write(world.spool_dir / "r1", events)
    await world.poster.step()
    assert await world.available(prepaid) == 0
    assert await world.available(postpaid) == 0
    found = await world.rows(
        "SELECT a.tenant_id, a.code, b.debit, b.credit"
        " FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id"
        " WHERE a.tenant_id IS NOT NULL AND a.code <> 'liability.credit_paid'",
    )
    by_code = {(tenant, code): (debit, credit) for tenant, code, debit, credit in found}
    for tenant_id, covered in ((prepaid, parse_pico("0.03")), (postpaid, parse_pico("0.02"))):
        assert by_code[tenant_id, "revenue.usage"] == (0, 3 * COST)
        assert by_code[tenant_id, "expense.overrun"] == (3 * COST - covered, 0)


QUARANTINED: dict[str, Callable[[UUID, PriceSchedule], UsageEvent]] = {
    "flagged": lambda t, s: make.event(t, s, quarantine="a negative part in the engine's usage"),
    "another amount": lambda t, s: make.event(t, s, amount_pico=COST - 1),
    "negative part": lambda t, s: make.event(t, s, TokenUsage(-1, 2, 3, 4, 5), amount_pico=0),
    "not a UUIDv7": lambda t, s: make.event(t, s, event_id=UUID("7b8e5d40-1234-4321-8abc-0123456789ab")),
    "an id of another year": lambda t, s: make.event(t, s, event_id=make.uuid7_at(4_102_444_800)),
}


async def test_what_is_doubtful_is_kept_and_not_billed(world: World) -> None:
    for number, (case, odd_of) in enumerate(QUARANTINED.items()):
        tenant_id, s = await world.tenant("1")
        odd, good = odd_of(tenant_id, s), make.event(tenant_id, s)
        await credit_figures.refresh(world.client, world.sessions, tenant_id)
        await credit_figures.register(world.client, [odd, good])
        await write(world.spool_dir / f"r{number}", [odd, good, odd])
        await world.poster.step()
        assert await world.available(tenant_id) == parse_pico("1") - COST, case
        kept = await world.rows(f"SELECT id, payload FROM usage_quarantine WHERE tenant_id = '{tenant_id}'")
        assert [row[0] for row in kept] == [odd.id], case
        assert isinstance(kept[0][1], bytes)
        assert fmt.decode(kept[0][1]) == odd
        assert await world.figures(tenant_id) == (987_742_000, 0, 0), case


async def test_unknown_tenant_currency_and_price_are_quarantined(world: World) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    yuan = await make.tenant(world.sessions, "1", currency=Currency.CNY)
    s = make.schedule(world.prices, tenant_id)
    unknown_price = make.schedule(VersionPrices(new_uuid(), Currency.USD, make.items(make.PRICES)), tenant_id)
    odd = [make.event(new_uuid(), s), make.event(yuan, s), make.event(tenant_id, unknown_price)]
    await write(world.spool_dir / "r1", odd)
    await world.poster.step()
    found = {row[0]: row[1] for row in await world.rows("SELECT id, reason FROM usage_quarantine")}
    assert [found[event.id] for event in odd] == [
        "the tenant has no account",
        "the tenant is billed in CNY, the event is in USD",
        "no such price version is published",
    ]
    assert await world.rows("SELECT count(*) FROM usage_event") == [(0,)]


async def test_one_event_that_postgres_refuses_does_not_hold_up_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id, s = await world.tenant("1")
    events = [make.event(tenant_id, s) for _ in range(9)]
    real = assess.copy_line

    def line(event: UsageEvent, tx: str, min_charge: int) -> str:
        right = real(event, tx, min_charge)
        return right.replace("\tchat\t", "\tch\0at\t") if event == events[4] else right

    monkeypatch.setattr(assess, "copy_line", line)
    await write(world.spool_dir / "r1", events)
    await world.poster.step()
    assert await world.available(tenant_id) == parse_pico("1") - 8 * COST
    assert await world.rows("SELECT id, reason FROM usage_quarantine") == [
        (events[4].id, "Postgres refused it (22021)")
    ]


async def test_a_figure_that_an_earlier_version_left_is_made_anew(world: World) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    await world.client.call("HSET", keyspace.credit(tenant_id), "a", 5, "v", 10**6, "o", 5000)
    await world.client.call("HSET", keyspace.outstanding(tenant_id), new_uuid().hex, 5000)
    await credit_figures.settle(world.client, tenant_id, None, [new_uuid()])
    await credit_figures.make_loader(world.sessions, world.client)(tenant_id)
    assert await world.figures(tenant_id) == (1_000_000_000, 5000, 1)


async def test_valkey_follows_each_commit(world: World) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    event = make.event(tenant_id, make.schedule(world.prices, tenant_id))
    running = new_uuid()
    await credit_figures.make_loader(world.sessions, world.client)(tenant_id)
    await credit_figures.register(world.client, [event])
    await world.client.call("HSET", keyspace.outstanding(tenant_id), running.hex, 5000)
    await add_outstanding(world.client, tenant_id, 5000)
    assert await world.figures(tenant_id) == (1_000_000_000, 12_258_000 + 5000, 2)
    await write(world.spool_dir / "r1", [event])
    await world.poster.step()
    assert await world.figures(tenant_id) == (987_742_000, 5000, 1)


async def test_with_valkey_away_posting_goes_on_and_is_settled_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id, s = await world.tenant("1")
    first, second = make.event(tenant_id, s), make.event(tenant_id, s)
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    await credit_figures.register(world.client, [first, second])

    async def unavailable(*args: object) -> None:
        raise RespUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(RespClient, "eval", unavailable)
        for number, event in enumerate((first, second)):
            await write(world.spool_dir / f"r{number}", [event])
            assert await world.poster.step() == 1
        assert await world.available(tenant_id) == parse_pico("1") - 2 * COST
        assert fmt.read_checkpoint(world.spool_dir / "r0") == fmt.Position()
    assert await world.poster.step() == 0
    assert await world.figures(tenant_id) == (975_484_000, 0, 0)
    assert fmt.read_checkpoint(world.spool_dir / "r0").offset > 0


async def test_after_valkey_lost_its_data_unposted_usage_is_entered_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    event = make.event(tenant_id, make.schedule(world.prices, tenant_id))
    await world.client.call("SET", keyspace.EPOCH, "one")
    await world.poster.step()
    await write(world.spool_dir / "r1", [event])
    await world.client.call("FLUSHALL")
    await world.client.call("SET", keyspace.EPOCH, "two")

    async def away(events: Sequence[UsageEvent]) -> None:
        raise OSError("Postgres is away")

    with monkeypatch.context() as patch:
        patch.setattr(world.poster._posting, "post", away)
        with pytest.raises(OSError, match="away"):
            await world.poster.step()
    await credit_figures.make_loader(world.sessions, world.client)(tenant_id)
    assert await world.figures(tenant_id) == (1_000_000_000, 12_258_000, 1)  # so it cannot be spent twice
    assert await world.poster.step() == 1
    assert await world.figures(tenant_id) == (987_742_000, 0, 0)


async def test_reconciliation_puts_figures_right(world: World) -> None:
    tenant_id, idle = await make.tenant(world.sessions, "1"), await make.tenant(world.sessions, "1")
    old = make.uuid7_at(int(datetime.now(UTC).timestamp()) - 300)
    running = make.uuid7_at(int(datetime.now(UTC).timestamp()) - 301)
    event = make.event(tenant_id, make.schedule(world.prices, tenant_id), event_id=old)
    await write(world.spool_dir / "r1", [event])
    await world.poster.step()
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    out = keyspace.outstanding(tenant_id)
    # the removal of the posted one was lost
    await world.client.call("HSET", out, old.hex, 12_258_000, running.hex, 700)
    await set_figure(world.client, tenant_id, outstanding=12_258_000 + 700 + 99, available=5)
    with capture_logs() as logs:
        drift = await credit_figures.reconcile(world.sessions, world.client, SystemClock())
    assert await world.figures(tenant_id) == (987_742_000, 700, 1)
    told = [(log["event"], log["tenant_id"], log.get("figure"), log.get("off_nano")) for log in logs]
    assert told == [  # what the gauge sums, by tenant and figure
        ("credit.figure_repaired", tenant_id.hex, "available", 5 - 987_742_000),
        ("credit.leftovers_dropped", tenant_id.hex, None, None),
        ("credit.figure_repaired", tenant_id.hex, "outstanding", 99),
    ]
    assert drift.sums_nano == 99
    assert (drift.tenants, drift.figures, drift.figures_nano, drift.leftovers, drift.sums) == (1, 1, 987_741_995, 1, 1)
    clean = await credit_figures.reconcile(world.sessions, world.client, SystemClock())
    assert (clean.figures, clean.leftovers, clean.sums) == (0, 0, 0)
    assert await world.client.call("EXISTS", keyspace.credit(idle)) == 0


async def test_a_limit_that_changes_during_reconciliation_is_no_drift(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page was read when 10.00 could go unbilled; then the limit became 4.00, with no transaction."""
    tenant_id = await make.tenant(world.sessions, limit="10")
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    async with transaction(world.sessions) as session:
        page = await queries.balances(session, [tenant_id])
        pico, now = parse_pico("4"), SystemClock().now()
        await terms.change(session, tenant_id, BillingMode.POSTPAID, pico, by="operator", note="less", now=now)
    await credit_figures.refresh(world.client, world.sessions, tenant_id, correct=True)

    async def earlier(*_: object) -> list[Balance]:
        return page

    monkeypatch.setattr(queries, "balances_after", earlier)
    drift = await credit_figures.reconcile(world.sessions, world.client, SystemClock())
    assert (drift.tenants, drift.figures) == (1, 0)
    assert (await world.figures(tenant_id))[0] == 4 * 10**9


async def test_a_figure_never_goes_back_to_an_older_balance(world: World) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    async with transaction(world.sessions) as session:
        old = (await queries.balances(session, [tenant_id]))[0]
    await make.add_credit(world.sessions, tenant_id, "2", "k2")
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    await credit_figures.set_figure(world.client, old)
    await credit_figures.set_figure(world.client, old, correct=True)
    await credit_figures.settle(world.client, tenant_id, old, [new_uuid()])
    assert await world.figures(tenant_id) == (3_000_000_000, 0, 0)


async def test_large_balances_and_the_cap_stay_exact(world: World) -> None:
    rich, capped = (
        await make.tenant(world.sessions, "8999999.999999999999"),
        await make.tenant(world.sessions, "999999999"),
    )
    for tenant_id in (rich, capped):
        await credit_figures.refresh(world.client, world.sessions, tenant_id)
    assert (await world.figures(rich))[0] == 8_999_999_999_999_999
    assert (await world.figures(capped))[0] == 9_000_000 * 10**9


async def test_posted_events_cannot_be_changed_by_anybody(world: World, database_settings: Database) -> None:
    tenant_id = await make.tenant(world.sessions, "1")
    event = make.event(tenant_id, make.schedule(world.prices, tenant_id))
    await write(world.spool_dir / "r1", [event])
    await world.poster.step()
    day = fmt.decode(fmt.encode(event)[fmt.FRAME.size :]).id
    partition = (await world.rows("SELECT DISTINCT tableoid::regclass::text FROM usage_event"))[0][0]
    assert day == event.id
    for url in (database_settings.url, database_settings.owner_url):
        assert url is not None
        for statement in (
            "UPDATE usage_event SET amount_pico = 0",
            "DELETE FROM usage_event",
            f"UPDATE {partition} SET amount_pico = 0",
            f"DELETE FROM {partition}",
            f"TRUNCATE {partition}",
            "DELETE FROM ledger_transfer",
        ):
            with (
                psycopg.connect(url.get_secret_value()) as connection,
                pytest.raises((psycopg.errors.RestrictViolation, psycopg.errors.InsufficientPrivilege)),
            ):
                connection.execute(statement)


async def test_partitions_are_made_ahead_and_not_for_any_day(world: World) -> None:
    await world.poster.housekeep()
    found = await world.rows("SELECT count(*) FROM pg_inherits WHERE inhparent = 'usage_event'::regclass")
    assert found == [(8,)]
    for day in ("2023-12-31", "2090-01-01"):
        with pytest.raises(Exception, match="out of range"):
            await world.rows(f"SELECT ensure_usage_partition('{day}')")


async def test_a_flood_of_one_tenant_delays_others_by_one_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of events in one gateway's spool, three of another tenant in another's, which is next in line."""
    monkeypatch.setattr("billing.poster.BATCH_EVENTS", 50)
    (hot, s), (small, _) = await world.tenant("100"), await world.tenant("1")
    await write(world.spool_dir / "a-hot", [make.event(hot, s) for _ in range(400)])
    await write(world.spool_dir / "b-small", [make.event(small, make.schedule(world.prices, small)) for _ in range(3)])
    assert [await world.poster.step(), await world.poster.step()] == [50, 50]
    assert await world.available(small) == parse_pico("1") - 3 * parse_pico("0.012258")
    while await world.poster.step():
        pass
    assert await world.available(hot) == parse_pico("100") - 400 * parse_pico("0.012258")

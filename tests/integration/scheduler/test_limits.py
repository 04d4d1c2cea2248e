"""Tokens, budgets and soft limits over several replicas on a real Valkey: taken as estimated, kept as used."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import msgspec
import pytest

from core.demand import Demand, Unit
from core.errors import ErrorKind, PlatformError
from scheduler import commands
from scheduler.types import Grant
from tests.factories.scheduler import (
    Fleet,
    ask,
    concurrency,
    money,
    outcomes,
    rate,
    served_model,
    spend,
    tokens,
    until_ready,
)

INPUT, OUTPUT = "key:k:itpm", "key:k:otpm"
BOTH = (tokens(1000, Unit.INPUT_TOKEN), tokens(500, Unit.OUTPUT_TOKEN))


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    yield fleet
    await fleet.close()


async def refusal(call: "asyncio.Future[Grant] | asyncio.Task[Grant]") -> PlatformError:
    with pytest.raises(PlatformError) as caught:
        await call
    return caught.value


def soon(*args: object, **values: object) -> "asyncio.Task[Grant]":
    return asyncio.ensure_future(ask(*args, **values))  # type: ignore[arg-type] # passes on what ask takes


def bucket(grant: Grant) -> int:
    return grant.reply[3] // 1_000_000


async def test_tokens_are_taken_as_estimated_and_kept_as_used_in_their_own_second(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    first = await ask(replica, model, *BOTH, used=(300, 200))
    await fleet.advance(5)
    second = await ask(replica, model, *BOTH, used=(100, 50))
    assert await fleet.rated(INPUT) == {bucket(first): 300, bucket(second): 100}
    replica.release(first, 0, 210, 80)
    assert await fleet.rated(INPUT) == {bucket(first): 210, bucket(second): 100}
    assert await fleet.rated(OUTPUT) == {bucket(first): 80, bucket(second): 50}
    replica.release(second, 0, 130, 50)  # more than was thought
    assert await fleet.rated(INPUT) == {bucket(first): 210, bucket(second): 130}


async def test_what_is_left_is_shown_and_comes_back_with_the_release(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    grant = await ask(replica, model, *BOTH, used=(600, 100))
    assert grant.reply[5:] == [400, 61, 0, 400, 61, 1]
    assert (await refusal(soon(replica, model, *BOTH, used=(500, 1)))).code == "TOKENS_LIMITED"
    replica.release(grant, 0, 100, 0)
    assert isinstance(await ask(replica, model, *BOTH, used=(900, 1)), Grant)


async def test_a_bucket_that_left_the_window_needs_nothing(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    long = await ask(replica, model, *BOTH, used=(300, 200))
    for _ in range(8):
        await fleet.advance(9)
        await replica.heartbeat()
    now = await ask(replica, model, *BOTH, used=(10, 10))
    replica.release(long, 0, 100, 900)
    assert await fleet.rated(INPUT) == {bucket(now): 10}
    assert await fleet.rated(OUTPUT) == {bucket(now): 10}


async def test_a_request_that_used_nothing_gives_its_tokens_back_and_counts_as_a_request(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    grant = await ask(replica, model, rate(9), *BOTH, used=(300, 200))
    replica.release(grant, None, 0, 0)
    assert await fleet.rated(INPUT) == {bucket(grant): 0}
    assert await fleet.rated("key:k:rpm") == {bucket(grant): 1}


async def test_without_a_word_the_estimate_stays(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    grant = await ask(replica, model, *BOTH, used=(300, 200))
    replica.release(grant, 0)
    assert await fleet.rated(INPUT) == {bucket(grant): 300}


async def test_who_leaves_the_queue_unserved_has_taken_nothing(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(inflight_max=1), uuid4()
    await fleet.set_credit(tenant, 1000)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:d:2026-11-30", 0)
    running = await ask(replica, model)
    demands = (rate(5), concurrency(5), spend(100), *BOTH)
    late = soon(replica, model, *demands, money=money(tenant, 60), used=(300, 200), wait_s=0.02)
    assert (await refusal(late)).code == "MODEL_BUSY"
    left = soon(replica, model, *demands, money=money(tenant, 60), used=(300, 200), wait_s=30)
    while replica.waiting < 1:
        await replica.heartbeat()
    assert sum((await fleet.rated(INPUT)).values()) == 300
    assert await fleet.count("key:k:spend:d:2026-11-30") == 60
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await replica.heartbeat()
    for counter in (INPUT, OUTPUT, "key:k:rpm"):
        assert sum((await fleet.rated(counter)).values()) == 0
    assert await fleet.count("key:k:spend:d:2026-11-30") == await fleet.running("key:k") == 0
    replica.release(running, None)


async def test_who_waited_is_corrected_in_the_second_it_came(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model(inflight_max=1)
    running = await ask(replica, model)
    waiting = soon(replica, model, *BOTH, used=(300, 200), wait_s=30)
    while replica.waiting < 1:
        await replica.heartbeat()
    await fleet.advance(7)
    replica.release(running, None)
    granted = await waiting
    replica.release(granted, 0, 7, 3)
    assert await fleet.rated(INPUT) == {bucket(granted): 7}
    assert await fleet.rated(OUTPUT) == {bucket(granted): 3}


async def test_of_3000_on_the_key_and_100_on_the_tenant_the_tenants_stops_it(fleet: Fleet) -> None:
    replicas = [await fleet.replica() for _ in range(4)]
    model = served_model()
    demands = (rate(3000), rate(100, counter="tenant:t:rpm"))
    got = await outcomes(*(soon(replicas[n % 4], model, *demands) for n in range(300)))
    assert sum(isinstance(one, Grant) for one in got) == 100
    error = await refusal(soon(replicas[0], model, *demands))
    assert error.fields == {"level": "tenant", "metric": "requests_per_minute", "limit": 100, "model": ""}
    assert error.message.startswith("The limit of 100 requests per minute of this tenant is reached. Try again in 6")


@pytest.mark.parametrize(
    ("demand", "metric", "words", "lower"),
    [
        (BOTH[0], "input_tokens_per_minute", "takes 1,001, more than the limit of 1,000 input tokens", "prompt"),
        (BOTH[1], "output_tokens_per_minute", "takes 501, more than the limit of 500 output tokens", "max_tokens"),
    ],
)
async def test_a_request_larger_than_the_limit_itself_is_told_what_to_lower(
    fleet: Fleet, demand: Demand, metric: str, words: str, lower: str
) -> None:
    replica, model = await fleet.replica(), served_model()
    error = await refusal(soon(replica, model, demand, used=(1001, 501)))
    assert (error.code, error.kind, error.retry_after_s) == ("TOKENS_LIMITED", ErrorKind.RATE_LIMITED, 60)
    assert error.fields["metric"] == metric
    assert words in error.message
    assert lower in error.message


async def test_a_request_without_output_passes_a_limit_of_output_that_is_used_up(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    await ask(replica, model, *BOTH, used=(1, 500))
    assert isinstance(await ask(replica, model, *BOTH, used=(1, 0)), Grant)
    assert (await refusal(soon(replica, model, *BOTH, used=(1, 1)))).fields["metric"] == "output_tokens_per_minute"


async def test_a_limit_of_one_model_is_named_with_it(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    limit = tokens(10, Unit.INPUT_TOKEN, counter=f"project:p:m:{model.model_id.hex}:itpm")
    await ask(replica, model, limit, used=(10, 0))
    error = await refusal(soon(replica, model, limit, used=(1, 0)))
    assert (error.fields["level"], error.fields["model"]) == ("project", "small")


async def test_tokens_are_exact_over_four_replicas(fleet: Fleet) -> None:
    replicas = [await fleet.replica() for _ in range(4)]
    model = served_model()
    got = await outcomes(*(soon(replicas[n % 4], model, *BOTH, used=(30, 1)) for n in range(200)))
    assert sum(isinstance(one, Grant) for one in got) == 33
    assert sum((await fleet.rated(INPUT)).values()) == 990


async def test_soft_and_dark_limits_count_refuse_nothing_and_are_told(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 1000)
    hard = (
        rate(1, counter="key:k:rpm:soft"),
        tokens(100, Unit.INPUT_TOKEN, counter="key:k:itpm:dark"),
        spend(50, counter="key:k:spend:t:soft"),
        concurrency(1, counter="key:k:conc:soft"),
    )
    soft = tuple(msgspec.structs.replace(demand, enforced=False) for demand in hard)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:t:soft", 0)
    prepared = replica.prepare((*soft, rate(3)), model, tenant.hex)
    first = await ask(replica, model, prepared=prepared, money=money(tenant, 30), used=(60, 0))
    second = await ask(replica, model, prepared=prepared, money=money(tenant, 30), used=(60, 0))
    assert first.over == ()
    assert sorted(demand.counter for demand in second.over) == sorted(demand.counter for demand in soft)
    assert second.reply[5:8] == [1, 61, prepared.named.index(rate(3))]  # of what refuses nothing nothing else is told
    assert sum((await fleet.rated("key:k:itpm:dark")).values()) == 120
    replica.release(second, 10, 40, 0)
    assert sum((await fleet.rated("key:k:itpm:dark")).values()) == 100
    assert await fleet.count("key:k:spend:t:soft") == 40
    assert await fleet.running("key:k:soft") == 1


async def made(fleet: Fleet, _: UUID, spends: tuple[Demand, ...]) -> None:
    for demand in spends:
        await fleet.client.call("SET", f"{{tg}}:c:{demand.counter}", 0, "NX")


async def test_a_budget_of_1000_admits_exactly_ten_of_fifty_requests_of_100(fleet: Fleet) -> None:
    loads = []

    async def load(tenant: UUID, spends: tuple[Demand, ...]) -> None:
        loads.append(tenant)
        await made(fleet, tenant, spends)

    replicas = [await fleet.replica(budget_loader=load) for _ in range(4)]
    model, tenant = served_model(), uuid4()
    await fleet.set_credit(tenant, 10**6)
    got = await outcomes(*(soon(replicas[n % 4], model, spend(1000), money=money(tenant, 100)) for n in range(50)))
    grants = [(n % 4, one) for n, one in enumerate(got) if isinstance(one, Grant)]
    assert len(grants) == 10
    assert got.count("BUDGET_EXCEEDED") == 40
    assert len(loads) <= 4  # once a replica, however many wait
    error = await refusal(soon(replicas[0], model, spend(1000), money=money(tenant, 100)))
    assert (error.kind, error.retry_after_s) == (ErrorKind.PAYMENT, None)
    assert error.fields == {"level": "key", "metric": "spend_per_day", "limit": "0.000001000000", "model": ""}
    for n, grant in grants[:5]:
        replicas[n].release(grant, 40)
    for n, grant in grants[5:]:
        replicas[n].release(grant, None, 0, 0)
    assert await fleet.count("key:k:spend:d:2026-11-30") == 5 * 40


async def test_a_balance_of_1000_admits_exactly_ten_of_fifty_requests_of_100(fleet: Fleet) -> None:
    replicas = [await fleet.replica() for _ in range(4)]
    model, tenant = served_model(), uuid4()
    await fleet.set_credit(tenant, 1000)
    got = await outcomes(*(soon(replicas[n % 4], model, money=money(tenant, 100)) for n in range(50)))
    assert (sum(isinstance(one, Grant) for one in got), got.count("INSUFFICIENT_CREDIT")) == (10, 40)


async def test_a_free_request_obeys_every_other_limit_and_passes_a_budget_used_up(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 0)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:d:2026-11-30", 100)
    demands = (spend(100), rate(2), *BOTH)
    for _ in range(2):
        await ask(replica, model, *demands, money=money(tenant, 0), used=(10, 10))
    assert (await refusal(soon(replica, model, *demands, money=money(tenant, 0)))).code == "RATE_LIMITED"


async def test_what_costs_nothing_by_its_kind_asks_no_budget(fleet: Fleet) -> None:
    """Tokenizing has no money demand: a budget that nobody has loaded is not asked for."""
    replica, model = await fleet.replica(), served_model()
    assert isinstance(await ask(replica, model, spend(0), rate(5), *BOTH, used=(10, 0)), Grant)


async def test_a_budget_that_cannot_be_loaded_is_503_and_takes_nothing(fleet: Fleet) -> None:
    async def load(_: UUID, __: tuple[Demand, ...]) -> None:
        raise OSError("the ledger is away")

    replica, model, tenant = await fleet.replica(budget_loader=load), served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    error = await refusal(soon(replica, model, spend(100), *BOTH, money=money(tenant, 1), used=(5, 5)))
    assert (error.code, error.retry_after_s) == ("SERVICE_UNAVAILABLE", 1)
    assert await fleet.rated(INPUT) == {}
    assert await fleet.outstanding(tenant) == {}


async def test_a_dead_replica_gives_its_slots_back_and_leaves_tokens_and_budget_taken(fleet: Fleet) -> None:
    replica, dead, model, tenant = await fleet.replica(), await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 1000)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:d:2026-11-30", 0)
    demands = (concurrency(5), spend(1000), *BOTH)
    grant = await ask(dead, model, *demands, money=money(tenant, 100), used=(300, 200))
    await fleet.advance(11)
    await replica.heartbeat()
    assert await replica.tick() == 1
    assert await fleet.running("key:k") == 0
    assert await fleet.rated(INPUT) == {bucket(grant): 300}
    assert await fleet.count("key:k:spend:d:2026-11-30") == 100
    assert await fleet.outstanding(tenant) == {grant.request_id.hex: 100}


async def test_what_runs_while_data_is_lost_is_entered_with_its_tokens(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    grant = await ask(replica, model, rate(5), *BOTH, used=(300, 200))
    await fleet.client.call("FLUSHALL")
    await fleet.client.call("SET", commands.OFFSET, 3_000_000)
    await replica.resync()
    (at, taken), *rest = (await fleet.rated(INPUT)).items()
    assert (taken, rest) == (300, [])
    assert at > bucket(grant)
    assert sum((await fleet.rated("key:k:rpm")).values()) == 1
    replica.release(grant, 0, 210, 80)
    assert await fleet.rated(INPUT) == {at: 210}


async def test_what_was_taken_for_dead_and_runs_is_not_counted_twice(fleet: Fleet) -> None:
    asleep, other, model = await fleet.replica(), await fleet.replica(), served_model()
    grant = await ask(asleep, model, rate(5), *BOTH, used=(300, 200))
    await fleet.advance(11)
    await other.heartbeat()
    assert await other.tick() == 1
    await asleep.heartbeat()
    await asleep.heartbeat()
    assert await fleet.load(model) == (1, 0)
    assert await fleet.rated(INPUT) == {bucket(grant): 300}
    assert await fleet.rated("key:k:rpm") == {bucket(grant): 1}
    asleep.release(grant, 0, 210, 80)
    assert await fleet.rated(INPUT) == {bucket(grant): 210}


async def test_what_was_granted_without_valkey_is_entered_with_its_tokens_and_its_budget(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 1000)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:d:2026-11-30", 0)
    prepared = replica.prepare((rate(9), concurrency(5), spend(1000), *BOTH), model, tenant.hex)
    kept = await ask(replica, model, prepared=prepared, money=money(tenant, 100), used=(300, 200))
    ended = await ask(replica, model, prepared=prepared, money=money(tenant, 50), used=(30, 20))
    await fleet.client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until_ready(replica, ready=False)
    replica.release(ended, 10, 5, 5)
    alone = await ask(replica, model, prepared=prepared, money=money(tenant, 50), used=(30, 20))
    assert alone.local
    await until_ready(replica)
    assert await fleet.load(model) == (2, 0)
    assert sum((await fleet.rated(INPUT)).values()) == 300 + 5 + 30
    assert sum((await fleet.rated("key:k:rpm")).values()) == 3
    assert await fleet.count("key:k:spend:d:2026-11-30") == 100 + 10 + 50
    replica.release(alone, 40, 10, 5)
    replica.release(kept, 70, 200, 200)
    assert sum((await fleet.rated(INPUT)).values()) == 200 + 5 + 10
    assert await fleet.count("key:k:spend:d:2026-11-30") == 70 + 10 + 40


async def test_a_clock_that_steps_back_reopens_no_bucket(fleet: Fleet) -> None:
    """As after a failover to a server whose clock is behind."""
    replica, model = await fleet.replica(), served_model()
    first = await ask(replica, model, *BOTH, used=(100, 0))
    await fleet.client.call("INCRBY", commands.OFFSET, -30_000_000)
    second = await ask(replica, model, *BOTH, used=(200, 0))
    assert await fleet.rated(INPUT) == {bucket(first): 300}
    replica.release(second, 0, 50, 0)
    replica.release(first, 0, 60, 0)
    assert await fleet.rated(INPUT) == {bucket(first): 110}


async def test_what_a_server_has_only_in_its_scripts_may_be_lost_at_any_time(fleet: Fleet) -> None:
    replica, dead, model = await fleet.replica(), await fleet.replica(), served_model()
    mine, his = [await ask(one, model, concurrency(9), *BOTH, used=(100, 10)) for one in (replica, dead)]
    await fleet.client.call("FUNCTION", "FLUSH")
    await fleet.advance(11)
    await replica.heartbeat()
    assert await replica.tick() == 1
    replica.release(mine, 0, 70, 10)
    assert await fleet.load(model) == (0, 0)
    assert await fleet.running("key:k") == 0
    assert sum((await fleet.rated(INPUT)).values()) == 170
    assert his.request_id.hex not in await fleet.outstanding(uuid4())


async def test_counters_that_say_nothing_any_more_go_and_budgets_stay(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:d:2026-11-30", 0)
    for n in range(40):
        demands = (rate(5, counter=f"key:{n}:rpm"), concurrency(5, counter=f"key:{n}:conc"), spend(100))
        replica.release(await ask(replica, model, *demands, money=money(tenant, 0)), 0)
    running = await ask(replica, model, concurrency(5, counter="key:x:conc"))
    for _ in range(20):  # of 43 keys 100 are looked at each time
        await replica.heartbeat()
        await replica.tick()
    assert len(await fleet.client.call("KEYS", "{tg}:o:*")) == 41
    for _ in range(8):
        await fleet.advance(8)
        await replica.heartbeat()
    for _ in range(20):
        await replica.tick()
    kept = {key.decode() for key in await fleet.client.call("KEYS", "{tg}:[co]:*")}
    assert kept == {"{tg}:c:global", "{tg}:o:key:x", "{tg}:c:key:k:spend:d:2026-11-30"}
    replica.release(running, None)


async def test_what_another_model_serves_is_not_counted_by_any_rate(fleet: Fleet) -> None:
    """It was granted, and its engine never answered. Also when that is said again, or when nothing is held any more."""
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 1000)
    await fleet.client.call("SET", "{tg}:c:key:k:spend:d:2026-11-30", 0)
    demands = (rate(2), concurrency(2), spend(1000), *BOTH)
    first = await ask(replica, model, *demands, money=money(tenant, 100), used=(300, 200))
    second = await ask(replica, model, *demands, money=money(tenant, 100), used=(30, 20))
    replica.release(first, commands.UNSERVED)
    await fleet.settled()
    replica._repeat_releases()
    assert await fleet.rated("key:k:rpm") == {bucket(second): 1}
    assert await fleet.rated(INPUT) == {bucket(second): 30}
    assert await fleet.running("key:k") == 1
    assert await fleet.count("key:k:spend:d:2026-11-30") == 100
    assert await fleet.outstanding(tenant) == {second.request_id.hex: 100}
    assert await fleet.load(model) == (1, 0)

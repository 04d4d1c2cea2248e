"""Valkey flushed under load: no budget and no credit is passed meanwhile, and the figures are rebuilt exactly."""

import asyncio
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from uuid import UUID

import httpx
import psycopg
import pytest

from cli import home as homes
from core import keyspace
from core.ids import IdKind, parse_id
from core.resp import RespClient
from tests.factories.credit_figures import figure_of
from tests.fault import bills
from tests.fault.real_platform import MODEL, Platform
from tests.fault.test_kills import PROMPT, by_hand, everything_posted, verify
from tests.fault.traffic import Traffic
from tests.waiting import until

CALLERS = 12
BUDGET = Decimal("0.06")  # some 126 answers of 0.0004749
CREDIT = Decimal("0.05")
NANO = 10**9
SPENT = "SELECT coalesce(sum(amount_pico), 0)::bigint FROM usage_event WHERE tenant_id = %s"
LEFT = """
    SELECT sum(b.credit - b.debit)::bigint FROM credit_lot l JOIN ledger_balance b USING (account_id)
    WHERE l.tenant_id = %s
"""
OVERRUN = """
    SELECT coalesce(sum(b.debit), 0)::bigint FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id
    WHERE a.tenant_id = %s AND a.code = 'expense.overrun'
"""


@pytest.fixture
async def platform(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Platform]:
    made = Platform(tmp_path_factory.mktemp("flush"))
    try:
        await made.start_engine()
        await made.start()
        made.offer_simulator()
        yield made
    finally:
        await asyncio.to_thread(made.stop)


def customer(operator: httpx.Client, name: str, credit: Decimal, budget: Decimal | None) -> tuple[UUID, str]:
    """Make a tenant with credit and perhaps a hard budget in total; return it and a key."""

    def made(path: str, body: dict[str, str], **headers: str) -> dict[str, str]:
        answer = operator.post(path, json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        found: dict[str, str] = answer.json()
        return found

    tenant = made("/tenants", {"name": name, "currency": "USD"})["id"]
    made(f"/tenants/{tenant}/credits", {"amount": str(credit)}, **{"idempotency-key": "first"})
    if budget is not None:
        limit = {"metric": "spend_total", "amount": str(budget), "mode": "hard", "reason": "a test"}
        operator.put(f"/tenants/{tenant}/limits", json=limit).raise_for_status()
    project = made(f"/tenants/{tenant}/projects", {"name": "main"})["id"]
    key = made(f"/tenants/{tenant}/projects/{project}/keys", {"name": "first"})
    return parse_id(IdKind.TENANT, tenant), key["secret"]


def asked(platform: Platform, statement: str, tenant_id: UUID) -> int:
    with psycopg.connect(platform.database_url) as connection:
        row = connection.execute(statement, [tenant_id]).fetchone()
    assert row is not None
    return int(row[0])


async def used_up(traffic: Traffic, code: str, after: int) -> None:
    """Wait until the callers are refused again and again, well after that many answers."""

    def refused() -> bool:
        return len(traffic.answers) > after and all(one.code == code for one in traffic.answers[-3 * CALLERS :])

    await traffic.until(refused, f"{code} after the loss", 60.0)


def whole(traffic: Traffic, least: int) -> Callable[[], bool]:
    return lambda: traffic.whole() >= least


async def test_no_budget_and_no_credit_is_passed_and_the_figures_are_rebuilt(platform: Platform) -> None:
    with platform.operator() as operator:
        budgeted, first_key = customer(operator, "budgeted", Decimal(100), BUDGET)
        prepaid, second_key = customer(operator, "prepaid", CREDIT, None)
    base = str(platform.facts["base_url"])
    one, other = (Traffic(base, key, MODEL, CALLERS, PROMPT) for key in (first_key, second_key))
    client = await RespClient.connect(f"unix://{homes.existing_home(platform.home).valkey_socket}")
    try:
        await asyncio.gather(one.start(), other.start())
        for traffic in (one, other, one):  # in the midst of it, three times
            seen = traffic.whole()
            await traffic.until(whole(traffic, seen + CALLERS), "answers", 60.0)
            assert traffic.in_flight > 0
            await client.call("FLUSHALL")
        marks = len(one.answers) + 20 * CALLERS, len(other.answers) + 20 * CALLERS
        await asyncio.gather(used_up(one, "BUDGET_EXCEEDED", marks[0]), used_up(other, "INSUFFICIENT_CREDIT", marks[1]))
        await asyncio.gather(one.stop(), other.stop())
        both = Traffic(base, first_key, MODEL, CALLERS, PROMPT, answers=[*one.answers, *other.answers])
        found = await everything_posted(platform, both)
        bills.check(both.answers, found, bills.read_engine_log(platform.engine_log), by_hand)

        spent = asked(platform, SPENT, budgeted)
        assert 0 < spent <= int(BUDGET * 10**12)
        assert asked(platform, SPENT, prepaid) == int(CREDIT * 10**12) - asked(platform, LEFT, prepaid)
        assert [asked(platform, OVERRUN, tenant) for tenant in (budgeted, prepaid)] == [0, 0]
        for tenant in (budgeted, prepaid):
            await figures_are_right(platform, client, tenant)
        counter = await client.call("GET", keyspace.counter(f"tenant:{budgeted.hex}:spend:t"))
        assert int(counter) == spent // 1000
    finally:
        await client.close()
    verified = await asyncio.to_thread(verify, platform)
    assert verified.returncode == 0, verified.stdout + verified.stderr


async def figures_are_right(platform: Platform, client: RespClient, tenant_id: UUID) -> None:
    """Nothing is outstanding, and what may be spent is what the ledger has, to the nano."""
    out = keyspace.outstanding(tenant_id)

    async def settled() -> bool:
        outstanding = (await figure_of(client, tenant_id)).outstanding
        return outstanding == 0 and not await client.call("HLEN", out)

    await until(settled, 30.0)
    assert (await figure_of(client, tenant_id)).available == asked(platform, LEFT, tenant_id) // 1000

"""Admission settles and billing posts in any order: what is outstanding is always the sum of its entries."""

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

from hypothesis import given, settings
from hypothesis import strategies as st

from billing.credit_figures import SETTLE
from core.errors import PlatformError
from scheduler.types import Grant
from tests.factories.credit_figures import figure_of
from tests.factories.scheduler import Fleet, ask, money, served_model

MOST = 9_000_000 * 10**9  # nano; a balance in Valkey is never larger

requests = st.lists(
    st.tuples(st.integers(0, MOST // 4), st.integers(0, 100), st.sampled_from(["settle, post", "post, settle"])),
    min_size=1,
    max_size=6,
)


async def play(valkey: Path, plan: list[tuple[int, int, str]], order: list[int]) -> None:
    """Acquire all, then do two steps of each request in the drawn order; compare after every step."""
    fleet = await Fleet.open(valkey)
    await fleet.client.call("FLUSHALL")  # others may have left it fenced
    try:
        replica, model, tenant, balance = await fleet.replica(), served_model(), uuid4(), MOST
        await fleet.set_credit(tenant, balance)
        steps: dict[int, list[str]] = {}
        grants: dict[int, Grant] = {}
        for n, (hold, _, sequence) in enumerate(plan):
            try:
                grants[n] = await ask(replica, model, money=money(tenant, hold))
            except PlatformError as error:
                assert error.code == "INSUFFICIENT_CREDIT"  # noqa: PT017 - one of two right endings
                continue
            steps[n] = sequence.split(", ")
        for turn, n in enumerate(n for n in order if n in grants):
            hold, percent, _ = plan[n]
            charge = hold * percent // 100
            if steps[n].pop(0) == "settle":
                replica.release(grants[n], charge)
            else:
                balance -= charge
                await post(fleet, tenant, balance, version=turn + 2, key=grants[n].request_id.hex)
            await replica.heartbeat()
            available, _, outstanding = await figure_of(fleet.client, tenant)
            assert outstanding == sum((await fleet.outstanding(tenant)).values())
            assert available == balance
            assert available >= outstanding
        assert await fleet.outstanding(tenant) == {}
        assert await fleet.load(model) == (0, 0)
    finally:
        await fleet.close()


async def post(fleet: Fleet, tenant: UUID, balance: int, *, version: int, key: str) -> None:
    keys = [f"{{tg}}:credit:{tenant.hex}", f"{{tg}}:out:{tenant.hex}"]
    await fleet.client.eval(SETTLE, keys, [balance, version, key])


@given(plan=requests, data=st.data())
@settings(max_examples=40, deadline=None)
def test_outstanding_is_the_sum_of_its_entries(
    valkey_socket: Path, plan: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations([n for n in range(len(plan)) for _ in range(2)]))
    with asyncio.Runner() as runner:
        runner.run(play(valkey_socket, plan, list(order)))

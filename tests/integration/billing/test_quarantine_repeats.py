"""An operator cannot bill a generation out of quarantine when another one with its idempotency key is billed."""

import msgspec
import pytest

from core.errors import PlatformError
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.integration.billing.test_quarantine import COST, NEGATIVE, bill

KEY = b"k" * 16


@pytest.mark.parametrize("repeated", [False, True])
async def test_one_bill_of_a_key_also_from_quarantine(world: World, repeated: bool) -> None:
    tenant, s = await world.tenant("1")
    held = msgspec.structs.replace(
        make.event(tenant, s, NEGATIVE, amount_pico=-1, quarantine="a negative part"), idempotency=KEY
    )
    events = [held, msgspec.structs.replace(make.event(tenant, s), idempotency=KEY)][: 1 + repeated]
    await write(world.spool_dir / "r1", events)
    await world.poster.step()
    before = await world.available(tenant)
    if repeated:
        with pytest.raises(PlatformError) as refused:
            await bill(world, tenant, held.id)
        assert refused.value.code == "NOT_BILLABLE"
        assert await world.available(tenant) == before
        return
    await bill(world, tenant, held.id)
    assert await world.available(tenant) == before - COST
    await write(world.spool_dir / "r2", [msgspec.structs.replace(make.event(tenant, s), idempotency=KEY)])
    await world.poster.step()
    assert await world.available(tenant) == before - COST  # the repeat that came later is free

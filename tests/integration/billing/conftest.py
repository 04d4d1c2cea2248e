"""The world of the billing tests: real Postgres and Valkey, published prices, a poster."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.db import Sessions
from core.resp import RespClient
from tests.factories import billing as make
from tests.factories.billing_world import World


@pytest.fixture
async def world(sessions: Sessions, valkey: Path, tmp_path: Path) -> AsyncIterator[World]:
    client = await RespClient.connect(f"unix://{valkey}")
    world = World(sessions, client, await make.publish_prices(sessions), tmp_path / "spool")
    yield world
    await client.close()

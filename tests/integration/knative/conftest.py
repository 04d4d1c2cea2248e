"""What tests of the controller share."""

import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from core import db
from core.resp import RespClient
from knative.wake import StateFeed
from tests.factories.controller import Stage


@pytest.fixture
async def client(valkey: Path) -> AsyncIterator[RespClient]:
    client = await RespClient.connect(f"unix://{valkey}")
    yield client
    await client.close()


@pytest.fixture
def run_folder(service_folder: Path) -> Iterator[Path]:
    folder = service_folder / secrets.token_hex(3)
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def stage(
    sessions: db.Sessions, engine: AsyncEngine, client: RespClient, run_folder: Path
) -> AsyncIterator[Stage]:
    feed = StateFeed(client, poll_s=0.03)
    await feed.start()
    stage = Stage(sessions, engine, client, feed, run_folder)
    yield stage
    await stage.end()
    await feed.close()

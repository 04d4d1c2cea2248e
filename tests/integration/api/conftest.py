"""Engines (the simulator) and a gateway before them, all in this process, over real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from core.clock import SystemClock
from engine import simulator
from engine.simulator import SIMULATOR, Options
from tests.factories.gateway import rig, served_model
from tests.factories.stack import Stack


@pytest.fixture
async def stack(service_folder: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    uds = service_folder / "gw-sim.sock"
    log = tmp_path / "sim.jsonl"
    runner = await simulator.serve(Options(log=str(log)), SystemClock(), uds=str(uds))
    try:
        async with rig({"sim": served_model("sim", f"unix:{uds}")}, clock=SystemClock()) as made:
            headers = {"Authorization": f"Bearer {made.key}"}
            async with httpx.AsyncClient(base_url=made.url, headers=headers, timeout=20) as client:
                yield Stack(made, runner.app[SIMULATOR], log, client)
    finally:
        await runner.cleanup()
        uds.unlink(missing_ok=True)

"""The whole platform as a user starts it, with an engine simulator behind an external deployment."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cli import home as homes
from cli import installation, seed
from cli.embedded import postgres as pg
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
START_PATIENCE_S = 90.0
MODEL = "sim"
PER_MILLION = {"input": "3.00", "cached_input": "0.30", "output": "15.00"}
PICO = {"input": 3_000_000, "cached_input": 300_000, "output": 15_000_000}  # per token, worked by hand


@dataclass(slots=True)
class Platform:
    """`tidegate up` on a home of its own."""

    folder: Path
    up: "subprocess.Popen[bytes] | None" = None
    engine: "subprocess.Popen[bytes] | None" = None
    facts: dict[str, Any] = field(default_factory=dict)
    engine_port: int = field(default_factory=pg.free_port)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def engine_log(self) -> Path:
        return self.folder / "engine.jsonl"

    @property
    def database_url(self) -> str:
        """The owner's: tests read the books directly, so that nothing of ours stands between."""
        home = homes.existing_home(self.home)
        secrets = homes.load_secrets(home, seed.mint_secrets)
        files = installation.postgres_files(home, secrets)
        return pg.url(files, homes.load_state(home).database_port, "owner", installation.DATABASE)

    async def start(self) -> None:
        """Start, or start again on the same home, and wait until it is ready."""
        ready_file = self.folder / "ready.json"
        ready_file.unlink(missing_ok=True)
        with (self.folder / "up.log").open("ab") as log:
            command = [sys.executable, "-m", "cli.main", "up", "--home", str(self.home), "--port", "0"]
            self.up = subprocess.Popen(  # noqa: ASYNC220 - a start takes a millisecond
                [*command, "--ready-file", str(ready_file)], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        up = self.up
        await until(lambda: ready_file.exists() or up.poll() is not None, START_PATIENCE_S)
        assert up.poll() is None, (self.folder / "up.log").read_text(encoding="utf-8")[-3000:]
        self.facts = json.loads(ready_file.read_text(encoding="utf-8"))

    def stop(self) -> None:
        for process in (self.up, self.engine):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)

    async def start_engine(self) -> None:
        ready_file = self.folder / "engine.ready"
        ready_file.unlink(missing_ok=True)
        with (self.folder / "simulator.log").open("ab") as log:
            arguments = [
                "--port",
                str(self.engine_port),
                "--log",
                str(self.engine_log),
                "--ready-file",
                str(ready_file),
            ]
            self.engine = subprocess.Popen(  # noqa: ASYNC220 - the same
                [sys.executable, "-m", "engine.simulator", *arguments], cwd=ROOT, stdout=log, stderr=log
            )
        await until(ready_file.exists)

    def pid(self, name: str) -> int:
        facts = json.loads((self.folder / "ready.json").read_text(encoding="utf-8"))
        return int(facts["pids"][name])

    def kill(self, victim: str) -> None:
        """Send SIGKILL to the engine or to a process of the platform."""
        if victim == "engine":
            assert self.engine is not None
            self.engine.kill()
            self.engine.wait(10)
        else:
            os.kill(self.pid(victim), signal.SIGKILL)

    def operator(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"{self.facts['base_url']}/api/v1/admin",
            headers={"authorization": f"Bearer {self.facts['admin_token']}"},
            timeout=30,
        )

    def offer_simulator(self) -> str:
        """Make the simulator a model with prices, and return a key of a tenant with credit."""
        with self.operator() as operator:
            model = _made(operator.post("/models", json={"name": MODEL}))
            version = _made(operator.post(f"/models/{model}/versions", json={"context_max": 8192}))
            deployment = {
                "name": MODEL,
                "version_id": version,
                "kind": "external",
                "engine": "simulator",
                "upstream_model": MODEL,
                "endpoints": ["chat", "completions", "embeddings"],
                "base_url": f"http://127.0.0.1:{self.engine_port}",
            }
            _made(operator.post("/deployments", json=deployment))
            book = str(operator.get("/price-books").json()["items"][0]["id"])
            items = [
                {"model_id": model, "tier": "standard", "meter": meter, "unit_price": price}
                for meter, price in PER_MILLION.items()
            ]
            draft = _made(operator.post(f"/price-books/{book}/versions", json={"items": items}))
            operator.post(f"/price-versions/{draft}/publish", json={}).raise_for_status()
        return str(self.facts["api_key"])


def _made(response: httpx.Response) -> str:
    assert response.status_code == 201, response.text
    return str(response.json()["id"])

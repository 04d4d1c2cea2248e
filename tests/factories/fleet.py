"""A whole platform of several gateways, each part in a process of its own: one program imports once and forks them.

`python -m tests.factories.fleet SPEC` runs the members listed in that file until its standard input ends.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec

from core.ids import IdKind, parse_id
from core.settings import Database, Settings
from tests.factories.gateway_process import METRICS_TOKEN, ROOT, SEALING, free_port
from tests.factories.tenants import PEPPER
from tests.waiting import until

START_S = 60.0
STOP_S = 30.0
ADMIN = "/api/v1/admin"


class Member(msgspec.Struct, frozen=True):
    """One process: a module with `run(settings, ready)`, and what it has in its environment."""

    name: str
    module: str
    environment: dict[str, str] = {}


class Spec(msgspec.Struct, frozen=True):
    folder: str
    members: list[Member]


@dataclass(frozen=True)
class Customer:
    """A tenant with a project and a key, by their public ids."""

    tenant_id: str
    project_id: str
    key_id: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    @property
    def tenant_hex(self) -> str:
        return parse_id(IdKind.TENANT, self.tenant_id).hex


@dataclass
class Fleet:
    """Where the gateways listen, and an operator's view of the platform. Gateways stand for each other."""

    folder: Path
    urls: list[str]
    operator_token: str
    engine_log: Path
    models: dict[str, str] = field(default_factory=dict)  # public name → id
    operator: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.operator_token}"}
        self.operator = httpx.AsyncClient(base_url=self.urls[0], headers=headers, timeout=30)

    async def create(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.operator.post(ADMIN + path, json=body, headers={"Idempotency-Key": uuid4().hex})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def add_model(self, name: str, version: dict[str, Any], **deployment: Any) -> None:
        self.models[name] = (await self.create("/models", name=name))["id"]
        made = await self.create(f"/models/{self.models[name]}/versions", **version)
        wanted = {
            "name": name,
            "version_id": made["id"],
            "engine": "simulator",
            "upstream_model": "sim",
            "endpoints": ["chat", "completions", "embeddings"],
            "default_max_tokens": 256,
        }
        await self.create("/deployments", **{**wanted, **deployment})

    async def publish(
        self, prices: dict[str, dict[str, str]], currency: str = "USD", tiers: Sequence[str] = ("standard",)
    ) -> None:
        """Publish a list of prices, by model, per million tokens, the same at each tier.

        A meter named like ``input>3000`` is of the step above so many input tokens.
        """
        book = await self.create("/price-books", name="list", currency=currency)
        items = [
            {
                "model_id": self.models[name],
                "tier": tier,
                "meter": meter.partition(">")[0],
                "above_input_tokens": int(meter.partition(">")[2] or 0),
                "unit_price": price,
            }
            for tier in tiers
            for name, meters in prices.items()
            for meter, price in meters.items()
        ]
        draft = await self.create(f"/price-books/{book['id']}/versions", items=items)
        (await self.operator.post(f"{ADMIN}/price-versions/{draft['id']}/publish", json={})).raise_for_status()

    async def limit(self, path: str, **limit: Any) -> None:
        """Set a limit of whatever stands at the path."""
        answer = await self.operator.put(f"{ADMIN}{path}/limits", json={"reason": "test", **limit})
        assert answer.status_code == 200, answer.text

    async def customer(
        self, credit: str = "10", *, limits: dict[str, Any] | None = None, currency: str = "USD", **key: Any
    ) -> Customer:
        """Make a tenant with credit and a key that every gateway knows.

        `limits` are hard ones by metric, of the key unless the metric is named like ``tenant:concurrency``.
        """
        tenant = (await self.create("/tenants", name=f"tenant {uuid4().hex}", currency=currency))["id"]
        for metric, amount in (limits or {}).items():  # before the key: whoever knows the key knows them
            level, _, name = metric.rpartition(":")
            await self.limit(f"/tenants/{tenant}", level=level or "key", metric=name, amount=amount)
        made = (await self.create(f"/tenants/{tenant}/projects", name="main"))["id"]
        created = await self.create(f"/tenants/{tenant}/projects/{made}/keys", name="first", **key)
        if credit != "0":
            await self.create(f"/tenants/{tenant}/credits", amount=credit)
        customer = Customer(tenant, made, created["api_key"]["id"], created["secret"])
        for url in self.urls:
            await self.until_status(url, customer, 200)
        return customer

    async def until_status(self, url: str, customer: Customer, status: int) -> httpx.Response:
        """Ask a gateway until the key meets this status."""
        async with httpx.AsyncClient(base_url=url, headers=customer.headers, timeout=20) as client:
            while (answer := await client.get("/v1/models")).status_code != status:
                pass
        return answer

    async def receipt(self, customer: Customer, generation_id: str) -> dict[str, Any]:
        """Ask for a receipt, as a caller does, until it is there."""
        found: dict[str, Any] = {}
        async with httpx.AsyncClient(base_url=self.urls[0], headers=customer.headers, timeout=20) as client:

            async def posted() -> bool:
                answer = await client.get(f"/v1/generations/{generation_id}")
                assert answer.status_code in {200, 202}, answer.text
                found.update(answer.json())
                return answer.status_code == 200

            await until(posted)
        return found

    async def available(self, customer: Customer) -> str:
        async with httpx.AsyncClient(base_url=self.urls[0], headers=customer.headers, timeout=20) as client:
            found: str = (await client.get("/api/v1/balance")).raise_for_status().json()["available"]
        return found


def environment(folder: Path, database: Database, valkey: Path) -> dict[str, str]:
    """What all members share."""
    return {
        "TIDEGATE_HOME": str(folder),
        "TIDEGATE_SECRETS__PEPPER": PEPPER.hex(),
        "TIDEGATE_SECRETS__SIGNING": bytes(32).hex(),
        "TIDEGATE_SECRETS__SEALING": SEALING.hex(),
        "TIDEGATE_DATABASE__URL": database.url.get_secret_value(),
        "TIDEGATE_VALKEY__URL": f"unix://{valkey}",
        "TIDEGATE_VALKEY__BROKER_URL": f"unix://{valkey}?db=1",
        "TIDEGATE_GATEWAY__METRICS_TOKEN": METRICS_TOKEN,
        "TIDEGATE_CONTROL__SOCKET": str(folder / "control.sock"),
        "TIDEGATE_GATEWAY__SPOOL_WAIT_MS": "2000",
    }


def gateway(number: int, **settings: str) -> tuple[Member, str]:
    """A gateway and its address; `settings` are of the gateway's group."""
    port = free_port()
    named = {"port": str(port), "replica_id": f"g{number}"} | settings
    values = {f"TIDEGATE_GATEWAY__{name.upper()}": value for name, value in named.items()}
    return Member(f"g{number}", "api.inference.app", values), f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running(folder: Path, shared: dict[str, str], members: list[Member]) -> Iterator[None]:
    """Start the members, wait until all serve, and end them in their order at the end."""
    spec = folder / "fleet.json"
    spec.write_bytes(msgspec.json.encode(Spec(str(folder), members)))
    command = [sys.executable, "-m", "tests.factories.fleet", str(spec)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **shared}, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + START_S
        while not all((folder / f"{member.name}.ready").exists() for member in members):
            assert process.poll() is None, _logs(folder, members)
            assert time.monotonic() < deadline, _logs(folder, members)
            time.sleep(0.02)
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(STOP_S) == 0, _logs(folder, members)


def _logs(folder: Path, members: list[Member]) -> str:
    return "\n".join(
        (folder / f"{m.name}.log").read_text()[-2000:] for m in members if (folder / f"{m.name}.log").exists()
    )


def _become(folder: Path, member: Member) -> None:
    log = os.open(folder / f"{member.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(member.environment)
    importlib.import_module(member.module).run(Settings.load(), (folder / f"{member.name}.ready").touch)


def main(spec: Spec) -> int:
    """Fork the members; end them when standard input ends or one of them does. Returns how many ended badly."""
    for member in spec.members:
        importlib.import_module(member.module)
    folder, pids = Path(spec.folder), []
    for member in spec.members:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _become(folder, member)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    sys.stdin.read()
    bad = 0
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        bad += os.waitpid(pid, 0)[1] != 0
    return bad


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))

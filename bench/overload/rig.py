"""The platform under overload: Postgres, Valkey, gateways, the controller with its adaptive caps, and modelled engines.

All are processes of their own. The engines come from the yardsticks, which know nothing of us.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from bench import machine
from bench.services import DATABASE, create_database
from billing import credits as billing_credits
from billing import ledger, price_book
from billing.types import Meter, PriceItem
from catalog import deployments, models
from catalog.types import DeploymentKind, EngineKind, NewDeployment, NewVersion
from cli.embedded import postgres as pg
from cli.embedded import valkey as vk
from core import db, sealing
from core.clock import SystemClock
from core.money import Currency
from core.settings import Settings
from core.tiers import Tier
from tenants import api_keys, credentials, plans, projects, tenants

MODEL = "sim"
TENANTS = 20  # t00 … of the yardsticks' schedules
PICO = 10**12
PRICE_PICO, CREDIT_UNITS = 2_000_000, 1_000_000
METERS = (Meter.INPUT, Meter.CACHED_INPUT, Meter.CACHE_WRITE, Meter.OUTPUT, Meter.REASONING)
START_S = 60.0


@dataclass
class Engine:
    """A modelled engine."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def figure(self, name: str, *, timeout_s: float = 1.0) -> float | None:
        """Return one of its own figures; None while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=timeout_s) as answer:  # noqa: S310 - ours
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, OSError):
            return None
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")), None)


@dataclass
class Rig:
    """What a run drives."""

    folder: Path
    yardsticks: Path
    engines: list[Engine]
    urls: list[str] = field(default_factory=list)
    gateways: list[subprocess.Popen[bytes]] = field(default_factory=list)
    keys: Path = Path()
    environment: dict[str, str] = field(default_factory=dict)
    deployment: str = ""  # hex


@contextlib.contextmanager
def engines(yardsticks: Path, folder: Path, count: int, options: Sequence[str] = ()) -> Iterator[list[Engine]]:
    started: list[Engine] = []
    try:
        for number in range(count):
            port, log = pg.free_port(), folder / f"engine{number}.jsonl"
            command: list[str | Path] = [
                sys.executable,
                yardsticks / "engine_model.py",
                "--port",
                str(port),
                "--log",
                log,
            ]
            with (folder / f"engine{number}.log").open("wb") as output:
                process = subprocess.Popen([*command, "--policy", "priority", *options], stdout=output, stderr=output)
            started.append(Engine(process, f"http://127.0.0.1:{port}", log))
        for engine in started:
            machine.wait("an engine", partial(answers, engine.url + "/health"), within_s=START_S)
        yield started
    finally:
        for engine in started:
            engine.process.kill()
            engine.process.wait()


@contextlib.contextmanager
def platform(
    yardsticks: Path,
    *,
    gateways: int = 2,
    count: int = 1,
    engine_options: Sequence[str] = (),
    settings: dict[str, str] | None = None,
) -> Iterator[Rig]:
    """Start everything; with several engines they are replicas of one deployment, which no controller has yet.

    `settings` are environment variables of all processes.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tgo-")))
        folder.chmod(0o755)
        rig = Rig(folder, yardsticks, stack.enter_context(engines(yardsticks, folder, count, engine_options)))
        rig.environment = _services(stack, folder) | (settings or {})
        rig.deployment = asyncio.run(_seed(rig, DeploymentKind.EXTERNAL if count == 1 else DeploymentKind.LOCAL))
        if count == 1:
            _start(stack, rig, "controller")
        _start(stack, rig, "poster")
        for number in range(gateways):
            port = pg.free_port()
            own = {"TIDEGATE_GATEWAY__PORT": str(port), "TIDEGATE_GATEWAY__REPLICA_ID": f"g{number}"}
            rig.gateways.append(_start(stack, rig, "gateway", f"g{number}", own))
            rig.urls.append(f"http://127.0.0.1:{port}")
        for url, process in zip(rig.urls, rig.gateways, strict=True):
            ready = partial(answers, url + "/ready")
            machine.wait(f"a gateway (logs: {folder})", ready, within_s=START_S, process=process)
        yield rig


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - our own processes
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _services(stack: contextlib.ExitStack, folder: Path) -> dict[str, str]:
    files = pg.PostgresFiles(folder / "postgres", secrets.token_hex(16), secrets.token_hex(16), folder / "pg")
    pg.initialise(files)
    port = pg.free_port()
    postgres = pg.start(files, port)
    stack.callback(machine.end, postgres)
    pg.wait_ready(files, port, lambda: postgres.poll() is None)
    create_database(files, port)
    db.migrate(pg.url(files, port, "owner", DATABASE))
    valkey = vk.start(folder / "valkey", folder / "valkey.sock")
    stack.callback(machine.end, valkey)
    vk.wait_ready(folder / "valkey", folder / "valkey.sock", lambda: valkey.poll() is None)
    return {
        "TIDEGATE_HOME": str(folder),
        **{f"TIDEGATE_SECRETS__{name}": secrets.token_hex(32) for name in ("PEPPER", "SIGNING", "SEALING")},
        "TIDEGATE_DATABASE__URL": pg.url(files, port, "app", DATABASE),
        "TIDEGATE_VALKEY__URL": f"unix://{folder}/valkey.sock",
        "TIDEGATE_VALKEY__BROKER_URL": f"unix://{folder}/valkey.sock?db=1",
        "TIDEGATE_LOG__LEVEL": "warning",
    }


def _start(
    stack: contextlib.ExitStack, rig: Rig, part: str, name: str = "", own: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with (rig.folder / f"{name or part}.log").open("wb") as log:
        command = [sys.executable, "-m", "cli.main", part]
        process = subprocess.Popen(command, env=os.environ | rig.environment | (own or {}), stdout=log, stderr=log)
    stack.callback(machine.end, process)
    return process


async def _seed(rig: Rig, kind: DeploymentKind) -> str:
    """Make the model, its prices, and a tenant with a key for each of the schedules' tenants."""
    given = {name.removeprefix("TIDEGATE_").lower(): value for name, value in rig.environment.items()}
    groups: dict[str, dict[str, str]] = {}
    for name, value in given.items():
        group, _, member = name.partition("__")
        if member:
            groups.setdefault(group, {})[member] = value
    settings = Settings.load(home=rig.folder, **groups)
    engine = db.create_engine(settings.database)
    try:
        async with db.transaction(db.create_sessions(engine)) as session:
            deployment = await _model(session, settings, rig.engines[0].url, kind)
            names = [f"t{n:02}" for n in range(TENANTS)]
            keys = {name: await _key(session, settings, name) for name in names}
    finally:
        await engine.dispose()
    rig.keys = rig.folder / "keys.json"
    rig.keys.write_text(json.dumps({**keys, "*": keys["t00"]}), encoding="utf-8")
    return deployment


async def _model(session: AsyncSession, settings: Settings, url: str, kind: DeploymentKind) -> str:
    now = SystemClock().now()
    model = await models.create_model(session, name=MODEL, now=now)
    version = await models.add_version(session, model, NewVersion(source="bench", context_max=100_000), now=now)
    new = NewDeployment(
        name=MODEL,
        version_id=version,
        kind=kind,
        engine=EngineKind.VLLM if kind is DeploymentKind.EXTERNAL else EngineKind.SIMULATOR,
        upstream_model=MODEL,
        endpoints=frozenset({"chat"}),
        base_url=url if kind is DeploymentKind.EXTERNAL else "",
        waiting_max=1000,
        max_wait_s=300,
    )
    made = await deployments.create(session, new, sealing_key=sealing.sealing_key(settings.secrets.sealing), now=now)
    book = await price_book.create_book(session, "bench", Currency.USD)
    items = [PriceItem(model, tier, meter, PRICE_PICO) for tier in Tier for meter in METERS]
    await price_book.publish(session, await price_book.create_draft(session, book, items), now=now)
    return made.hex


async def _key(session: AsyncSession, settings: Settings, name: str) -> str:
    tenant = await tenants.create(session, name=name, currency=Currency.USD)
    await ledger.open_tenant(session, tenant.id, Currency.USD)
    await billing_credits.top_up(session, tenant.id, CREDIT_UNITS * PICO, idempotency_key="bench", actor="bench")
    await plans.put_tenant(session, tenant.id, (await plans.create(session, name=f"no limits for {name}")).id)
    project = await projects.create(session, tenant.id, name="bench")
    pepper = credentials.pepper_of(settings.secrets)
    _, secret = await api_keys.create(session, tenant.id, project.id, name="key", pepper=pepper)
    return secret

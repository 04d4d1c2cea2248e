"""The control plane in this process, on a real Postgres and Valkey."""

import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.services import Services
from core import db, logging, telemetry
from core.clock import SystemClock
from core.resp import RespClient
from core.settings import Database, Settings
from tenants.credentials import Peppers
from tenants.oidc.clients import Clients
from tenants.passwords import Cost, Hasher
from tests.factories.people import SIGNING, Visitor
from tests.factories.tenants import PEPPER, operator


@pytest.fixture
def settings(database_settings: Database, valkey: Path, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": {"pepper": PEPPER.hex(), "signing": "11" * 32, "sealing": "22" * 32},
            "database": database_settings,
            "valkey": {"url": f"unix://{valkey}", "broker_url": f"unix://{valkey}?db=1"},
        }
    )


@pytest.fixture
async def services(settings: Settings, sessions: db.Sessions) -> AsyncIterator[Services]:
    client = await RespClient.connect(settings.valkey.url.get_secret_value())
    identity = Clients(settings.oidc, SystemClock())
    yield Services(
        settings=settings,
        sessions=sessions,
        valkey=client,
        clock=SystemClock(),
        peppers=Peppers(PEPPER),
        signing=SIGNING,
        sealing_key=b"\x22" * 32,
        metrics=telemetry.http_metrics(telemetry.create_registry()),
        identity=identity,
        passwords=Hasher(Cost(memory_kib=64, passes=1)),
    )
    await identity.close()
    await client.close()


@dataclass
class Client:
    """Calls the API as somebody."""

    http: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    def acting_as(self, credential: str) -> "Client":
        return Client(self.http, {"authorization": f"Bearer {credential}"})

    def visited_by(self, visitor: Visitor) -> "Client":
        return Client(self.http, dict(visitor.headers))

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {**self.headers, **options.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.call("GET", path, **options)

    async def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return await self.call("POST", path, json=json, **options)

    async def patch(self, path: str, json: Any, **options: Any) -> httpx.Response:
        return await self.call("PATCH", path, json=json, **options)


@pytest.fixture
async def anonymous(services: Services) -> AsyncIterator[Client]:
    logging.configure(services.settings.log, "test", stream=io.StringIO())  # else tracebacks are drawn in full
    transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://control") as http:
        yield Client(http)


@pytest.fixture
async def admin(anonymous: Client, sessions: db.Sessions) -> Client:
    _, token = await operator(sessions)
    return anonymous.acting_as(token)

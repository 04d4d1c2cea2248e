"""What the control plane's routes work with: built once in `api.app`, found through the request."""

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from core.clock import Clock
from core.db import Sessions
from core.resp import RespClient
from core.settings import Settings
from core.telemetry import HttpMetrics
from tenants.credentials import Peppers
from tenants.oidc.clients import Clients
from tenants.passwords import Hasher


@dataclass(frozen=True, slots=True)
class Services:
    """One per process."""

    settings: Settings
    sessions: Sessions
    valkey: RespClient
    clock: Clock
    peppers: Peppers
    signing: bytes
    sealing_key: bytes
    metrics: HttpMetrics
    identity: Clients
    passwords: Hasher = field(default_factory=Hasher)
    replays: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # one what-if at a time

    watchers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(32))  # streams of progress

    previous_signing: tuple[bytes, ...] = ()  # what these signed is still believed

    @property
    def pepper(self) -> bytes:
        """The key of all new digests."""
        return self.peppers.current


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services

"""The control plane: one FastAPI application, built from what it works with, and the process that serves it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI

from api import errors, openapi
from api.admin import (
    adjustments,
    alerts,
    api_keys,
    audit,
    billing_terms,
    deployments,
    engines,
    entitlements,
    identity_providers,
    ledger_export,
    limit_requests,
    limits,
    mail,
    models,
    operators,
    people,
    plans,
    price_impact,
    prices,
    projects,
    quarantine,
    registry_garbage,
    registry_intakes,
    registry_versions,
    reratings,
    rollouts,
    secrets,
    spools,
    tenant_life,
    tenants,
    wakes,
    what_if,
)
from api.admin import credits as tenant_credits
from api.control import alerts as my_alerts
from api.control import audit as my_audit
from api.control import (
    generations,
    health,
    invites,
    me,
    members,
    my_keys,
    my_projects,
    my_tenant,
    oidc,
    roles,
    service_accounts,
    session,
    sign_in,
    usage,
)
from api.control import limits as my_limits
from api.control import what_if as my_what_if
from api.middleware import RequestFrame
from api.server import Server
from api.services import Services
from core import db, logging, telemetry
from core.clock import SystemClock
from core.resp import RespClient
from core.sealing import sealing_key
from core.settings import Control, Settings
from tenants.credentials import peppers_of, signing_keys_of
from tenants.oidc.clients import Clients

SHUTDOWN_S = 10
BACKLOG = 512

ROUTERS: tuple[APIRouter, ...] = (
    my_tenant.router,
    my_limits.router,
    my_alerts.router,
    roles.router,
    oidc.router,
    sign_in.router,
    session.router,
    me.router,
    members.router,
    invites.router,
    service_accounts.router,
    my_projects.router,
    usage.router,
    generations.router,
    tenants.router,
    tenant_life.router,
    projects.router,
    api_keys.router,
    my_keys.router,
    secrets.router,
    limits.router,
    entitlements.router,
    alerts.router,
    limit_requests.router,
    what_if.router,
    my_what_if.router,
    plans.router,
    tenant_credits.router,
    billing_terms.router,
    ledger_export.router,
    adjustments.router,
    quarantine.router,
    spools.router,
    prices.router,
    price_impact.router,
    reratings.router,
    models.router,
    registry_versions.router,
    registry_garbage.router,
    registry_intakes.router,
    registry_intakes.parts,
    rollouts.router,
    deployments.router,
    engines.router,
    wakes.router,
    operators.router,
    people.router,
    mail.router,
    identity_providers.router,
    audit.router,
    my_audit.router,
    health.router,
)


class ControlApi(FastAPI):
    """FastAPI, describing itself in full."""

    def openapi(self) -> dict[str, Any]:
        return openapi.describe(self)


def create_app(services: Services) -> FastAPI:
    """Build the application; nothing connects."""
    app = ControlApi(
        title="Tidegate control API",
        version="1",
        summary="Tenants, keys, prices, credit, usage and deployments of a Tidegate installation.",
        description="Errors are RFC 9457 problem+json. Money is a decimal string. Lists are newest first and paged.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.services = services
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(RequestFrame, services=services)
    return app


@contextlib.asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Open what the routes work with. Neither Postgres nor Valkey need be there: their absence is a 503."""
    engine = db.create_engine(settings.database)
    valkey = await RespClient.connect(settings.valkey.url.get_secret_value(), required=False)
    clock = SystemClock()
    identity = Clients(settings.oidc, clock)
    try:
        yield Services(
            settings=settings,
            sessions=db.create_sessions(engine),
            valkey=valkey,
            clock=clock,
            peppers=peppers_of(settings.secrets),
            signing=signing_keys_of(settings.secrets)[0],
            previous_signing=signing_keys_of(settings.secrets)[1:],
            sealing_key=sealing_key(settings.secrets.sealing),
            metrics=telemetry.http_metrics(telemetry.create_registry()),
            identity=identity,
        )
    finally:
        await identity.close()
        await valkey.close()
        await engine.dispose()


def _unix_listener(path: Path) -> socket.socket:
    """Listen on a unix socket that only this user may open; a stale one is removed."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener


def _only_unix(control: Control) -> bool:
    return control.socket is not None and control.port == 0


def _listeners(control: Control) -> list[socket.socket]:
    found = []
    if control.socket is not None:
        found.append(_unix_listener(control.socket))
    if not _only_unix(control):
        listener = socket.socket(socket.AF_INET6 if ":" in control.host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((control.host, control.port))
        found.append(listener)
    for listener in found:
        listener.listen(BACKLOG)
        listener.setblocking(False)
    return found


async def serve(settings: Settings, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests end."""
    async with open_services(settings) as services:
        config = uvicorn.Config(
            create_app(services),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=True,
            proxy_headers=True,
            # behind the unix socket is our gateway alone, which says for whom it calls
            forwarded_allow_ips="*" if _only_unix(settings.control) else list(settings.gateway.trusted_proxies),
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_S,
            h11_max_incomplete_event_size=32_768,
            limit_concurrency=1024,
        )
        listeners = _listeners(settings.control)
        try:
            await Server(config, ready).serve(sockets=listeners)
        finally:
            for listener in listeners:
                listener.close()
            if settings.control.socket is not None:
                settings.control.socket.unlink(missing_ok=True)


def run(settings: Settings, ready: Callable[[], None]) -> None:
    """Be the control plane's process: blocks until told to end; `ready` is called once it serves."""
    logging.configure(settings.log, "api")
    with asyncio.Runner() as runner:
        runner.run(serve(settings, ready))

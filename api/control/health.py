"""Health, metrics and the API's own description."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from api.deps import CurrentServices
from api.guard import GuardedRoute
from api.schemas import Output
from core import health, telemetry
from core.errors import ErrorKind, PlatformError

router = APIRouter(route_class=GuardedRoute, tags=["platform"])


class HealthOut(Output):
    """`status` is ``ok`` or ``unavailable``; `dependencies` says ``ok`` or what sort of trouble, by name."""

    status: str
    dependencies: dict[str, str]


_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Figures in Prometheus' text format.", "content": {"text/plain": {}}}
}


@router.get(
    "/api/health",
    summary="Ask whether the control plane can work",
    response_model=HealthOut,
    responses={503: {"description": "A dependency is away.", "model": HealthOut}},
)
async def get_health(services: CurrentServices) -> JSONResponse:
    """Ask each dependency now."""
    checks = {
        "postgres": health.postgres_check(services.sessions),
        "valkey": health.valkey_check(services.valkey),
    }
    found = await health.ask(checks)
    answer = HealthOut(status="ok" if found.ready else "unavailable", dependencies=dict(found.dependencies))
    headers = {} if found.ready else {"retry-after": "2"}
    return JSONResponse(answer.model_dump(), 200 if found.ready else 503, headers)


@router.get("/api/health/live", summary="Ask whether the process is alive")
async def get_liveness() -> HealthOut:
    """Ask nothing else: a process whose database is away must not be restarted for it."""
    return HealthOut(status="ok", dependencies={})


@router.get("/api/openapi.json", summary="Read this description", response_class=JSONResponse)
async def get_openapi(request: Request) -> dict[str, Any]:
    description: dict[str, Any] = request.app.openapi()
    return description


@router.get("/api/metrics", summary="Read the control plane's figures", response_class=Response, responses=_METRICS)
async def get_metrics(services: CurrentServices) -> Response:
    return Response(telemetry.render(services.metrics.registry), media_type=telemetry.CONTENT_TYPE)


@router.get(
    "/api/metrics/{process}", summary="Read another process's figures", response_class=Response, responses=_METRICS
)
async def get_process_metrics(process: str, services: CurrentServices) -> Response:
    """Answer for `poster`, `controller` or `worker` of this host."""
    found = telemetry.read_snapshot(services.settings, process, lambda: services.clock.now_us() / 1_000_000)
    if found is None:
        raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, "No process of this name wrote figures lately.")
    return Response(found, media_type=telemetry.CONTENT_TYPE)

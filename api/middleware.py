"""What surrounds every request of the control plane: an id, a time limit, one log line, figures, and the last catch."""

import asyncio
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import crashed, problem
from api.services import Services
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from core.logging import bind_contextvars, clear_contextvars, get_logger

REQUEST_TIMEOUT_S = 60.0
_REQUEST_ID = re.compile(r"[0-9A-Za-z_-]{8,64}")

log = get_logger(__name__)


def _request_id(scope: Scope) -> str:
    """Keep the id that the gateway in front gave, when it is one; else make one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{new_uuid().hex}"


def _route(scope: Scope) -> str:
    path: str = getattr(scope.get("route"), "path_format", "unmatched")
    return path


class RequestFrame:
    """The outermost ASGI layer of ours."""

    def __init__(self, app: ASGIApp, services: Services, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.app = app
        self.services = services
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        clear_contextvars()
        bind_contextvars(request_id=request_id)
        started = self.services.clock.monotonic()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            async with asyncio.timeout(self.timeout_s):
                await self.app(scope, receive, send_named)
        except Exception as error:
            if status:
                raise  # the answer has begun: the connection is cut, which is all that can still be said
            await self._failed(Request(scope), error)(scope, receive, send_named)
        finally:
            self._count(scope, status, self.services.clock.monotonic() - started)

    def _failed(self, request: Request, error: Exception) -> ASGIApp:
        if isinstance(error, TimeoutError):
            log.warning("request.timed_out")
            late = PlatformError("REQUEST_TIMEOUT", ErrorKind.TIMEOUT, f"No answer within {self.timeout_s:.0f} s.")
            return problem(request, late)
        return crashed(request, error)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route, method = _route(scope), scope["method"]
        self.services.metrics.requests.labels(route, method, str(status)).inc()
        self.services.metrics.seconds.labels(route, method).observe(seconds)
        log.info("request.served", route=route, method=method, status=status, ms=round(seconds * 1000, 1))

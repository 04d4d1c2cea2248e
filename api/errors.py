"""Errors become answers here, once: kind → status for both planes, and the control plane's problem+json (RFC 9457)."""

import re
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from api.status import STATUS_OF_KIND
from core.errors import ErrorKind, PlatformError
from core.logging import get_logger
from core.resp import RespError, RespUnavailable

PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_S = 2  # when a dependency is away
VALIDATION_ERRORS_MAX = 20
_NEEDS_RETRY_AFTER = frozenset({429, 503})

log = get_logger(__name__)


def status_of(error: PlatformError) -> int:
    """Return the HTTP status of an error."""
    return STATUS_OF_KIND[error.kind]


def request_id_of(request: Request) -> str:
    found: str = request.scope.get("state", {}).get("request_id", "")
    return found


def problem(request: Request, error: PlatformError, *, status: int | None = None) -> Response:
    """Render an error as problem+json; `fields` of the error become members of it."""
    status = status or status_of(error)
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status in _NEEDS_RETRY_AFTER:
        retry_after_s = RETRY_AFTER_S
    content: dict[str, Any] = {
        **error.fields,
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": error.code,
        "detail": error.message,
        "request_id": request_id_of(request),
    }
    if error.param is not None:
        content["param"] = error.param
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, retry_after_s))}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(content), status, headers, PROBLEM_JSON)


def unavailable(dependency: str) -> PlatformError:
    """A part that the control plane needs is away; the caller is told when to come back."""
    return PlatformError(
        "SERVICE_UNAVAILABLE",
        ErrorKind.UNAVAILABLE,
        f"{dependency} does not answer now. Nothing was changed; try again shortly.",
        retry_after_s=RETRY_AFTER_S,
    )


# Instead of pydantic's words, which speak of Python and of patterns.
_RULES = {
    "string_pattern_mismatch": "This text has a form that is not allowed here; /api/openapi.json describes the field",
    "model_attributes_type": "Send a JSON object, with the header Content-Type: application/json",
    "extra_forbidden": "There is no such member here",
}


def _validation(error: RequestValidationError) -> PlatformError:
    """Name the places and the rules, never the values: one of them may be a secret."""
    errors = [
        {"loc": _place(item["loc"]), "type": item["type"], "message": _said(item)}
        for item in error.errors()[:VALIDATION_ERRORS_MAX]
    ]
    first = errors[0] if errors else {"loc": "body", "message": "is not valid"}
    said = [one["message"] for one in errors if one["loc"] == first["loc"]] or [first["message"]]
    return PlatformError(
        "INVALID_REQUEST",
        ErrorKind.INVALID,
        f"{first['loc']}: {'; or '.join(dict.fromkeys(said))}.",
        param=first["loc"],
        fields={"errors": errors},
    )


def _place(loc: tuple[str | int, ...]) -> str:
    """The path to the member; which branch of a union was tried is pydantic's own affair."""
    return ".".join(str(part) for part in loc if not str(part).startswith("constrained-"))[:200]


# How our schemas write amounts, prices and percentages.
_DECIMAL_PATTERN = re.compile(r"\^\[0-9\]\{1,[0-9]+\}\(\\\.\[0-9\]\{1,([0-9]+)\}\)\?\$\Z")
_HTTP_CODES = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "BODY_TOO_LARGE", 415: "UNSUPPORTED_MEDIA_TYPE"}


def _said(item: dict[str, Any]) -> str:
    pattern = item.get("ctx", {}).get("pattern", "")
    if item["type"] == "string_pattern_mismatch" and (decimal := _DECIMAL_PATTERN.match(pattern)):
        return f'Give a decimal as text, not negative, like "12.50", with at most {decimal[1]} decimals'
    return _RULES.get(item["type"], str(item["msg"]))


def _platform(request: Request, error: Exception) -> Response:
    assert isinstance(error, PlatformError)  # noqa: S101 - registered for this type
    return problem(request, error)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this type
    return problem(request, _validation(error), status=422)


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type
    code = _HTTP_CODES.get(error.status_code, "INVALID_REQUEST")
    kind = ErrorKind.NOT_FOUND if error.status_code == 404 else ErrorKind.INVALID
    answer = problem(request, PlatformError(code, kind, _sentence(error.status_code)), status=error.status_code)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


def _sentence(status: int) -> str:
    if status == 404:
        return "There is nothing at this path. /api/openapi.json lists what there is."
    return f"{HTTPStatus(status).phrase}: {HTTPStatus(status).description or 'see the status'}."


def _postgres_away(request: Request, error: Exception) -> Response:
    log.warning("postgres.failed", error=type(error).__name__)
    return problem(request, unavailable("The database"))


def _database(request: Request, error: Exception) -> Response:
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return _postgres_away(request, error)
    return crashed(request, error)


def _valkey_away(request: Request, error: Exception) -> Response:
    log.warning("valkey.failed", error=type(error).__name__)
    return problem(request, unavailable("The cache"))


def crashed(request: Request, error: Exception) -> Response:
    """Answer what nobody foresaw: the caller gets the request id, the log the rest."""
    log.error("request.crashed", exc_info=error)
    message = "Something went wrong on our side. Quote the request id when you ask about it."
    return problem(request, PlatformError("INTERNAL_ERROR", ErrorKind.INTERNAL, message))


def install(app: FastAPI) -> None:
    """Register the one renderer for everything that a route can raise."""
    app.add_exception_handler(PlatformError, _platform)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(DBAPIError, _database)
    for away in (OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(away, _postgres_away)
    for failed in (RedisError, RespUnavailable, RespError):
        app.add_exception_handler(failed, _valkey_away)

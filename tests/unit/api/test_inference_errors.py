"""The error table: every terminal state a caller can meet, its status, type, and Retry-After."""

import msgspec
import pytest

from api.inference import errors
from api.status import STATUS_OF_KIND
from core.errors import ErrorKind, PlatformError

TABLE = [
    ("INVALID_REQUEST", ErrorKind.INVALID, 400, "invalid_request_error"),
    ("INVALID_API_KEY", ErrorKind.UNAUTHENTICATED, 401, "authentication_error"),
    ("KEY_REVOKED", ErrorKind.UNAUTHENTICATED, 401, "authentication_error"),
    ("KEY_EXPIRED", ErrorKind.UNAUTHENTICATED, 401, "authentication_error"),
    ("KEY_UNREADABLE", ErrorKind.UNAVAILABLE, 503, "server_error"),
    ("METRICS_TOKEN_MISSING", ErrorKind.UNAUTHENTICATED, 401, "authentication_error"),
    ("INSUFFICIENT_CREDIT", ErrorKind.PAYMENT, 402, "insufficient_quota"),
    ("FORBIDDEN", ErrorKind.FORBIDDEN, 403, "permission_error"),
    ("MODEL_NOT_ALLOWED", ErrorKind.FORBIDDEN, 403, "permission_error"),
    ("SCOPE_MISSING", ErrorKind.FORBIDDEN, 403, "permission_error"),
    ("TENANT_SUSPENDED", ErrorKind.FORBIDDEN, 403, "permission_error"),
    ("TIER_NOT_PRICED", ErrorKind.FORBIDDEN, 403, "permission_error"),
    ("MODEL_NOT_FOUND", ErrorKind.NOT_FOUND, 404, "not_found_error"),
    ("METHOD_NOT_ALLOWED", ErrorKind.INVALID, 405, "invalid_request_error"),
    ("REQUEST_TIMEOUT", ErrorKind.INVALID, 408, "invalid_request_error"),
    ("CONFLICT", ErrorKind.CONFLICT, 409, "invalid_request_error"),
    ("BODY_TOO_LARGE", ErrorKind.TOO_LARGE, 413, "invalid_request_error"),
    ("UNSUPPORTED_MEDIA_TYPE", ErrorKind.INVALID, 415, "invalid_request_error"),
    ("EXPECTATION_FAILED", ErrorKind.INVALID, 417, "invalid_request_error"),
    ("RATE_LIMITED", ErrorKind.RATE_LIMITED, 429, "rate_limit_error"),
    ("CONCURRENCY_LIMITED", ErrorKind.RATE_LIMITED, 429, "rate_limit_error"),
    ("HEADERS_TOO_LARGE", ErrorKind.INVALID, 431, "invalid_request_error"),
    ("INTERNAL", ErrorKind.INTERNAL, 500, "server_error"),
    ("NOT_IMPLEMENTED", ErrorKind.INVALID, 501, "server_error"),
    ("UPSTREAM_ERROR", ErrorKind.UPSTREAM, 502, "server_error"),
    ("MODEL_BUSY", ErrorKind.UNAVAILABLE, 503, "server_error"),
    ("MODEL_LOADING", ErrorKind.UNAVAILABLE, 503, "server_error"),
    ("PREEMPTED", ErrorKind.UNAVAILABLE, 503, "server_error"),
    ("SERVICE_UNAVAILABLE", ErrorKind.UNAVAILABLE, 503, "server_error"),
    ("UPSTREAM_TIMEOUT", ErrorKind.TIMEOUT, 504, "server_error"),
    ("HTTP_VERSION_NOT_SUPPORTED", ErrorKind.INVALID, 505, "server_error"),
]


@pytest.mark.parametrize(("code", "kind", "status", "type_"), TABLE)
@pytest.mark.parametrize("retry", [None, 0, 7])
def test_table(code: str, kind: ErrorKind, status: int, type_: str, retry: int | None) -> None:
    error = PlatformError(code, kind, "What is wrong.", param="model", retry_after_s=retry)
    assert errors.status_of(error) == status
    body = msgspec.json.decode(errors.body_of(error))
    assert body == {"error": {"message": "What is wrong.", "type": type_, "code": code, "param": "model"}}
    assert errors.sse_event_of(error) == b"data: " + errors.body_of(error) + b"\n\n"
    if retry == 7:
        assert errors.retry_after_of(error) == 7
    elif status in {429, 503} or retry == 0:
        assert errors.retry_after_of(error) == 1
    else:
        assert errors.retry_after_of(error) == 0


def test_every_kind_has_a_status() -> None:
    assert set(STATUS_OF_KIND) == set(ErrorKind)


def test_further_facts_are_kept_apart() -> None:
    body = msgspec.json.decode(errors.body_of(errors.model_loading(12, 3)))
    assert body["error"]["details"] == {"estimate_s": 12}
    assert errors.retry_after_of(errors.model_loading(0, 3)) == 1

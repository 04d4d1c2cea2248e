"""The one error table of the data plane: every refusal and failure a caller can meet, in OpenAI's error shape."""

from http import HTTPStatus
from types import MappingProxyType

import msgspec

from api.status import STATUS_OF_KIND
from core.errors import ErrorKind, PlatformError

# Codes that speak of HTTP itself and have a status of their own.
STATUS_OF_CODE = MappingProxyType(
    {
        "IDEMPOTENCY_REPLAYED": 200,
        "METHOD_NOT_ALLOWED": 405,
        "REQUEST_TIMEOUT": 408,
        "UNSUPPORTED_MEDIA_TYPE": 415,
        "EXPECTATION_FAILED": 417,
        "HEADERS_TOO_LARGE": 431,
        "NOT_IMPLEMENTED": 501,
        "HTTP_VERSION_NOT_SUPPORTED": 505,
    }
)

TYPE_OF_STATUS = MappingProxyType(
    {
        401: "authentication_error",
        402: "insufficient_quota",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
)

REASONS = MappingProxyType({status.value: status.phrase for status in HTTPStatus})


class ErrorDetail(msgspec.Struct, frozen=True):
    """`fields` of a `PlatformError` are facts for programs, beside what OpenAI's clients read."""

    message: str
    type: str
    code: str
    param: str | None
    details: dict[str, object] | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_encode = msgspec.json.Encoder(enc_hook=str).encode


def status_of(error: PlatformError) -> int:
    """The one HTTP status of this error."""
    return STATUS_OF_CODE.get(error.code) or STATUS_OF_KIND[error.kind]


def body_of(error: PlatformError) -> bytes:
    """JSON: ``{"error": {"message", "type", "code", "param"[, "details"]}}``."""
    status = status_of(error)
    kind = TYPE_OF_STATUS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    details = error.fields or msgspec.UNSET
    return _encode(ErrorBody(ErrorDetail(error.message, kind, error.code, error.param, details)))


def retry_after_of(error: PlatformError) -> int:
    """Whole seconds, at least 1, on every 429 and 503; 0 where another try makes no sense."""
    if error.retry_after_s is not None:
        return max(1, error.retry_after_s)
    return 1 if status_of(error) in {429, 503} else 0


def sse_event_of(error: PlatformError) -> bytes:
    """The final event of a stream that already began."""
    return b"data: " + body_of(error) + b"\n\n"


# ---- the errors that the request path itself raises


def invalid(message: str, param: str | None = None) -> PlatformError:
    return PlatformError("INVALID_REQUEST", ErrorKind.INVALID, message, param=param)


def body_too_large(limit: int) -> PlatformError:
    return PlatformError("BODY_TOO_LARGE", ErrorKind.TOO_LARGE, f"The request body is larger than {limit} bytes.")


def not_found(path: str) -> PlatformError:
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is nothing at {path[:200]!r}.")


def headers_too_large() -> PlatformError:
    return PlatformError(
        "HEADERS_TOO_LARGE", ErrorKind.INVALID, "The request head may have 32 KB and 100 headers at most."
    )


def request_timeout() -> PlatformError:
    return PlatformError("REQUEST_TIMEOUT", ErrorKind.INVALID, "The request did not arrive in time.")


def unsupported_encoding() -> PlatformError:
    return PlatformError("UNSUPPORTED_MEDIA_TYPE", ErrorKind.INVALID, "Send the body without Content-Encoding.")


def method_not_allowed(allowed: str) -> PlatformError:
    return PlatformError("METHOD_NOT_ALLOWED", ErrorKind.INVALID, f"This path takes {allowed}.")


def upstream_error(message: str = "The engine did not answer properly. Nothing was charged.") -> PlatformError:
    return PlatformError("UPSTREAM_ERROR", ErrorKind.UPSTREAM, message)


def upstream_timeout() -> PlatformError:
    return PlatformError(
        "UPSTREAM_TIMEOUT", ErrorKind.TIMEOUT, "The engine did not answer in time. Nothing was charged."
    )


def model_busy(retry_after_s: int = 1) -> PlatformError:
    return PlatformError(
        "MODEL_BUSY",
        ErrorKind.UNAVAILABLE,
        "The model has no free place now. Try again shortly.",
        retry_after_s=retry_after_s,
    )


def model_loading(eta_s: int, waited_s: float = 0.0) -> PlatformError:
    eta_s = max(1, eta_s)
    waited = f" and was not ready within {waited_s:.0f} s" if waited_s >= 1 else ""
    return PlatformError(
        "MODEL_LOADING",
        ErrorKind.UNAVAILABLE,
        f"The model is being loaded{waited}. Try again in about {eta_s} s.",
        retry_after_s=eta_s,
        fields={"estimate_s": eta_s},
    )


def unavailable(message: str, retry_after_s: int = 1) -> PlatformError:
    return PlatformError("SERVICE_UNAVAILABLE", ErrorKind.UNAVAILABLE, message, retry_after_s=retry_after_s)


def internal() -> PlatformError:
    return PlatformError("INTERNAL", ErrorKind.INTERNAL, "Something went wrong on our side. Nothing was charged.")

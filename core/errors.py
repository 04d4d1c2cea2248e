"""The one error type. The domain names a kind and a code; only `api.errors` knows HTTP."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class ErrorKind(StrEnum):
    """What sort of trouble it is; `api.errors` maps each to one HTTP status."""

    INVALID = "invalid"  # 400: the request cannot be understood or is not allowed by the schema
    UNAUTHENTICATED = "unauthenticated"  # 401
    PAYMENT = "payment"  # 402: money
    FORBIDDEN = "forbidden"  # 403: policy
    NOT_FOUND = "not_found"  # 404
    CONFLICT = "conflict"  # 409
    GONE = "gone"  # 410: it was there and is no longer kept
    TOO_LARGE = "too_large"  # 413
    RATE_LIMITED = "rate_limited"  # 429: the caller's own limit
    INTERNAL = "internal"  # 500
    UPSTREAM = "upstream"  # 502: the engine failed
    UNAVAILABLE = "unavailable"  # 503: ours
    TIMEOUT = "timeout"  # 504: the engine did not answer in time


class PlatformError(Exception):
    """Raised anywhere, rendered once at the edge.

    Args:
        code: stable string that programs switch on, e.g. ``MODEL_LOADING``.
        kind: the sort of trouble.
        message: one or two sentences for a person: what is wrong and what to do.
        param: the request field at fault, when there is one.
        retry_after_s: whole seconds after which another try makes sense.
        fields: further facts for programs; no secret, no prompt.
    """

    def __init__(
        self,
        code: str,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.fields = dict(fields or {})

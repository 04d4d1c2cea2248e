"""Error kind → HTTP status, once for both planes."""

from collections.abc import Mapping
from types import MappingProxyType

from core.errors import ErrorKind

STATUS_OF_KIND: Mapping[ErrorKind, int] = MappingProxyType(
    {
        ErrorKind.INVALID: 400,
        ErrorKind.UNAUTHENTICATED: 401,
        ErrorKind.PAYMENT: 402,
        ErrorKind.FORBIDDEN: 403,
        ErrorKind.NOT_FOUND: 404,
        ErrorKind.CONFLICT: 409,
        ErrorKind.GONE: 410,
        ErrorKind.TOO_LARGE: 413,
        ErrorKind.RATE_LIMITED: 429,
        ErrorKind.INTERNAL: 500,
        ErrorKind.UPSTREAM: 502,
        ErrorKind.UNAVAILABLE: 503,
        ErrorKind.TIMEOUT: 504,
    }
)

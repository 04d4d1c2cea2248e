"""Errors of the registry."""

from core.errors import ErrorKind, PlatformError


def invalid(message: str, param: str | None = None, code: str = "INVALID_WEIGHTS") -> PlatformError:
    return PlatformError(code, ErrorKind.INVALID, message, param=param)


def conflict(code: str, message: str, **fields: object) -> PlatformError:
    return PlatformError(code, ErrorKind.CONFLICT, message, fields=fields)


def missing(message: str) -> PlatformError:
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, message)

"""This package's errors."""

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind


def not_found(kind: IdKind) -> PlatformError:
    """Nothing of that id, or somebody else's: the two look alike."""
    noun = kind.name.lower().replace("_", " ")
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no such {noun}.")


def name_taken(noun: str) -> PlatformError:
    return PlatformError(
        "NAME_TAKEN", ErrorKind.CONFLICT, f"Another {noun} has this name already. Choose another.", param="name"
    )


def invalid(param: str, message: str) -> PlatformError:
    return PlatformError("INVALID_REQUEST", ErrorKind.INVALID, message, param=param)

"""A model version's `source` as a file on this host."""

from pathlib import Path, PurePosixPath

from core.errors import ErrorKind, PlatformError
from core.wheels import package_folder


def locate(source: str) -> Path:
    """Return the file of ``wheel:<package>/<file>`` or ``file:/absolute/path``.

    Raises:
        PlatformError: kind invalid, when it is of another shape or not there.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "wheel":
        package, _, inside = rest.partition("/")
        path = _in_wheel(package, inside)
    elif scheme == "file" and rest.startswith("/"):
        path = Path(rest)
    else:
        raise _invalid("A local deployment needs a source of the shape wheel:<package>/<file> or file:/path.")
    if not path.is_file():
        raise _invalid(f"There is no file {path.name!r} where {scheme}: leads to.")
    return path


def _in_wheel(package: str, inside: str) -> Path:
    parts = PurePosixPath(inside).parts
    if not package.isidentifier() or not parts or ".." in parts or parts[0] == "/":
        raise _invalid("A wheel: source names a package and a file inside it.")
    try:
        return package_folder(package).joinpath(*parts)
    except RuntimeError as problem:
        raise _invalid(str(problem)) from None


def _invalid(message: str) -> PlatformError:
    return PlatformError("INVALID_SOURCE", ErrorKind.INVALID, message, param="source")

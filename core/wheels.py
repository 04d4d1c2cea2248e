"""Where the wheels that carry programs and models lie. They are found, never imported: importing them does things."""

from importlib.util import find_spec
from pathlib import Path


def package_folder(name: str) -> Path:
    """Return the folder of an installed package.

    Raises:
        RuntimeError: it is not installed.
    """
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"The package {name} is not installed. Run `make setup`.")
    return Path(spec.origin).parent

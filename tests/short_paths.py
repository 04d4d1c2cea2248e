"""Folders whose path is short enough for a unix socket, so that homes in them keep their sockets inside."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Take the place of pytest's own, whose names may be long."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as folder:
        yield Path(folder)

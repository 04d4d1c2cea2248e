"""Folders whose path is short enough for a unix socket, so that homes in them keep their sockets inside."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY, DISK = "/dev/shm", "/tmp"  # noqa: S108 - mkdtemp makes folders of our own in them
MEMORY_LEAST_BYTES = 3 * 2**30


def memory_folder() -> str:
    """Where files are kept in memory, if it has room for two workers' servers: databases are made far faster there."""
    if os.path.ismount(MEMORY) and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_LEAST_BYTES:
        return MEMORY
    return DISK


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Take the place of pytest's own, whose names may be long."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as folder:
        yield Path(folder)

"""`tidegate ledger verify`: the books of a running installation, of a stopped home, or of a database given by URL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from billing import verify as books
from cli import home as homes
from cli import installation, screen
from cli.embedded import postgres as pg
from core.settings import Settings


def verify(home_path: Path) -> int:
    """Add up every account again; return 0 when the books agree, 1 after naming the first row that is wrong."""
    with database(home_path) as settings:
        return books.main(settings, screen.say)


@contextmanager
def database(home_path: Path) -> Iterator[Settings]:
    """Yield settings whose database answers: a stopped home's server is started for the time being."""
    if "TIDEGATE_DATABASE__URL" in os.environ:
        yield Settings.load(home=home_path)
        return
    home = homes.existing_home(home_path)
    try:
        lock = homes.lock(home)
    except homes.HomeError:
        yield installation.find_settings(home_path)  # it runs
        return
    secrets = homes.load_secrets(home, installation.refuse)
    files = installation.postgres_files(home, secrets)
    port = pg.free_port()
    pg.clear_leftovers(files)
    process = pg.start(files, port)
    try:
        pg.wait_ready(files, port, lambda: process.poll() is None)
        state = msgspec.structs.replace(homes.load_state(home), database_port=port)
        yield installation.settings(home, secrets, state)
    finally:
        pg.stop(process)
        os.close(lock)

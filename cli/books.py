"""`tidegate ledger`: the books of a running installation, of a stopped home, or of a database given by URL."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import BinaryIO

import msgspec

from billing import books_export
from billing import verify as books
from billing.books_text import BooksFormat
from cli import home as homes
from cli import installation, schema, screen
from cli.embedded import postgres as pg
from core.db import create_engine, create_sessions
from core.settings import Settings


def verify(home_path: Path) -> int:
    """Add up every account again; return 0 when the books agree, 1 after naming the first row that is wrong."""
    with database(home_path) as settings:
        return books.main(settings, screen.say)


def export(home_path: Path, kind: BooksFormat, until: date | None, output: Path | None) -> int:
    """Write the whole ledger as text to `output`, which appears when it is whole, or to standard output."""
    with database(home_path) as settings:
        if output is None:
            asyncio.run(_export(settings, kind, until, sys.stdout.buffer))
            sys.stdout.buffer.flush()
            return 0
        partial = output.with_name(f".{output.name}.part")
        try:
            with partial.open("wb") as file:
                asyncio.run(_export(settings, kind, until, file))
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    return 0


async def _export(settings: Settings, kind: BooksFormat, until: date | None, out: BinaryIO) -> None:
    engine = create_engine(settings.database)
    try:
        async for piece in books_export.export(create_sessions(engine), kind, until):
            out.write(piece)
    finally:
        await engine.dispose()


@contextmanager
def database(home_path: Path) -> Iterator[Settings]:
    """Yield settings whose database answers and has this version's schema.

    Raises:
        HomeError: there is no home, or its database has the schema of another version.
    """
    with database_as_it_is(home_path) as settings:
        owner = settings.database.owner_url
        if owner is not None and not schema.is_current(owner.get_secret_value()):
            raise homes.HomeError(
                "The database has the schema of another version of Tidegate. Start the home once with this version "
                "(`tidegate up`), or run `tidegate migrate` on a database of your own."
            )
        yield settings


@contextmanager
def database_as_it_is(home_path: Path) -> Iterator[Settings]:
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

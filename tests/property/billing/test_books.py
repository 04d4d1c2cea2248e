"""Any order of what can happen to money gives what a plain model gives.

A failing run prints its steps and the seed that makes it again.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from billing import price_book, reconcile, rerating_post, seals, verify
from billing.books_text import BooksFormat
from core import db
from core.money import Currency
from core.settings import Database
from tests.factories.auditors import has_hledger
from tests.integration.billing.test_foreign_auditors import objections, written
from tests.property.billing.machine import Books
from tests.property.billing.machine_prices import PAGE, BooksMachine
from tests.property.billing.model_prices import Usage, priced

EXAMPLES, STEPS = 6, 26  # of a run that everybody waits for


@contextmanager
def opened(database: Database, valkey: Path) -> Iterator[Books]:
    with asyncio.Runner() as runner:

        async def open_books() -> Books:
            sessions = db.create_sessions(db.create_engine(database))
            async with db.transaction(sessions) as session:
                book = await price_book.create_book(session, "list", Currency.USD)
            return Books(runner, sessions, book, valkey)

        books = runner.run(open_books())
        try:
            yield books
        finally:
            runner.run(books.sessions.kw["bind"].dispose())


def drive(database: Database, valkey: Path, *, examples: int, steps: int, number: int, folder: Path) -> None:
    """Run the machine on one database, then prove all that it left there."""
    with opened(database, valkey) as books, patch.object(rerating_post, "EVENTS_MAX", PAGE):
        machine = seed(number)(type("Machine", (BooksMachine,), {"books": books}))
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    phases=(Phase.generate,),  # a failing run is short enough to read; shrinking takes minutes
                ),
            )
            books.runner.run(prove(books, folder))
        except BaseException as error:
            error.add_note(f"seed {number}")
            raise


async def prove(books: Books, folder: Path) -> None:
    """Sealed, the books are right for our own check, and for both foreign programs (hledger where it is installed)."""
    async with db.transaction(books.sessions) as session:
        await seals.seal(session)
    assert (await reconcile.books(books.sessions))[1] == []
    async with db.transaction(books.sessions) as session:
        assert await verify.verify(session) is None
    for kind in [BooksFormat.BEANCOUNT, *([BooksFormat.HLEDGER] if has_hledger() else ())]:
        assert objections(await written(books.sessions, kind, folder)) == ""


def test_the_books_follow_the_model(database_settings: Database, valkey: Path, tmp_path: Path) -> None:
    drive(database_settings, valkey, examples=EXAMPLES, steps=STEPS, number=random.randrange(10**9), folder=tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(8))
def test_the_books_follow_the_model_for_long(
    number: int, database_settings: Database, valkey: Path, tmp_path: Path
) -> None:
    drive(database_settings, valkey, examples=60, steps=60, number=number, folder=tmp_path)


def test_the_model_knows_prices() -> None:
    """The study's example W1: 12,345 prompt tokens, 10,240 of them cached, 1,000 out, at 2.00, 0.20 and 6.00."""
    w1 = priced({(0, "input"): 2_000_000, (0, "cached_input"): 200_000, (0, "output"): 6_000_000})
    assert w1.cost(Usage(2105, 10240, 0, 360, 640), "completed") == (12_258_000_000, 0)
    assert w1.cost(Usage(2105, 10240, 0, 0, 0), "client_abort") == (0, 0)
    w10 = priced({(0, "input"): 50_000, (0, "output"): 200_000, (0, "min_charge"): 100_000_000})  # at least 0.0001
    assert w10.cost(Usage(3, 0, 0, 1, 0), "completed") == (350_000, 99_650_000)

"""Any order of what can happen to money gives what a plain model gives.

A failing run prints its steps and the seed that makes it again.
"""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from billing import price_book
from core import db
from core.money import Currency
from core.settings import Database
from tests.property.billing.machine import Books, BooksMachine
from tests.property.billing.model import Prices, Usage


def drive(database: Database, valkey: Path, *, examples: int, steps: int, number: int) -> None:
    """Run the machine on one database."""
    with asyncio.Runner() as runner:

        async def open_books() -> Books:
            sessions = db.create_sessions(db.create_engine(database))
            async with db.transaction(sessions) as session:
                book = await price_book.create_book(session, "list", Currency.USD)
            return Books(runner, sessions, book, valkey)

        books = runner.run(open_books())
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
        except BaseException as error:
            error.add_note(f"seed {number}")
            raise
        finally:
            runner.run(books.sessions.kw["bind"].dispose())


def test_the_books_follow_the_model(database_settings: Database, valkey: Path) -> None:
    drive(database_settings, valkey, examples=8, steps=25, number=random.randrange(10**9))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(8))
def test_the_books_follow_the_model_for_long(number: int, database_settings: Database, valkey: Path) -> None:
    drive(database_settings, valkey, examples=150, steps=60, number=number)


def test_the_model_knows_prices() -> None:
    """The study's example W1: 12,345 prompt tokens, 10,240 of them cached, 1,000 out, at 2.00, 0.20 and 6.00."""
    w1 = Prices(2_000_000, 200_000, 6_000_000, 0, 0, 10**9, 1)
    assert w1.cost(Usage(2105, 10240, 0, 360, 640), "completed") == (12_258_000_000, 0)
    assert w1.cost(Usage(2105, 10240, 0, 0, 0), "client_abort") == (0, 0)
    w10 = Prices(50_000, 50_000, 200_000, 0, 100_000_000, 10**9, 1)  # a minimum of 0.0001
    assert w10.cost(Usage(3, 0, 0, 1, 0), "completed") == (350_000, 99_650_000)

"""Every kind of account the ledger has, before hledger and beancount: an error of one pico in any of them is found."""

import re
from pathlib import Path

import pytest

from billing.books_text import BooksFormat
from core.db import Sessions
from tests.factories import whole_books
from tests.integration.billing.test_foreign_auditors import altered, objections, trial_balance, written

POSTING = re.compile(r"^    ((?:Assets|Liabilities|Income|Expenses|Equity):[A-Za-z-]+)", re.MULTILINE)
KINDS = {
    *("Assets:Cash", "Assets:Unbilled", "Liabilities:Credit-paid", "Liabilities:Credit-promo"),
    *("Liabilities:Credit-goodwill", "Income:Usage", "Income:Min-charge", "Expenses:Overrun"),
    *("Equity:Contra", "Income:Breakage"),
}

SOME = ("Equity:Contra", "Income:Min-charge", "Liabilities:Credit-promo")  # beancount takes seconds for each


@pytest.mark.parametrize("kind", list(BooksFormat))
async def test_one_pico_in_any_kind_of_account_is_found(sessions: Sessions, tmp_path: Path, kind: BooksFormat) -> None:
    await whole_books.write(sessions)
    right = await written(sessions, kind, tmp_path)
    assert objections(right) == ""
    assert sum((await trial_balance(sessions)).values()) == 0
    found = set(POSTING.findall(right.read_text("utf-8")))
    assert found == KINDS
    for account in sorted(found if kind is BooksFormat.HLEDGER else SOME):
        wrong = altered(right, rf"\n    {account}:\S*  ")
        assert "balance" in objections(wrong).lower(), account

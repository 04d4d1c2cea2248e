"""The text for hledger and beancount, letter by letter."""

import re
from datetime import date
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.books_text import BooksAccount, BooksFormat, BooksText, Entry, Leg, account_name

CASH = BooksAccount(UUID(int=1), "asset.cash", "USD", None, date(2026, 1, 30))
LOT = BooksAccount(UUID(int=2), "liability.credit_paid", "USD", UUID(int=9), date(2026, 1, 30), lot=True)
REVENUE = BooksAccount(UUID(int=3), "revenue.usage", "USD", UUID(int=9), date(2026, 2, 1))
TENANT = "0" * 31 + "9"
LOT_NAME = f"Liabilities:Credit-paid:USD:Ten-{TENANT}:Acc-{'0' * 31}2"
REVENUE_NAME = f"Income:Usage:USD:Ten-{TENANT}"
ENTRIES = (
    Entry(UUID(int=7), "top_up", UUID(int=9), date(2026, 1, 31), "ref; 1", (Leg(CASH.id, LOT.id, "USD", 10**12),)),
    Entry(UUID(int=8), "usage", UUID(int=9), date(2026, 3, 1), "", (Leg(LOT.id, REVENUE.id, "USD", 1),)),
)


def rendered(kind: BooksFormat) -> str:
    text = BooksText(kind, [REVENUE, LOT, CASH])
    lines = [*text.head()]
    for entry in ENTRIES:
        lines += text.entry(entry)
    return "".join([*lines, *text.end()])


def test_hledger_reads_this() -> None:
    assert (
        rendered(BooksFormat.HLEDGER)
        == f"""\
; Tidegate: the whole ledger. Check it: hledger -f FILE check --strict
decimal-mark .
commodity 1000.000000000000 USD
commodity 1000.000000000000 CNY
account Assets:Cash:USD  ; asset.cash acc_{"0" * 31}1
account {REVENUE_NAME}  ; revenue.usage acc_{"0" * 31}3
account {LOT_NAME}  ; liability.credit_paid acc_{"0" * 31}2

2026-01-31 * (txn_{"0" * 31}7) top_up ten_{TENANT} ref, 1
    Assets:Cash:USD  1.000000000000 USD
    {LOT_NAME}  -1.000000000000 USD

2026-01-31 * balances at the end of the day
    Assets:Cash:USD  0.000000000000 USD = 1.000000000000 USD
    {LOT_NAME}  0.000000000000 USD = -1.000000000000 USD

2026-02-28 * balances at the end of the day
    Assets:Cash:USD  0.000000000000 USD = 1.000000000000 USD
    {REVENUE_NAME}  0.000000000000 USD = 0.000000000000 USD
    {LOT_NAME}  0.000000000000 USD = -1.000000000000 USD

2026-03-01 * (txn_{"0" * 31}8) usage ten_{TENANT}
    {LOT_NAME}  0.000000000001 USD
    {REVENUE_NAME}  -0.000000000001 USD

2026-03-01 * balances at the end of the day
    Assets:Cash:USD  0.000000000000 USD = 1.000000000000 USD
    {REVENUE_NAME}  0.000000000000 USD = -0.000000000001 USD
    {LOT_NAME}  0.000000000000 USD = -0.999999999999 USD

; the end: 2 entries, 3 accounts
"""
    )


def test_beancount_reads_this() -> None:
    text = rendered(BooksFormat.BEANCOUNT)
    assert f"\n2026-02-01 open {REVENUE_NAME} USD ; revenue.usage acc_{'0' * 31}3\n" in text
    assert f'\n2026-01-31 * "top_up ten_{TENANT}" "ref, 1" ^txn_{"0" * 31}7\n    Assets:Cash:USD  1.0000' in text
    # beancount looks at the beginning of a day, so the end of February is 1 March
    assert f"\n2026-03-01 balance {LOT_NAME}  -1.000000000000 ~ 0 USD\n" in text
    assert text.index("2026-03-01 balance") < text.index('2026-03-01 * "usage')
    assert f"\n2026-03-02 balance {LOT_NAME}  -0.999999999999 ~ 0 USD\n" in text


codes = st.from_regex(r"(asset|liability|revenue|expense|equity|contra|a|_)([.][a-z_]+)*", fullmatch=True)
accounts = st.builds(
    BooksAccount,
    st.uuids(),
    codes,
    st.sampled_from(["USD", "CNY"]),
    st.none() | st.sampled_from([UUID(int=1), UUID(int=2)]),
    st.just(date(2026, 1, 1)),
)
# beancount's own rule, and no two spaces for hledger
VALID = re.compile(r"(Assets|Liabilities|Equity|Income|Expenses)(:[A-Z0-9][A-Za-z0-9-]*)+")


@given(accounts, accounts)
def test_names_are_valid_and_tell_accounts_apart(one: BooksAccount, other: BooksAccount) -> None:
    assert VALID.fullmatch(account_name(one)), account_name(one)
    same = (one.code, one.currency, one.tenant_id) == (other.code, other.currency, other.tenant_id)
    assert (account_name(one) == account_name(other)) == same


def test_two_accounts_of_one_name_are_refused() -> None:
    twin = BooksAccount(UUID(int=5), "asset.cash", "USD", None, date(2026, 1, 30))
    with pytest.raises(ValueError, match="the same name"):
        BooksText(BooksFormat.HLEDGER, [CASH, twin])

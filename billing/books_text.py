"""The ledger as text that hledger and beancount read: two foreign programs that add our books up. Pure.

The same rows give the same bytes. Debits are positive. Every amount has twelve decimals, which matters twice: hledger
balances at the precision of its commodity directive, and beancount infers its tolerance from the coarsest amount.
After the last entry of every month, and at the end, each account's balance is asserted.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from enum import StrEnum
from uuid import UUID

import msgspec

from core.ids import IdKind, format_id
from core.money import Currency, format_pico

# What both programs call the kinds of accounts; a code of another kind, e.g. `contra.promo_used`, goes below equity.
_ROOTS = {
    "asset": "Assets",
    "liability": "Liabilities",
    "equity": "Equity",
    "revenue": "Income",
    "expense": "Expenses",
}
_ONE_DAY = timedelta(days=1)


class BooksFormat(StrEnum):
    """Whose language."""

    HLEDGER = "hledger"
    BEANCOUNT = "beancount"


class BooksAccount(msgspec.Struct, frozen=True):
    """An account of the ledger. `lot`: a tenant may have several of its code."""

    id: UUID
    code: str
    currency: str
    tenant_id: UUID | None
    opened_on: date
    lot: bool = False


class Leg(msgspec.Struct, frozen=True):
    """One transfer of an entry; `amount` in pico."""

    debit: UUID
    credit: UUID
    currency: str
    amount: int


class Entry(msgspec.Struct, frozen=True):
    """One transaction of the ledger, dated by the day (UTC) it was booked."""

    id: UUID
    kind: str
    tenant_id: UUID
    booked_on: date
    note: str = ""
    legs: tuple[Leg, ...] = ()


def account_name(account: BooksAccount) -> str:
    """Return the account's name, valid in both languages; two accounts never have the same one.

    E.g. `liability.credit_paid` of a lot is ``Liabilities:Credit-paid:USD:Ten-0190…:Acc-0190…``.
    """
    kind, *rest = account.code.split(".")
    parts = [_ROOTS[kind], *map(_word, rest)] if kind in _ROOTS else ["Equity", *map(_word, (kind, *rest))]
    parts.append(account.currency)
    if account.tenant_id is not None:
        parts.append(_word(format_id(IdKind.TENANT, account.tenant_id)))
    if account.lot:
        parts.append(_word(format_id(IdKind.ACCOUNT, account.id)))
    return ":".join(parts)


def _word(code: str) -> str:
    """Return a part of a code as beancount wants it: a capital or digit first, then letters, digits and hyphens."""
    name = code.replace("_", "-")
    return f"0{name}" if name.startswith("-") else name[:1].upper() + name[1:]


def _plain(text: str) -> str:
    """Return the text without what could end a line, a string or a description in either language."""
    return "".join(c if c.isprintable() else " " for c in text).replace(";", ",").replace("\\", "/").replace('"', "'")


class BooksText:
    """Renders accounts, then entries in the order of their days, then the end; knows each account's running balance."""

    def __init__(self, kind: BooksFormat, accounts: Sequence[BooksAccount]) -> None:
        named = sorted(((account_name(account), account) for account in accounts), key=lambda pair: pair[0])
        self._kind = kind
        self._accounts = [account for _, account in named]
        self._names = {account.id: name for name, account in named}
        if len({name for name, _ in named}) != len(named):
            raise ValueError("two accounts have the same name")
        self._balances = {account.id: 0 for account in self._accounts}
        self._day = date.min
        self._entries = 0

    def head(self) -> Iterator[str]:
        """Yield what stands before the entries: currencies and accounts."""
        if self._kind is BooksFormat.HLEDGER:
            yield "; Tidegate: the whole ledger. Check it: hledger -f FILE check --strict\ndecimal-mark .\n"
            yield from (f"commodity 1000.000000000000 {currency}\n" for currency in Currency)
            for account in self._accounts:
                yield f"account {self._names[account.id]}  ; {account.code} {format_id(IdKind.ACCOUNT, account.id)}\n"
            return
        yield '; Tidegate: the whole ledger. Check it: bean-check FILE\noption "title" "Tidegate"\n'
        yield from (f"1970-01-01 commodity {currency}\n" for currency in Currency)
        for account in self._accounts:
            name, identity = self._names[account.id], format_id(IdKind.ACCOUNT, account.id)
            yield f"{account.opened_on} open {name} {account.currency} ; {account.code} {identity}\n"

    def entry(self, entry: Entry) -> Iterator[str]:
        """Yield the entry, after the balances of the months that ended before it."""
        yield from self._months_before(entry.booked_on)
        self._day = entry.booked_on
        self._entries += 1
        yield self._title(entry)
        for leg in entry.legs:
            self._balances[leg.debit] += leg.amount
            self._balances[leg.credit] -= leg.amount
            yield f"    {self._names[leg.debit]}  {format_pico(leg.amount)} {leg.currency}\n"
            yield f"    {self._names[leg.credit]}  {format_pico(-leg.amount)} {leg.currency}\n"

    def end(self, balances: Mapping[UUID, int] | None = None) -> Iterator[str]:
        """Yield the closing balances and the last line, without which the text was cut off.

        Args:
            balances: debits less credits of each account as the ledger's own balances say, so that a program that adds
                the entries up checks them; None takes the sums of the entries.
        """
        last = max([self._day, *(account.opened_on for account in self._accounts)])
        if self._accounts:
            yield from self._months_before(last)
            yield from self._assertions(last, self._balances if balances is None else balances)
        yield f"\n; the end: {self._entries} entries, {len(self._accounts)} accounts\n"

    def _title(self, entry: Entry) -> str:
        tenant, note = format_id(IdKind.TENANT, entry.tenant_id), _plain(entry.note)
        code = format_id(IdKind.TRANSACTION, entry.id)
        if self._kind is BooksFormat.HLEDGER:
            return f"\n{entry.booked_on} * ({code}) {entry.kind} {tenant}{' ' if note else ''}{note}\n"
        return f'\n{entry.booked_on} * "{entry.kind} {tenant}" "{note}" ^{code}\n'

    def _months_before(self, day: date) -> Iterator[str]:
        """Yield the balances at the end of each month from the last entry's to the one before `day`."""
        if self._day == date.min:
            return
        after = _next_month(self._day)
        while after <= day:
            yield from self._assertions(after - _ONE_DAY, self._balances)
            after = _next_month(after)

    def _assertions(self, day: date, balances: Mapping[UUID, int]) -> Iterator[str]:
        """Yield that each account opened by then has its balance at the end of the day."""
        opened = [account for account in self._accounts if account.opened_on <= day]
        hledger = self._kind is BooksFormat.HLEDGER
        yield f"\n{day} * balances at the end of the day\n" if hledger else "\n"
        for account in opened:
            name, amount = self._names[account.id], format_pico(balances[account.id])
            if hledger:
                yield f"    {name}  {format_pico(0)} {account.currency} = {amount} {account.currency}\n"
            else:  # beancount looks at the beginning of the day
                yield f"{day + _ONE_DAY} balance {name}  {amount} ~ 0 {account.currency}\n"


def _next_month(day: date) -> date:
    """Return the first day of the month after."""
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1)

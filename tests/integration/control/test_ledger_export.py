"""The whole ledger as operators fetch it."""

from core import db
from tenants.types import OperatorRole
from tests.factories import billing as make
from tests.factories.people import operator_person
from tests.integration.control.conftest import Client

EXPORT = "/api/v1/admin/ledger/export"


async def test_the_ledger_is_streamed_in_either_language(admin: Client, sessions: db.Sessions) -> None:
    await make.tenant(sessions, "12.5")
    for kind, first in (("hledger", "    Assets:Cash:USD  12.500000000000 USD"), ("beancount", 'option "title"')):
        answer = await admin.get(EXPORT, params={"format": kind})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert first in answer.text
        assert answer.text.endswith("; the end: 1 entries, 5 accounts\n")
    nothing = await admin.get(EXPORT, params={"format": "hledger", "until": "2026-01-01"})
    assert nothing.text.endswith("; the end: 0 entries, 0 accounts\n")


async def test_a_language_or_day_that_is_none_is_refused(admin: Client) -> None:
    for params in ({}, {"format": "ledger"}, {"format": "hledger", "until": "yesterday"}):
        assert (await admin.get(EXPORT, params=params)).status_code in {400, 422}


async def test_support_does_not_read_the_whole_ledger(anonymous: Client, sessions: db.Sessions) -> None:
    for role, status in ((OperatorRole.SUPPORT, 403), (OperatorRole.FINANCE, 200)):
        visitor = anonymous.visited_by(await operator_person(sessions, role))
        assert (await visitor.get(EXPORT, params={"format": "hledger"})).status_code == status

"""The page of mails that no server is set for: for operators with every right, and nothing on it does anything."""

import dataclasses

import pytest

from api.admin.mail import page_of
from api.app import create_app
from api.services import Services
from core import db, mail
from core.mail import KeptMail, Letter
from core.settings import Mail
from tenants.types import OperatorRole
from tests.factories.browser import Open, browser, mails
from tests.factories.people import operator_person

PATH = "/api/v1/admin/mail"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>{0}\"'&"


async def test_what_a_mail_says_is_text_on_a_page_that_may_do_nothing(at_desk: Services, visit: Open) -> None:
    async with db.transaction(at_desk.sessions) as session:
        letter = Letter("ada@example.com", f"To {EVIL}", f"Open http://127.0.0.1:8080/reset#tgr_x\n{EVIL}")
        await mail.post(session, letter, sealing_key=at_desk.sealing_key)
    await mails(at_desk, "ada@example.com")
    here = visit()
    here.headers = dict((await operator_person(at_desk.sessions, OperatorRole.ADMIN)).headers)
    answer = await here.get(PATH)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in answer.text
    assert "<img" not in answer.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    assert "http://127.0.0.1:8080/reset#tgr_x" in answer.text
    assert "<a " not in answer.text
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "sandbox", "frame-ancestors 'none'"} <= set(policy)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("role", [OperatorRole.FINANCE, OperatorRole.SUPPORT])
async def test_links_are_for_operators_with_every_right(at_desk: Services, visit: Open, role: OperatorRole) -> None:
    """Who could read the mail of an administrator could become one."""
    here = visit()
    here.headers = dict((await operator_person(at_desk.sessions, role)).headers)
    assert (await here.get(PATH)).status_code == 403
    here.headers = {}
    assert (await here.get(PATH)).status_code == 401


async def test_with_a_mail_server_there_is_no_page(at_desk: Services) -> None:
    settings = at_desk.settings.model_copy(update={"mail": Mail(host="mx.example.com")})
    here = browser(create_app(dataclasses.replace(at_desk, settings=settings)))
    here.headers = dict((await operator_person(at_desk.sessions, OperatorRole.ADMIN)).headers)
    async with here.http:
        assert (await here.get(PATH)).status_code == 404


def test_an_empty_page_says_so() -> None:
    assert "There are none." in page_of([])
    assert "There are none." not in page_of([KeptMail("Mon", "a@b", "s", "t")])

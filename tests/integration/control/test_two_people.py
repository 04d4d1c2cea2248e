"""Two people for money above the limit: the ways in which one person might pass for two, over the API."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from api import guard
from api.guard import COOKIE, CSRF_HEADER
from api.services import Services
from billing import verify
from core import db, mail
from core.mail import Letter
from tenants import sessions, vouching
from tenants.types import OperatorRole, SignInMethod
from tests.factories.browser import mails, token_in
from tests.factories.people import DAY_S, SIGNING, Visitor, operator_person
from tests.factories.tenants import PEPPER
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
EVE = "eve@example.com"


@dataclass
class Desk:
    """A tenant, and two people who run the platform, confirmed both."""

    anonymous: Client
    ann: Client
    bob: Client
    tenant: str
    visitors: tuple[Visitor, Visitor]
    services: Services

    async def ask(self, who: Client, amount: str = "1000.000000000001") -> dict[str, Any]:
        """Ask for goodwill; the adjustment, or the problem."""
        key = {"idempotency-key": datetime.now(UTC).isoformat()}
        answer = await who.post(
            f"{self.tenant}/grants", {"amount": amount, "source": "goodwill", "note": "why"}, headers=key
        )
        body: dict[str, Any] = answer.json()
        assert answer.status_code == {"pending": 202, "posted": 201}.get(body.get("state", ""), 403), answer.text
        return body

    async def decide(self, who: Client, asked: dict[str, Any], verb: str = "approve") -> str:
        """What becomes of it, or the code of the refusal."""
        answer = await who.post(f"{self.tenant}/adjustments/{asked['id']}/{verb}")
        assert answer.status_code in {200, 403}, answer.text
        return str(answer.json().get("state") or answer.json()["code"])

    async def program(self, who: Client) -> Client:
        """A program's operator and its token, both made by that person."""
        made = (await who.post(f"{ADMIN}/operators", {"name": datetime.now(UTC).isoformat()})).json()
        return self.anonymous.acting_as((await who.post(f"{ADMIN}/operators/{made['id']}/tokens", {})).json()["token"])

    async def invited(self, by: Client, email: str = EVE) -> tuple[Client, str]:
        """Somebody who took an invite to the operators; and the path of the operator."""
        invite = {"email": email, "role": "admin"}
        assert (await by.post(f"{ADMIN}/operator-invites", invite)).status_code == 201
        token = token_in((await mails(self.services, email))[0])
        body = {"token": token, "name": "Eve", "password": "lantern-quay-moss-ebbing"}
        answer = await self.anonymous.post("/api/v1/auth/invites/accept", body)
        assert answer.status_code == 200, answer.text
        cookie = f"{COOKIE}={answer.cookies[COOKIE]}"
        self.anonymous.http.cookies.clear()
        (operator, *_) = (await self.ann.get(f"{ADMIN}/operators")).json()["items"]
        assert operator["confirmed_at"] is None
        client = Client(self.anonymous.http, {"cookie": cookie, CSRF_HEADER: answer.json()["csrf_token"]})
        return client, f"{ADMIN}/operators/{operator['id']}"


@pytest.fixture
async def desk(anonymous: Client, services: Services) -> Desk:
    ann = await operator_person(services.sessions, OperatorRole.ADMIN)
    bob = await operator_person(services.sessions, OperatorRole.ADMIN)
    as_ann, as_bob = anonymous.visited_by(ann), anonymous.visited_by(bob)
    made = await as_ann.post(f"{ADMIN}/tenants", {"name": "Acme", "currency": "USD"})
    return Desk(anonymous, as_ann, as_bob, f"{ADMIN}/tenants/{made.json()['id']}", (ann, bob), services)


def _code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def test_two_people_decide_and_one_with_two_operators_does_not(desk: Desk) -> None:
    program = await desk.program(desk.ann)
    for asker in (desk.ann, program):
        asked = await desk.ask(asker)
        assert asked["state"] == "pending"
        for decider in (desk.ann, program, await desk.program(desk.ann)):
            for verb in ("approve", "decline"):
                assert await desk.decide(decider, asked, verb) == "SECOND_PERSON_NEEDED"
        assert await desk.decide(await desk.program(desk.bob), asked) == "SIGN_IN_TO_DECIDE"
        assert await desk.decide(desk.bob, asked) == "posted"


async def test_one_limit_for_all_operators_and_tokens_of_a_person(desk: Desk) -> None:
    """600.00 oneself and 400.00 by a program are all that Ann may give in a day; Bob has an allowance of his own."""
    assert (await desk.ask(desk.ann, "600"))["state"] == "posted"
    assert (await desk.ask(await desk.program(desk.ann), "400"))["state"] == "posted"
    for asker in (desk.ann, await desk.program(desk.ann), await desk.program(await desk.program(desk.ann))):
        assert (await desk.ask(asker, "0.000000000001"))["state"] == "pending"
    assert (await desk.ask(desk.bob, "1000"))["state"] == "posted"


async def test_a_token_is_its_issuer_s_whoever_made_the_operator(desk: Desk) -> None:
    made = (await desk.bob.post(f"{ADMIN}/operators", {"name": "bob's"})).json()
    token = (await desk.ann.post(f"{ADMIN}/operators/{made['id']}/tokens", {})).json()["token"]
    asked = await desk.ask(desk.anonymous.acting_as(token))
    await desk.bob.post(f"{ADMIN}/operators/{made['id']}/disable")
    assert await desk.decide(desk.ann, asked) == "SECOND_PERSON_NEEDED"
    assert await desk.decide(desk.bob, asked) == "posted"


async def test_nobody_issues_a_token_of_another_person_s_operator(desk: Desk) -> None:
    """Else Ann could ask as Bob, and decide as Ann."""
    of = {one["person_id"]: one["id"] for one in (await desk.ann.get(f"{ADMIN}/operators")).json()["items"]}
    ann, bob = (of[f"per_{visitor.person.id.hex}"] for visitor in desk.visitors)
    for who in (desk.ann, await desk.program(desk.ann)):
        assert _code(await who.post(f"{ADMIN}/operators/{bob}/tokens", {})) == (403, "NOT_YOUR_OPERATOR")
        assert (await who.post(f"{ADMIN}/operators/{ann}/tokens", {})).status_code == 201


async def test_a_person_of_one_s_own_invention_is_not_another(desk: Desk) -> None:
    asked = await desk.ask(desk.ann)
    eve, of_eve = await desk.invited(desk.ann)
    assert await desk.decide(eve, asked) == "SECOND_PERSON_NEEDED"
    assert await desk.decide(eve, await desk.ask(desk.bob)) == "OPERATOR_NOT_CONFIRMED"
    hers = await desk.ask(eve)
    assert await desk.decide(desk.ann, hers) == "SECOND_PERSON_NEEDED"
    for by in (desk.ann, eve):
        assert (await by.post(f"{of_eve}/confirm")).status_code == 403
    assert _code(await (await desk.program(desk.bob)).post(f"{of_eve}/confirm")) == (403, "SIGN_IN_TO_DECIDE")
    mallory, of_mallory = await desk.invited(eve, "mallory@example.com")  # by the invented one
    assert _code(await desk.ann.post(f"{of_mallory}/confirm")) == (403, "SECOND_PERSON_NEEDED")
    assert await desk.decide(desk.ann, await desk.ask(mallory)) == "SECOND_PERSON_NEEDED"

    confirmed = await desk.bob.post(f"{of_eve}/confirm")
    assert (confirmed.status_code, confirmed.json()["confirmed_at"] is not None) == (200, True)
    assert await desk.decide(eve, hers) == "SECOND_PERSON_NEEDED"  # it was hers when she asked, and stays Ann's too
    assert await desk.decide(desk.ann, hers) == "SECOND_PERSON_NEEDED"
    assert await desk.decide(eve, asked) == "posted"


async def test_whoever_sends_an_invite_again_vouches_for_who_takes_it(desk: Desk) -> None:
    """Else Ann could take Bob's invite by its new link, and confirm herself as another."""
    made = (await desk.bob.post(f"{ADMIN}/operator-invites", {"email": EVE, "role": "admin"})).json()
    assert (await desk.ann.post(f"{ADMIN}/operator-invites/{made['id']}/resend")).status_code == 200
    body = {"name": "Eve", "password": "lantern-quay-moss-ebbing"}
    token = token_in((await mails(desk.services, EVE))[0])
    assert (await desk.anonymous.post("/api/v1/auth/invites/accept", {"token": token, **body})).status_code == 200
    desk.anonymous.http.cookies.clear()
    (eve, *_) = (await desk.ann.get(f"{ADMIN}/operators")).json()["items"]
    assert _code(await desk.ann.post(f"{ADMIN}/operators/{eve['id']}/confirm")) == (403, "SECOND_PERSON_NEEDED")


async def test_a_provider_s_session_proves_nobody(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An admin sets providers up, and could have one vouch for Bob, at each refresh too."""

    async def vouched(*_: object) -> bool:
        return True

    monkeypatch.setattr(guard, "_still_vouched_for", vouched)
    async with db.transaction(desk.services.sessions) as session:
        token = await sessions.open_session(
            session,
            desk.visitors[1].person.id,
            pepper=PEPPER,
            now=datetime.now(UTC),
            absolute_s=DAY_S,
            method=SignInMethod.OIDC,
        )
    headers = {"cookie": f"{COOKIE}={token}", CSRF_HEADER: sessions.csrf_token(SIGNING, token)}
    as_bob = Client(desk.anonymous.http, headers)
    assert await desk.decide(as_bob, await desk.ask(desk.ann)) == "SIGN_IN_TO_DECIDE"
    assert (await desk.ask(as_bob))["code"] == "NOBODY_ANSWERS"
    eve, of_eve = await desk.invited(as_bob)
    assert (await desk.ask(eve))["code"] == "NOBODY_ANSWERS"
    assert (await desk.ann.post(f"{of_eve}/confirm")).json()["confirmed_at"] is None  # the first who says so vouches
    assert await desk.decide(desk.ann, await desk.ask(eve)) == "SECOND_PERSON_NEEDED"
    assert (await desk.bob.post(f"{of_eve}/confirm")).json()["confirmed_at"] is not None


async def test_what_nobody_answers_for_has_one_allowance_and_no_more(desk: Desk, admin: Client) -> None:
    """Tokens from before issuers were kept: 1,000.00 all of them together, nothing above."""
    assert (await desk.ask(admin, "1000"))["state"] == "posted"
    assert (await desk.ask(await desk.program(admin), "0.000000000001"))["code"] == "NOBODY_ANSWERS"
    assert (await desk.ask(desk.ann, "1000"))["state"] == "posted"


async def test_the_host_confirms_the_second_person_of_an_installation(desk: Desk) -> None:
    asked = await desk.ask(desk.ann)
    eve, _ = await desk.invited(desk.bob)
    assert await desk.decide(eve, asked) == "OPERATOR_NOT_CONFIRMED"
    async with db.transaction(desk.services.sessions) as session:
        await vouching.confirm_on_host(session, EVE, now=datetime.now(UTC))
    assert await desk.decide(eve, asked) == "posted"
    ((action, details),) = [
        (one["action"], one["details"])
        for one in (await desk.ann.get(f"{ADMIN}/audit", params={"action": "adjustment."})).json()["items"]
    ]
    assert (action, details["state"]) == ("adjustment.approve", "posted")


async def test_nobody_reads_the_mails_of_another_operator(desk: Desk) -> None:
    """A link of Bob's would let Ann in as Bob. What she sends herself she may hand on."""
    bob = desk.visitors[1].person.email
    assert (await desk.ann.post(f"{ADMIN}/operator-invites", {"email": EVE, "role": "admin"})).status_code == 201
    async with db.transaction(desk.services.sessions) as session:
        letter = Letter(bob, "Your new password", "Open http://control/reset#tgr_ofBob")
        await mail.post(session, letter, sealing_key=desk.services.sealing_key)
    (invite,), (reset,) = await mails(desk.services, EVE), await mails(desk.services, bob)
    for who, seen in (
        (desk.ann, (True, False)),
        (desk.bob, (False, True)),
        (await desk.program(desk.ann), (True, False)),
    ):
        page = (await who.get(f"{ADMIN}/mail")).text
        assert (token_in(invite) in page, token_in(reset) in page) == seen


async def test_top_ups_grants_and_what_may_be_owed_have_one_limit(desk: Desk) -> None:
    """400.00 paid, 300.00 given and 300.00 more to owe are all that Ann does alone in a day."""

    async def paid(amount: str, key: str) -> httpx.Response:
        return await desk.ann.post(f"{desk.tenant}/credits", {"amount": amount}, headers={"idempotency-key": key})

    async def owe(limit: str) -> httpx.Response:
        body = {"billing_mode": "postpaid", "credit_limit": limit, "note": "contract"}
        return await desk.ann.call("PUT", f"{desk.tenant}/billing-terms", json=body)

    assert ((await paid("400", "p1")).status_code, (await desk.ask(desk.ann, "300"))["state"]) == (201, "posted")
    more = await paid("300.000000000001", "p2")
    assert (more.status_code, more.json()["transaction_id"], more.json()["balance"]) == (202, None, "700.000000000000")
    assert await desk.decide(desk.ann, {"id": more.json()["adjustment_id"]}) == "SECOND_PERSON_NEEDED"
    assert await desk.decide(desk.bob, {"id": more.json()["adjustment_id"]}) == "posted"
    assert (await paid("300.000000000001", "p2")).json()["state"] in {"pending", "posted"}  # asked once
    balance = (await desk.ann.get(f"{desk.tenant}/balance")).json()["available"]
    assert balance == "1000.000000000001"

    assert (await owe("300")).status_code == 200
    assert (await owe("200")).status_code == 200  # less is no question of money
    raised = [await owe("200.000000000001") for _ in range(2)]
    assert [answer.status_code for answer in raised] == [202, 202]
    (waiting,) = {answer.json()["waiting"] for answer in raised}
    assert raised[0].json()["credit_limit"] == "200.000000000000"
    assert await desk.decide(desk.bob, {"id": waiting}) == "posted"
    terms = (await desk.ann.get(f"{desk.tenant}/billing-terms")).json()["items"]
    assert [one["credit_limit"] for one in terms[:2]] == ["200.000000000001", "200.000000000000"]
    async with db.transaction(desk.services.sessions) as session:
        assert await verify.verify(session) is None


async def test_a_tenant_is_not_opened_with_a_limit_above_it(desk: Desk) -> None:
    new = {"name": "Later", "currency": "USD", "billing_mode": "postpaid"}
    refused = await desk.ann.post(f"{ADMIN}/tenants", {**new, "credit_limit": "1000.000000000001"})
    assert _code(refused) == (403, "SECOND_PERSON_NEEDED")
    made = await desk.ann.post(f"{ADMIN}/tenants", {**new, "credit_limit": "900"})
    path = f"{ADMIN}/tenants/{made.json()['id']}/billing-terms"
    more = {"billing_mode": "postpaid", "credit_limit": "1000.000000000001", "note": "contract"}
    assert (await desk.ann.call("PUT", path, json=more)).status_code == 202
    assert (await desk.bob.call("PUT", path, json=more | {"note": "by Bob"})).status_code == 200

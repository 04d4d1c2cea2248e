"""Signing in with a password: the cookie, wrong ones, the lock, sessions, and a lost password."""

import asyncio
import dataclasses

import pytest
from fastapi import FastAPI
from sqlalchemy import text

from api.app import create_app
from api.services import Services
from api.visit import DEVICE_COOKIE
from core import db
from core.clock import ManualClock
from core.errors import PlatformError
from core.settings import Settings
from core.tasks import TaskContext
from tenants import people_tasks, person_status, throttle
from tenants.passwords import Cost, Hasher
from tenants.types import Person
from tests.factories.browser import ADA, AUTH, OTHER, PASSWORD, Browser, Open, browser, local_person, mails, token_in


async def _code(answer_status: int, code: str, browser: Browser, password: str, email: str = ADA) -> None:
    answer = await browser.sign_in(email, password)
    assert (answer.status_code, answer.json()["code"]) == (answer_status, code), answer.text


async def test_a_password_opens_a_session_in_a_cookie_that_no_script_reads(ada: Person, visit: Open) -> None:
    here = visit()
    answer = await here.sign_in("  Ada@Example.com ", PASSWORD)
    assert answer.status_code == 200
    assert answer.json()["state"] == "signed_in"
    device, cookie = answer.headers.get_list("set-cookie")
    assert set(device.split("; ")[1:]) == {"HttpOnly", "Max-Age=15552000", "Path=/", "SameSite=lax"}
    name, _, rest = cookie.partition("=")
    token, *attributes = rest.split("; ")
    assert name == "tidegate_session"
    assert set(attributes) == {"HttpOnly", "Max-Age=604800", "Path=/", "SameSite=lax"}
    assert token not in answer.text
    me = (await here.get("/api/v1/session")).json()
    assert (me["person"]["email"], me["person"]["has_password"], me["tenants"], me["operator"]) == (ADA, True, [], None)
    assert me["csrf_token"] == answer.json()["csrf_token"]
    assert token not in str(me)


@pytest.mark.parametrize("public_url", ["https://maas.example.com", "https://maas.example.com/"])
async def test_over_https_the_cookie_goes_nowhere_else(
    at_desk: Services, settings: Settings, ada: Person, public_url: str
) -> None:
    control = settings.control.model_copy(update={"public_url": public_url})
    secure = create_app(dataclasses.replace(at_desk, settings=settings.model_copy(update={"control": control})))
    here = browser(secure)
    here.headers = {"origin": "https://maas.example.com", "host": "maas.example.com"}
    async with here.http:
        cookies = (await here.sign_in(ADA, PASSWORD)).headers.get_list("set-cookie")
    assert ["Secure" in cookie.split("; ") for cookie in cookies] == [True, True]


async def test_a_wrong_password_and_an_unknown_address_look_alike(ada: Person, visit: Open) -> None:
    answers = [await visit().sign_in(email, OTHER) for email in (ADA, "nobody@example.com")]
    bodies = [{k: v for k, v in answer.json().items() if k != "request_id"} for answer in answers]
    assert bodies[0] == bodies[1]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert all("set-cookie" not in answer.headers for answer in answers)


async def test_an_unknown_address_costs_a_hash_too(
    visit: Open, ada: Person, at_desk: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bool] = []
    compare = Hasher._compare

    def counted(self: Hasher, stored: str, password: str) -> bool:
        compared.append(bool(stored))
        return compare(self, stored, password)

    monkeypatch.setattr(Hasher, "_compare", counted)
    await visit().sign_in(ADA, OTHER)
    await visit().sign_in("nobody@example.com", OTHER)
    assert compared == [True, False]


@pytest.mark.parametrize("email", [ADA, "nobody@example.com"])
async def test_who_guesses_is_locked_longer_each_time_and_alone(
    ada: Person, visit: Open, clock: ManualClock, email: str
) -> None:
    """Known or not, the account is locked at the guesser's address and at no other."""
    guesser = "198.51.100.9"
    for _ in range(5):
        await _code(401, "SIGN_IN_REFUSED", visit(guesser), OTHER, email)
    for wait_s in (30, 60, 120, 240, 480, 900, 900):
        locked = await visit(guesser).sign_in(email, PASSWORD)
        assert (locked.status_code, locked.json()["code"]) == (429, "SIGN_IN_LOCKED")
        assert locked.headers["retry-after"] == str(wait_s)
        assert (await visit().sign_in(ADA, PASSWORD)).status_code == 200  # at her own address
        clock.advance(wait_s - 1)
        assert (await visit(guesser).sign_in(email, PASSWORD)).status_code == 429
        clock.advance(1)
        await _code(401, "SIGN_IN_REFUSED", visit(guesser), OTHER, email)


@pytest.mark.parametrize("email", [ADA, "nobody@example.com"])
async def test_a_hundred_guesses_from_many_addresses_lock_the_account_but_for_its_devices(
    ada: Person, visit: Open, at_desk: Services, clock: ManualClock, email: str
) -> None:
    known = visit("203.0.113.50")
    assert (await known.sign_in(ADA, PASSWORD)).status_code == 200
    for number in range(100):
        async with db.transaction(at_desk.sessions) as session:
            counters = throttle.of_sign_in(at_desk.pepper, email, f"198.51.100.{number}")
            await throttle.take(session, clock.now(), *counters)
    locked = await visit("192.0.2.200").sign_in(email, PASSWORD)
    assert (locked.status_code, locked.headers["retry-after"]) == (429, "30")
    await known.post(f"{AUTH}/sign-out")
    assert (await known.sign_in(ADA, PASSWORD)).status_code == 200
    clock.advance(30)
    await _code(401, "SIGN_IN_REFUSED", visit("192.0.2.201"), OTHER, email)
    assert (await visit("192.0.2.202").sign_in(email, PASSWORD)).headers["retry-after"] == "60"


async def test_a_known_device_is_bounded_too_and_known_for_one_account(
    ada: Person, visit: Open, at_desk: Services
) -> None:
    await local_person(at_desk, "bob@example.com")
    known = visit()
    assert (await known.sign_in(ADA, PASSWORD)).status_code == 200
    for _ in range(10):
        await _code(401, "SIGN_IN_REFUSED", known, OTHER)
    await _code(429, "SIGN_IN_LOCKED", known, PASSWORD)
    assert (await visit().sign_in(ADA, PASSWORD)).status_code == 200  # its tries are its own
    for _ in range(5):
        await _code(401, "SIGN_IN_REFUSED", known, OTHER, "bob@example.com")
    await _code(429, "SIGN_IN_LOCKED", known, PASSWORD, "bob@example.com")


async def test_a_device_that_somebody_made_up_is_none(ada: Person, visit: Open) -> None:
    known, other = visit(), visit()
    assert (await known.sign_in(ADA, PASSWORD)).status_code == 200
    cookie = known.http.cookies[DEVICE_COOKIE]
    device, at, seal = cookie.split(".")
    for _ in range(5):
        await _code(401, "SIGN_IN_REFUSED", other, OTHER)
    for forged in (f"{device}.{int(at) + 1}.{seal}", f"{'0' * 32}.{at}.{seal}", f"{device}.x.{seal}", "..", "a" * 300):
        other.http.cookies.clear()
        other.http.cookies.set(DEVICE_COOKIE, forged)
        await _code(429, "SIGN_IN_LOCKED", other, PASSWORD)
    other.http.cookies.clear()
    other.http.cookies.set(DEVICE_COOKIE, cookie)
    assert (await other.sign_in(ADA, PASSWORD)).status_code == 200


async def test_the_right_password_after_the_lock_forgets_the_tries(
    ada: Person, visit: Open, clock: ManualClock
) -> None:
    for _ in range(5):
        await _code(401, "SIGN_IN_REFUSED", visit(), OTHER)
    clock.advance(30)
    assert (await visit().sign_in(ADA, PASSWORD)).status_code == 200
    for _ in range(4):
        await _code(401, "SIGN_IN_REFUSED", visit(), OTHER)
    assert (await visit().sign_in(ADA, PASSWORD)).status_code == 200


async def test_tries_are_forgotten_after_a_day(ada: Person, visit: Open, clock: ManualClock) -> None:
    for _ in range(4):
        await _code(401, "SIGN_IN_REFUSED", visit(), OTHER)
    clock.advance(86_401)
    for _ in range(4):
        await _code(401, "SIGN_IN_REFUSED", visit(), OTHER)


@pytest.mark.parametrize(
    ("addresses", "locked"),
    [
        (["192.0.2.1"] * 101, True),
        ([f"2001:db8:1:2::{n:x}" for n in range(101)], True),
        ([f"2001:db8:1:{n:x}::1" for n in range(101)], False),
        ([f"192.0.2.{n}" for n in range(101)], False),
    ],
)
async def test_an_address_is_locked_after_a_hundred_tries_at_many_accounts(
    at_desk: Services, clock: ManualClock, addresses: list[str], locked: bool
) -> None:
    met = []
    for number, address in enumerate(addresses):
        async with db.transaction(at_desk.sessions) as session:
            counters = throttle.of_sign_in(at_desk.pepper, f"p{number}@example.com", address)
            try:
                await throttle.take(session, clock.now(), *counters)
            except PlatformError as error:
                met.append(error.code)
    assert met == (["SIGN_IN_LOCKED"] if locked else [])


async def test_many_people_behind_one_address_sign_in(at_desk: Services, visit: Open, ada: Person) -> None:
    for _ in range(30):
        assert (await visit().sign_in(ADA, PASSWORD)).status_code == 200


async def test_parallel_tries_do_not_pass_the_lock(ada: Person, visit: Open, at_desk: Services) -> None:
    async def one() -> int:
        return (await visit().sign_in(ADA, OTHER)).status_code

    statuses = await asyncio.gather(*(one() for _ in range(20)))
    assert sorted(statuses) == [401] * 5 + [429] * 15


async def test_a_hash_is_no_password_and_leaves_in_no_answer(ada: Person, visit: Open, at_desk: Services) -> None:
    async with db.transaction(at_desk.sessions) as session:
        stored = (await session.execute(text("SELECT password_hash FROM person"))).scalar_one()
    assert stored.startswith("$argon2id$")
    await _code(401, "SIGN_IN_REFUSED", visit(), stored)
    here = visit()
    answers = [
        await here.sign_in(ADA, PASSWORD),
        await here.get("/api/v1/session"),
        await here.get("/api/v1/me/sessions"),
    ]
    assert all("argon2" not in answer.text for answer in answers)


async def test_a_hash_of_another_cost_is_made_anew_when_used(ada: Person, at_desk: Services) -> None:
    dearer = dataclasses.replace(at_desk, passwords=Hasher(Cost(memory_kib=128, passes=2)))
    here = browser(create_app(dearer))
    async with here.http:
        assert (await here.sign_in(ADA, PASSWORD)).status_code == 200
        async with db.transaction(at_desk.sessions) as session:
            stored = (await session.execute(text("SELECT password_hash FROM person"))).scalar_one()
        assert "$m=128,t=2,p=1$" in stored
        assert (await here.sign_in(ADA, PASSWORD)).status_code == 200


async def test_signing_in_again_ends_the_session_before_it(ada: Person, visit: Open, app: FastAPI) -> None:
    here = visit()
    await here.sign_in(ADA, PASSWORD)
    planted = here.cookie
    await here.sign_in(ADA, PASSWORD)
    assert here.cookie != planted
    there = visit()
    there.http.cookies.set("tidegate_session", planted or "")
    assert not await there.signed_in()


async def test_a_planted_cookie_is_never_taken_over(ada: Person, visit: Open) -> None:
    """Session fixation: whatever the browser brought, the session has a token of our making."""
    here = visit()
    here.http.cookies.set("tidegate_session", "tgs_" + "0" * 46, domain="control")
    answer = await here.sign_in(ADA, PASSWORD)
    assert "tgs_" + "0" * 46 not in answer.headers["set-cookie"]


async def test_signing_out_ends_this_session_alone(ada: Person, visit: Open) -> None:
    here, there = visit(), visit()
    await here.sign_in(ADA, PASSWORD)
    await there.sign_in(ADA, PASSWORD)
    token = here.cookie
    assert (await here.post(f"{AUTH}/sign-out")).status_code == 204
    assert here.cookie is None
    here.http.cookies.set("tidegate_session", token or "")
    assert not await here.signed_in()
    assert await there.signed_in()


async def test_signing_out_everywhere_ends_all(ada: Person, visit: Open) -> None:
    here, there = visit(), visit()
    await here.sign_in(ADA, PASSWORD)
    await there.sign_in(ADA, PASSWORD)
    assert (await here.post(f"{AUTH}/sign-out-everywhere")).status_code == 204
    assert not await there.signed_in()
    assert (await visit().sign_in(ADA, PASSWORD)).status_code == 200


async def test_own_sessions_are_listed_and_ended_others_are_not_found(
    ada: Person, visit: Open, at_desk: Services
) -> None:
    here, there = visit(), visit("198.51.100.1")
    there.headers = {"user-agent": "Lynx/2.9"}
    await here.sign_in(ADA, PASSWORD)
    await there.sign_in(ADA, PASSWORD)
    items = (await here.get("/api/v1/me/sessions")).json()["items"]
    assert [(one["current"], one["ip"]) for one in items] == [(False, "198.51.100.1"), (True, "203.0.113.7")]
    assert items[0]["user_agent"] == "Lynx/2.9"
    assert (await here.delete(f"/api/v1/me/sessions/{items[0]['id']}")).status_code == 204
    assert not await there.signed_in()
    assert await here.signed_in()
    await local_person(at_desk, "eve@example.com", OTHER)
    eves = visit()
    await eves.sign_in("eve@example.com", OTHER)
    assert (await eves.delete(f"/api/v1/me/sessions/{items[1]['id']}")).status_code == 404
    assert await here.signed_in()


async def test_a_session_ends_when_idle_and_when_old(ada: Person, visit: Open, clock: ManualClock) -> None:
    here = visit()
    await here.sign_in(ADA, PASSWORD)
    clock.advance(12 * 3600 - 1)
    assert await here.signed_in()
    clock.advance(12 * 3600)
    assert not await here.signed_in()
    await here.sign_in(ADA, PASSWORD)
    for _ in range(15):
        clock.advance(11 * 3600)
        assert await here.signed_in()
    clock.advance(4 * 3600)  # 169 hours: a week and an hour
    assert not await here.signed_in()


async def test_suspended_people_are_out_at_once_and_stay_out(ada: Person, visit: Open, at_desk: Services) -> None:
    here = visit()
    await here.sign_in(ADA, PASSWORD)
    async with db.transaction(at_desk.sessions) as session:
        await person_status.suspend(session, ada.id, now=at_desk.clock.now())
    assert not await here.signed_in()
    await _code(403, "PERSON_SUSPENDED", visit(), PASSWORD)
    await _code(401, "SIGN_IN_REFUSED", visit(), OTHER)
    async with db.transaction(at_desk.sessions) as session:
        await person_status.resume(session, ada.id)
    assert not await here.signed_in()
    assert (await here.sign_in(ADA, PASSWORD)).status_code == 200


async def test_a_changed_password_ends_other_sessions_and_rotates_this_one(
    ada: Person, visit: Open, at_desk: Services
) -> None:
    here, there = visit(), visit()
    await here.sign_in(ADA, PASSWORD)
    await there.sign_in(ADA, PASSWORD)
    before = here.cookie
    change = {"current_password": PASSWORD, "new_password": OTHER}
    wrong = await here.post("/api/v1/me/password", {**change, "current_password": OTHER})
    assert (wrong.status_code, wrong.json()["code"]) == (401, "SIGN_IN_REFUSED")
    assert wrong.json()["detail"] == "This is not your password."
    weak = await here.post("/api/v1/me/password", {**change, "new_password": "password1234"})
    assert (weak.status_code, weak.json()["param"]) == (400, "password")
    assert (await here.post("/api/v1/me/password", change)).status_code == 200
    assert here.cookie not in {before, None}
    assert await here.signed_in()
    assert not await there.signed_in()
    assert (await here.post(f"{AUTH}/sign-out")).status_code == 204  # with the fresh token of changes
    await _code(401, "SIGN_IN_REFUSED", visit(), PASSWORD)
    assert (await visit().sign_in(ADA, OTHER)).status_code == 200
    assert [mail.subject for mail in await mails(at_desk, ADA)] == ["Your Tidegate password was changed"]


async def test_guessing_the_current_password_in_a_stolen_session_is_locked(ada: Person, visit: Open) -> None:
    here = visit()
    await here.sign_in(ADA, PASSWORD)
    change = {"current_password": "guess", "new_password": OTHER}
    statuses = [(await here.post("/api/v1/me/password", change)).status_code for _ in range(6)]
    assert statuses == [401] * 5 + [429]


async def test_a_lost_password_is_replaced_by_a_mailed_link_once(ada: Person, visit: Open, at_desk: Services) -> None:
    here = visit()
    await here.sign_in(ADA, PASSWORD)
    assert (await visit().post(f"{AUTH}/password-reset", {"email": "ADA@example.com"})).status_code == 202
    (kept,) = await mails(at_desk, ADA)
    token = token_in(kept)
    assert f"http://127.0.0.1:8080/reset#{token}" in kept.text
    confirm = {"token": token, "password": OTHER}
    weak = await visit().post(f"{AUTH}/password-reset/confirm", {**confirm, "password": "ada@example.com"})
    assert (weak.status_code, weak.json()["param"]) == (400, "password")
    assert (await visit().post(f"{AUTH}/password-reset/confirm", confirm)).status_code == 204
    again = await visit().post(f"{AUTH}/password-reset/confirm", confirm)
    assert (again.status_code, again.json()["code"]) == (400, "RESET_LINK_WRONG")
    assert not await here.signed_in()
    await _code(401, "SIGN_IN_REFUSED", visit(), PASSWORD)
    assert (await visit().sign_in(ADA, OTHER)).status_code == 200


async def test_a_link_is_good_for_an_hour(ada: Person, visit: Open, at_desk: Services, clock: ManualClock) -> None:
    await visit().post(f"{AUTH}/password-reset", {"email": ADA})
    token = token_in((await mails(at_desk, ADA))[0])
    clock.advance(3600)
    late = await visit().post(f"{AUTH}/password-reset/confirm", {"token": token, "password": OTHER})
    assert late.json()["code"] == "RESET_LINK_WRONG"


async def test_asking_for_a_link_tells_nobody_who_has_an_account(ada: Person, visit: Open, at_desk: Services) -> None:
    answers = [await visit().post(f"{AUTH}/password-reset", {"email": e}) for e in (ADA, "nobody@example.com")]
    assert [(a.status_code, a.content) for a in answers] == [(202, b"null")] * 2
    async with db.transaction(at_desk.sessions) as session:
        rows = (await session.execute(text("SELECT task, length(arguments::text) > 60 FROM outbox"))).all()
        waiting = (await session.execute(text("SELECT string_agg(arguments::text, '') FROM outbox"))).scalar_one()
    assert [tuple(row) for row in rows] == [("people.reset_password", True)] * 2
    assert "example" not in waiting
    assert len(await mails(at_desk, ADA)) == 1
    assert await mails(at_desk, "nobody@example.com") == []


async def test_links_are_bounded_by_account_and_by_address(
    ada: Person, visit: Open, at_desk: Services, clock: ManualClock
) -> None:
    statuses = [(await visit().post(f"{AUTH}/password-reset", {"email": ADA})).status_code for _ in range(11)]
    assert statuses == [202] * 10 + [429]
    assert len(await mails(at_desk, ADA)) == 3
    clock.advance(3601)
    await visit().post(f"{AUTH}/password-reset", {"email": ADA})
    assert len(await mails(at_desk, ADA)) == 4


async def test_a_new_link_for_whoever_is_suspended_is_not_sent(ada: Person, visit: Open, at_desk: Services) -> None:
    async with db.transaction(at_desk.sessions) as session:
        await person_status.suspend(session, ada.id, now=at_desk.clock.now())
    await visit().post(f"{AUTH}/password-reset", {"email": ADA})
    assert await mails(at_desk, ADA) == []


async def test_a_foreign_page_signs_nobody_in(visit: Open, ada: Person) -> None:
    bodies = {
        "password": {"email": ADA, "password": PASSWORD},
        "totp": {"challenge": "tgc_x", "code": "123456"},
        "password-reset": {"email": ADA},
        "password-reset/confirm": {"token": "tgr_x", "password": PASSWORD},
        "invites/accept": {"token": "tgi_x", "name": "Eve", "password": PASSWORD},
    }
    for path, body in bodies.items():
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            answer = await visit().post(f"{AUTH}/{path}", body, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "FOREIGN_ORIGIN"), path


async def test_the_trail_names_who_signed_in(ada: Person, visit: Open, at_desk: Services) -> None:
    await visit().sign_in(ADA, OTHER)
    await visit().sign_in(ADA, PASSWORD)
    async with db.transaction(at_desk.sessions) as session:
        rows = (await session.execute(text("SELECT actor_kind, actor_id, action FROM audit_record"))).all()
    assert [tuple(row) for row in rows] == [("person", ada.id, "session.open")]


async def test_links_are_never_made_of_what_a_request_says(ada: Person, visit: Open, at_desk: Services) -> None:
    for headers in (
        {"host": "evil.example"},
        {"host": "evil.example/?#@"},
        {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https", "forwarded": "host=evil.example"},
    ):
        answer = await visit().http.post(f"{AUTH}/password-reset", json={"email": ADA}, headers=headers)
        assert answer.status_code == 202
    found = await mails(at_desk, ADA)
    assert len(found) == 3
    for kept in found:
        assert "evil" not in kept.text
        assert "http://127.0.0.1:8080/reset#tgr_" in kept.text


async def test_what_signing_in_leaves_behind_is_forgotten(
    ada: Person, visit: Open, at_desk: Services, clock: ManualClock
) -> None:
    async def left() -> list[int]:
        async with db.transaction(at_desk.sessions) as session:
            query = "SELECT (SELECT count(*) FROM sign_in_throttle), (SELECT count(*) FROM person_session)"
            return list((await session.execute(text(query))).one())

    await visit().sign_in(ADA, PASSWORD)
    await visit("198.51.100.1").sign_in(ADA, OTHER)
    assert await left() == [4, 1]  # two addresses, the account, and the account at one of them; the session
    context = TaskContext(at_desk.settings, at_desk.sessions, clock)
    clock.advance(86_399)
    await people_tasks.forget(context)
    assert await left() == [4, 1]
    clock.advance(2)
    await people_tasks.forget(context)
    assert await left() == [0, 1]
    clock.advance(37 * 86_400)  # seven days of life, thirty more
    await people_tasks.forget(context)
    assert await left() == [0, 0]

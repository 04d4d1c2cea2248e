"""The second factor: an app's codes, each good once, and recovery codes."""

import base64
import dataclasses
from typing import Any

from sqlalchemy import text

from api.app import create_app
from api.services import Services
from core import db
from core.clock import ManualClock
from tenants import totp
from tenants.credentials import Peppers
from tenants.types import Person
from tests.factories.browser import ADA, AUTH, OTHER, PASSWORD, Browser, Open, browser
from tests.factories.tenants import PEPPER

ME = "/api/v1/me"


class App:
    """An authenticator app."""

    def __init__(self, secret: str, clock: ManualClock) -> None:
        self.secret = base64.b32decode(secret)
        self.clock = clock

    def code(self, steps: int = 0) -> str:
        return totp.code_at(self.secret, totp.step_of(self.clock.now()) + steps)


async def _enrol(here: Browser, clock: ManualClock) -> tuple[App, list[str]]:
    """Sign in, put a second factor in force; return the app and the recovery codes."""
    await here.sign_in(ADA, PASSWORD)
    started = await here.post(f"{ME}/totp", {"password": PASSWORD})
    assert started.status_code == 200
    app = App(started.json()["secret"], clock)
    assert started.json()["secret"] in started.json()["uri"]
    confirmed = await here.post(f"{ME}/totp/confirm", {"code": app.code()})
    assert confirmed.status_code == 200
    clock.advance(30)
    return app, confirmed.json()["recovery_codes"]


async def _challenge(here: Browser) -> str:
    answer = await here.sign_in(ADA, PASSWORD)
    assert (answer.status_code, answer.json()["state"]) == (200, "second_factor_needed")
    assert "set-cookie" not in answer.headers
    challenge: str = answer.json()["challenge"]
    return challenge


async def _answer(here: Browser, challenge: str, code: str) -> Any:
    return await here.post(f"{AUTH}/totp", {"challenge": challenge, "code": code})


async def test_with_a_second_factor_the_password_alone_opens_nothing(
    ada: Person, visit: Open, clock: ManualClock
) -> None:
    app, _ = await _enrol(visit(), clock)
    here = visit()
    challenge = await _challenge(here)
    assert not await here.signed_in()
    here.http.cookies.set("tidegate_session", challenge)
    assert not await here.signed_in()
    here.http.cookies.clear()
    assert (await _answer(here, challenge, app.code())).json()["state"] == "signed_in"
    assert (await here.get("/api/v1/session")).json()["second_factor"] is True


async def test_confirming_rotates_the_session_and_ends_the_others(ada: Person, visit: Open, clock: ManualClock) -> None:
    here, there = visit(), visit()
    await there.sign_in(ADA, PASSWORD)
    await here.sign_in(ADA, PASSWORD)
    before = here.cookie
    secret = (await here.post(f"{ME}/totp", {"password": PASSWORD})).json()["secret"]
    assert (await here.post(f"{ME}/totp/confirm", {"code": App(secret, clock).code()})).status_code == 200
    assert here.cookie not in {None, before}
    assert await here.signed_in()
    assert not await there.signed_in()
    there.http.cookies.set("tidegate_session", before or "")
    assert not await there.signed_in()


async def test_a_code_is_good_once_and_so_is_a_challenge(ada: Person, visit: Open, clock: ManualClock) -> None:
    app, _ = await _enrol(visit(), clock)
    here = visit()
    first = await _challenge(here)
    code = app.code()
    assert (await _answer(here, first, code)).status_code == 200
    again = await _answer(visit(), await _challenge(visit()), code)
    assert (again.status_code, again.json()["code"]) == (401, "SECOND_FACTOR_WRONG")
    clock.advance(30)
    over = await _answer(visit(), first, app.code())
    assert (over.status_code, over.json()["code"]) == (401, "SIGN_IN_EXPIRED")


async def test_the_code_that_confirmed_signs_nobody_in(ada: Person, visit: Open, clock: ManualClock) -> None:
    app, _ = await _enrol(visit(), clock)
    clock.advance(-30)
    assert (await _answer(visit(), await _challenge(visit()), app.code())).status_code == 401


async def test_a_challenge_is_good_for_five_minutes(ada: Person, visit: Open, clock: ManualClock) -> None:
    app, _ = await _enrol(visit(), clock)
    challenge = await _challenge(visit())
    clock.advance(300)
    answer = await _answer(visit(), challenge, app.code())
    assert (answer.status_code, answer.json()["code"]) == (401, "SIGN_IN_EXPIRED")


async def test_right_passwords_between_wrong_codes_do_not_unlock(ada: Person, visit: Open, clock: ManualClock) -> None:
    app, _ = await _enrol(visit(), clock)
    statuses = []
    for number in range(5):
        challenge = await _challenge(visit(f"198.51.100.{number}"))
        statuses.append((await _answer(visit(f"198.51.101.{number}"), challenge, "000000")).status_code)
    assert statuses == [401] * 5
    locked = await _answer(visit("198.51.102.1"), await _challenge(visit("198.51.102.1")), app.code())
    assert (locked.status_code, locked.headers["retry-after"]) == (429, "30")
    clock.advance(30)
    here = visit()
    assert (await _answer(here, await _challenge(here), app.code())).status_code == 200


async def test_recovery_codes_are_good_once_each_and_shown_once(
    ada: Person, visit: Open, clock: ManualClock, at_desk: Services
) -> None:
    _, codes = await _enrol(visit(), clock)
    assert len(codes) == 10
    here = visit()
    typed = codes[0].upper().replace("-", " ")
    assert (await _answer(here, await _challenge(here), typed)).status_code == 200
    assert (await _answer(visit(), await _challenge(visit()), codes[0])).status_code == 401
    fresh = (await here.post(f"{ME}/recovery-codes", {"password": PASSWORD})).json()["recovery_codes"]
    assert not set(fresh) & set(codes)
    assert (await _answer(visit(), await _challenge(visit()), codes[1])).status_code == 401
    assert (await _answer(visit(), await _challenge(visit()), fresh[1])).status_code == 200
    async with db.transaction(at_desk.sessions) as session:
        kept = (await session.execute(text("SELECT encode(digest, 'escape') FROM recovery_code"))).scalars().all()
    assert len(kept) == 10
    assert not any(code.replace("-", "") in row for code in fresh for row in kept)


async def test_the_secret_is_sealed_at_rest_to_its_person(
    ada: Person, visit: Open, clock: ManualClock, at_desk: Services
) -> None:
    app, _ = await _enrol(visit(), clock)
    async with db.transaction(at_desk.sessions) as session:
        kept = (await session.execute(text("SELECT totp_secret FROM person"))).scalar_one()
    assert app.secret not in kept
    assert len(kept) == 1 + 12 + 20 + 16  # version, nonce, secret, tag


async def test_a_wrong_code_confirms_nothing_and_a_password_is_asked_for(
    ada: Person, visit: Open, clock: ManualClock
) -> None:
    here = visit()
    await here.sign_in(ADA, PASSWORD)
    assert (await here.post(f"{ME}/totp", {"password": OTHER})).status_code == 401
    assert (await here.post(f"{ME}/totp/confirm", {"code": "123456"})).json()["code"] == "SECOND_FACTOR_NOT_STARTED"
    secret = (await here.post(f"{ME}/totp", {"password": PASSWORD})).json()["secret"]
    wrong = await here.post(f"{ME}/totp/confirm", {"code": App(secret, clock).code(5)})
    assert (wrong.status_code, wrong.json()["param"]) == (400, "code")
    assert (await visit().sign_in(ADA, PASSWORD)).json()["state"] == "signed_in"


async def test_in_force_it_cannot_be_replaced_but_removed_with_the_password(
    ada: Person, visit: Open, clock: ManualClock
) -> None:
    here = visit()
    await _enrol(here, clock)
    assert (await here.post(f"{ME}/totp", {"password": PASSWORD})).json()["code"] == "SECOND_FACTOR_EXISTS"
    assert (await here.post(f"{ME}/totp/remove", {"password": OTHER})).status_code == 401
    before = here.cookie
    assert (await here.post(f"{ME}/totp/remove", {"password": PASSWORD})).status_code == 200
    assert here.cookie != before
    assert (await visit().sign_in(ADA, PASSWORD)).json()["state"] == "signed_in"
    assert (await here.post(f"{ME}/recovery-codes", {"password": PASSWORD})).json()["code"] == "NO_SECOND_FACTOR"


async def test_a_new_password_voids_open_challenges(ada: Person, visit: Open, clock: ManualClock) -> None:
    here = visit()
    app, _ = await _enrol(here, clock)
    challenge = await _challenge(visit())
    change = {"current_password": PASSWORD, "new_password": OTHER}
    assert (await here.post(f"{ME}/password", change)).status_code == 200
    assert (await _answer(visit(), challenge, app.code())).json()["code"] == "SIGN_IN_EXPIRED"


async def test_recovery_codes_outlive_a_rotated_pepper(
    ada: Person, visit: Open, clock: ManualClock, at_desk: Services
) -> None:
    _, codes = await _enrol(visit(), clock)
    for previous, status in (((PEPPER,), 200), ((), 401)):
        rotated = dataclasses.replace(at_desk, peppers=Peppers(b"\x33" * 32, previous))
        here = browser(create_app(rotated))
        async with here.http:
            assert (await _answer(here, await _challenge(here), codes.pop())).status_code == status

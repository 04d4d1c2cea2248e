"""Sign-in against `oidc-provider-mock`, a provider that we did not write, and against one that lies."""

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import httpx
import pytest

from api.services import Services
from core import db
from core.errors import PlatformError
from core.settings import Oidc, Settings
from tenants import audit, members, operators, people, people_queries
from tenants.roles import Rights
from tenants.sessions import find, renew
from tenants.types import AuditFilter, PersonStatus, Role
from tests.factories.identity_provider import CLIENT_ID, IdentityProvider, identity_provider
from tests.factories.mock_provider import MockProvider, mock_provider
from tests.factories.tenants import Customer, customer
from tests.integration.control.conftest import Client
from tests.integration.control.oidc import Browser, Registered, ShiftedClock, at_provider, register

REFRESH_S, TRUST_S = 300, 3600
OWNER = Rights(frozenset({Role.OWNER}))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    oidc = Oidc(allow_loopback=True, refresh_every_s=REFRESH_S, refresh_trust_s=TRUST_S, refetch_min_s=0)
    return settings.model_copy(update={"oidc": oidc})


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def services(services: Services, clock: ShiftedClock) -> Services:
    return dataclasses.replace(services, clock=clock)


@pytest.fixture(scope="module")
async def mock() -> AsyncIterator[MockProvider]:
    async with mock_provider() as found:
        yield found


@pytest.fixture
async def liar() -> AsyncIterator[IdentityProvider]:
    async with identity_provider() as found:
        yield found


@pytest.fixture
async def acme(sessions: db.Sessions) -> Customer:
    return await customer(sessions)


@pytest.fixture
def browser(anonymous: Client) -> Browser:
    return Browser(anonymous.http)


def gives(group: str, made: Customer, role: str, *, project: bool = False) -> dict[str, Any]:
    found = {"group": group, "tenant_id": f"ten_{made.tenant.id.hex}", "role": role}
    return {**found, "project_id": f"prj_{made.project.id.hex}"} if project else found


def of(made: Customer) -> str:
    return f"/api/v1/tenants/ten_{made.tenant.id.hex}"


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def test_groups_become_roles_at_sign_in_and_the_session_is_the_persons(
    mock: MockProvider, admin: Client, browser: Browser, acme: Customer, sessions: db.Sessions
) -> None:
    await mock.put_user("ada-1", email="Ada@Example.com", email_verified=True, name="Ada L", groups=["dev", "x"])
    at = await register(admin, mock, "Mock", scopes="openid email profile")
    await at.map(gives("dev", acme, "developer"), gives("boss", acme, "owner"))
    listed = (await browser.get("/api/v1/auth/providers")).json()["items"]
    assert [(item["name"], item["start_url"]) for item in listed] == [("Mock", f"/api/v1/auth/oidc/{at.id}/start")]
    url = await browser.start(at, "/keys?page=2")
    asked = parse_qs(urlsplit(url).query)
    assert (asked["response_type"], asked["code_challenge_method"], asked["client_id"]) == (
        ["code"],
        ["S256"],
        [CLIENT_ID],
    )
    assert asked["redirect_uri"] == [f"http://127.0.0.1:8080/api/v1/auth/oidc/{at.id}/callback"]
    answer = await browser.get(await at_provider(mock, url, "ada-1"))
    assert (answer.status_code, answer.headers["location"]) == (303, "/keys?page=2")
    cookie = next(line for line in answer.headers.get_list("set-cookie") if line.startswith("tidegate_session="))
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "tidegate_sign_in" not in browser.cookies
    assert (await browser.get(of(acme))).json()["name"] == acme.tenant.name
    async with db.transaction(sessions) as session:
        person = await people.by_email(session, "ada@example.com")
        records = await audit.search(session, AuditFilter(action="session.open"), after=None, limit=10)
    assert person is not None
    assert (person.name, person.has_password) == ("Ada L", False)
    assert records[0].actor.id == person.id
    assert records[0].details["roles_added"] == [f"developer in ten_{acme.tenant.id.hex}"]
    async with db.transaction(sessions) as session:
        of_tenant = AuditFilter(tenant_id=acme.tenant.id, action="member.follow_provider")
        (told,) = await audit.search(session, of_tenant, after=None, limit=10)
        (member,) = await people_queries.members_in(session, acme.tenant.id, person.id)
        with pytest.raises(PlatformError, match="A group at the identity provider gives this role"):
            await members.change(session, acme.tenant.id, member.id, by=OWNER, now=member.created_at, role=Role.OWNER)
    assert (told.target_id, told.details["provider"]) == (person.id, at.id)
    again = Browser(browser.app)
    assert (await again.sign_in(at, "ada-1")).status_code == 303
    async with db.transaction(sessions) as session:
        records = await audit.search(session, AuditFilter(action="session.open"), after=None, limit=10)
    assert {record.target_id for record in records} == {person.id}
    assert not records[0].details["created"]


async def test_a_removed_group_loses_its_rights_at_the_next_refresh(
    mock: MockProvider, admin: Client, browser: Browser, acme: Customer, clock: ShiftedClock
) -> None:
    labs = acme
    await mock.put_user("bob-1", email="bob@example.com", groups=["dev", "ops"])
    at = await register(admin, mock, "Mock")
    await at.map(gives("dev", labs, "developer"), {"group": "ops", "operator_role": "support"})
    await browser.sign_in(at, "bob-1")
    assert (await browser.get(of(labs))).status_code == 200
    assert (await browser.get("/api/v1/admin/tenants")).status_code == 200
    await mock.put_user("bob-1", email="bob@example.com", groups=["ops"])
    clock.shift_s = REFRESH_S - 5
    assert (await browser.get(of(labs))).status_code == 200  # not asked again yet
    clock.shift_s = REFRESH_S + 1
    assert code_of(await browser.get(of(labs))) == (404, "NOT_FOUND")
    assert (await browser.get("/api/v1/admin/tenants")).status_code == 200
    await mock.put_user("bob-1", email="bob@example.com", groups=["dev"])
    clock.shift_s = 2 * REFRESH_S + 2
    assert (await browser.get(of(labs))).status_code == 200  # and what a group gives now, it gives at a refresh too
    assert code_of(await browser.get("/api/v1/admin/tenants")) == (403, "FORBIDDEN")


async def test_a_provider_that_refuses_the_refresh_ends_the_session(
    mock: MockProvider, admin: Client, browser: Browser, acme: Customer, clock: ShiftedClock
) -> None:
    await mock.put_user("eve-1", email="eve@example.com", groups=["dev"])
    at = await register(admin, mock, "Mock")
    await at.map(gives("dev", acme, "developer"))
    await browser.sign_in(at, "eve-1")
    await mock.revoke_tokens("eve-1")
    assert (await browser.get(of(acme))).status_code == 200
    clock.shift_s = REFRESH_S + 1
    assert code_of(await browser.get(of(acme))) == (401, "SESSION_ENDED")
    assert code_of(await browser.get(of(acme))) == (401, "SESSION_ENDED")


async def test_a_provider_that_is_away_is_waited_for_an_hour_and_no_longer(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer, clock: ShiftedClock
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    await browser.sign_in(at, "ann")
    liar.down = True
    clock.shift_s = TRUST_S - 60
    assert (await browser.get(of(acme))).status_code == 200
    liar.down = False
    clock.shift_s = TRUST_S
    answers = await asyncio.gather(*(Browser(browser.app, browser.cookies).get(of(acme)) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert liar.refreshes == 1  # a refresh token is good once: two at a time would end the session
    liar.down = True
    clock.shift_s = 2 * TRUST_S + 60
    assert code_of(await browser.get(of(acme))) == (401, "SESSION_ENDED")


async def test_a_session_under_a_new_token_is_still_the_providers(
    *, liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer, services: Services, clock: ShiftedClock
) -> None:
    """As after turning a second factor on."""
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    await browser.sign_in(at, "ann")
    now, pepper = services.clock.now(), services.pepper
    async with db.transaction(services.sessions) as session:
        found = await find(session, browser.cookies["tidegate_session"], pepper=pepper, now=now, idle_s=60)
        assert found is not None
        browser.cookies["tidegate_session"] = await renew(session, found[0], pepper=pepper, now=now, second_factor=True)
    assert (await browser.get(of(acme))).status_code == 200
    liar.users["ann"]["groups"] = []
    clock.shift_s = REFRESH_S + 1
    assert code_of(await browser.get(of(acme))) == (404, "NOT_FOUND")


async def test_an_answer_that_this_browser_did_not_ask_for_is_refused(
    mock: MockProvider, liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer
) -> None:
    await mock.put_user("ida", email="ida@example.com", groups=["dev"])
    at, other = await register(admin, mock, "Mock"), await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    back = await at_provider(mock, await browser.start(at), "ida")
    stranger = Browser(browser.app)
    assert code_of(await stranger.get(back)) == (401, "SIGN_IN_REFUSED")  # no cookie
    await stranger.start(at)
    assert code_of(await stranger.get(back)) == (401, "SIGN_IN_REFUSED")  # a cookie of another attempt
    wrong_state = re.sub(r"state=[^&]+", "state=" + "x" * 32, back)
    assert code_of(await browser.get(wrong_state)) == (401, "SIGN_IN_REFUSED")
    elsewhere = back.replace(at.id, other.id)
    assert code_of(await browser.get(elsewhere)) == (401, "SIGN_IN_REFUSED")
    assert code_of(await browser.get(f"{back}&iss=https://evil.example")) == (401, "SIGN_IN_REFUSED")
    assert (await browser.get(back)).status_code == 303
    assert code_of(await browser.get(back)) == (401, "SIGN_IN_REFUSED")  # once is enough


async def test_a_stolen_code_is_worth_nothing_without_the_verifier(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    victim = parse_qs(urlsplit(await at_provider(liar, await browser.start(at), "ann")).query)
    thief = Browser(browser.app)
    own = await at_provider(liar, await thief.start(at), "thief")
    forged = re.sub(r"code=[^&]+", f"code={victim['code'][0]}", own)
    assert code_of(await thief.get(forged)) == (401, "SIGN_IN_REFUSED")


LIES: tuple[dict[str, Any], ...] = (
    {"nonce": "of-an-earlier-sign-in"},
    {"nonce": None},
    {"aud": "another-client"},
    {"aud": [CLIENT_ID, "another"]},
    {"aud": [CLIENT_ID, "another"], "azp": "another"},
    {"iss": "https://evil.example"},
    {"exp": 1_700_000_000},
    {"iat": None},
    {"sub": ""},
    {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"},
)


async def test_an_id_token_that_fails_one_check_opens_nothing(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer, sessions: db.Sessions
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    for lies in LIES:
        liar.lies = lies
        assert code_of(await browser.sign_in(at, "ann")) == (401, "SIGN_IN_REFUSED"), lies
        assert "tidegate_session" not in browser.cookies
    async with db.transaction(sessions) as session:
        assert await people.by_email(session, "ann@example.com") is None
    liar.lies = {}
    assert (await browser.sign_in(at, "ann")).status_code == 303


async def test_keys_rotate_and_a_withdrawn_one_signs_nothing(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    assert (await browser.sign_in(at, "ann")).status_code == 303
    old = liar.keys
    liar.rotate("two")
    assert (await browser.sign_in(at, "ann")).status_code == 303
    assert liar.jwks_calls == 2
    liar.published, liar.keys = liar.keys, old
    assert code_of(await browser.sign_in(at, "ann")) == (401, "SIGN_IN_REFUSED")


async def test_the_same_address_at_two_providers_is_not_the_same_person(
    *,
    mock: MockProvider,
    liar: IdentityProvider,
    admin: Client,
    browser: Browser,
    acme: Customer,
    sessions: db.Sessions,
) -> None:
    """Issuer and subject say who it is; an address links only where that is allowed, and when it is verified."""
    await mock.put_user("same", email="kim@example.com", email_verified=True, groups=["dev"])
    liar.users["same"] = {"email": "kim@example.com", "email_verified": False, "groups": ["dev"]}
    first, second = await register(admin, mock, "Mock"), await register(admin, liar, "Own")
    for at in (first, second):
        await at.map(gives("dev", acme, "developer"))
    assert (await browser.sign_in(first, "same")).status_code == 303
    assert code_of(await Browser(browser.app).sign_in(second, "same")) == (409, "ACCOUNT_EXISTS")
    await second.change(link_by_email=True)
    assert code_of(await Browser(browser.app).sign_in(second, "same")) == (409, "ACCOUNT_EXISTS")
    liar.users["same"]["email_verified"] = True
    await second.change(link_by_email=False)
    assert code_of(await Browser(browser.app).sign_in(second, "same")) == (409, "ACCOUNT_EXISTS")
    await second.change(link_by_email=True)
    assert (await Browser(browser.app).sign_in(second, "same")).status_code == 303
    async with db.transaction(sessions) as session:
        kim = await people.by_email(session, "kim@example.com")
        (linked, *_) = await audit.search(session, AuditFilter(action="session.open"), after=None, limit=1)
    assert kim is not None
    assert (linked.target_id, linked.details["linked"]) == (kim.id, True)
    await second.change(link_by_email=False)
    liar.users["same"]["email"] = "other@example.com"
    assert (await Browser(browser.app).sign_in(second, "same")).status_code == 303  # linked for good, by subject


async def _set_status(sessions: db.Sessions, person_id: UUID, status: PersonStatus) -> None:
    from tenants.people_queries import person

    async with db.transaction(sessions) as session:
        row = await person(session, person_id)
        assert row is not None
        row.status = status


async def test_a_suspended_person_is_refused_and_a_stranger_makes_no_account(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer, sessions: db.Sessions
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    liar.users["nobody"] = {"email": "nobody@example.com", "groups": ["visitors"]}
    liar.users["silent"] = {"groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    assert code_of(await browser.sign_in(at, "nobody")) == (403, "NO_ACCESS")
    assert code_of(await browser.sign_in(at, "silent")) == (403, "EMAIL_MISSING")
    async with db.transaction(sessions) as session:
        assert await people.by_email(session, "nobody@example.com") is None
    assert (await browser.sign_in(at, "ann")).status_code == 303
    async with db.transaction(sessions) as session:
        ann = await people.by_email(session, "ann@example.com")
    assert ann is not None
    await _set_status(sessions, ann.id, PersonStatus.SUSPENDED)
    assert (await browser.get(of(acme))).status_code == 401
    assert code_of(await browser.sign_in(at, "ann")) == (403, "PERSON_SUSPENDED")


async def test_only_verified_addresses_of_the_allowed_domains_sign_in(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer
) -> None:
    at = await register(admin, liar, "Own", email_domains=["example.com"])
    await at.map(gives("dev", acme, "developer"))
    for email, verified in (("a@evil.example", True), ("a@example.com", False), ("a@example.com.evil.net", True)):
        liar.users["ann"] = {"email": email, "email_verified": verified, "groups": ["dev"]}
        assert code_of(await browser.sign_in(at, "ann")) == (403, "EMAIL_NOT_ALLOWED")
    liar.users["ann"] = {"email": "a@example.com", "email_verified": True, "groups": ["dev"]}
    assert (await browser.sign_in(at, "ann")).status_code == 303


async def test_a_tenants_own_provider_takes_over_nobody_of_elsewhere(
    *,
    mock: MockProvider,
    liar: IdentityProvider,
    admin: Client,
    browser: Browser,
    acme: Customer,
    sessions: db.Sessions,
) -> None:
    labs = await customer(sessions)
    await mock.put_user("root", email="root@example.com", email_verified=True, groups=["ops"])
    await mock.put_user("lin", email="lin@example.com", email_verified=True, groups=["labs"])
    for name in ("root", "lin", "new"):
        liar.users[name] = {"email": f"{name}@example.com", "email_verified": True, "groups": ["dev"]}
    platform = await register(admin, mock, "Mock")
    await platform.map({"group": "ops", "operator_role": "admin"}, gives("labs", labs, "owner"))
    own = await register(
        admin,
        liar,
        "Acme's own",
        tenant_id=f"ten_{acme.tenant.id.hex}",
        email_domains=["example.com"],
        link_by_email=True,
        default_role="viewer",
    )
    refused = await admin.call("PUT", f"{own.path}/mappings", json={"items": [gives("dev", labs, "owner")]})
    assert refused.status_code == 400
    refused = await admin.call(
        "PUT", f"{own.path}/mappings", json={"items": [{"group": "d", "operator_role": "admin"}]}
    )
    assert refused.status_code == 400
    for name in ("root", "lin"):
        await Browser(browser.app).sign_in(platform, name)
        assert code_of(await browser.sign_in(own, name)) == (409, "ACCOUNT_EXISTS")
    assert (await browser.sign_in(own, "new")).status_code == 303
    assert (await browser.get(of(acme))).status_code == 200  # by the default role
    assert code_of(await browser.get(of(labs))) == (404, "NOT_FOUND")
    async with db.transaction(sessions) as session:
        new = await people.by_email(session, "new@example.com")
        assert new is not None
        await members.add(session, labs.tenant.id, new.id, Role.OWNER)
        await operators.create(session, name="new", person_id=new.id)
    assert code_of(await browser.get(of(labs))) == (404, "NOT_FOUND")  # Acme does not vouch for people at Labs
    assert code_of(await browser.get("/api/v1/admin/tenants")) == (403, "FORBIDDEN")
    me = (await browser.get("/api/v1/session")).json()
    assert ([tenant["id"] for tenant in me["tenants"]], me["operator"]) == ([f"ten_{acme.tenant.id.hex}"], None)
    password = {"current_password": "x" * 12, "new_password": "correct horse battery staple"}
    answer = await browser.post("/api/v1/me/password", json=password, headers={"x-csrf-token": me["csrf_token"]})
    assert code_of(answer) == (409, "PASSWORD_NOT_SET")
    shown = (await browser.get("/api/v1/auth/providers")).json()["items"]
    assert [item["name"] for item in shown] == ["Mock"]
    shown = (await browser.get("/api/v1/auth/providers?email_domain=example.com")).json()["items"]
    assert [item["name"] for item in shown] == ["Acme's own", "Mock"]


async def test_nobody_is_sent_elsewhere_after_sign_in(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    for text in ("https://evil.example", "//evil.example", "/\\evil.example", "/%0d\n", "javascript:x", "keys", ""):
        assert (await browser.sign_in(at, "ann", text)).headers["location"] == "/", text
    assert (await browser.sign_in(at, "ann", "/a/b?c=d")).headers["location"] == "/a/b?c=d"
    denied = await browser.start(at)
    state = parse_qs(urlsplit(denied).query)["state"][0]
    answer = await browser.get(f"/api/v1/auth/oidc/{at.id}/callback?error=access_denied&state={state}")
    assert code_of(answer) == (401, "SIGN_IN_REFUSED")
    assert "access_denied" in answer.json()["detail"]


async def test_disabling_or_deleting_a_provider_ends_what_it_gave(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    await browser.sign_in(at, "ann")
    assert (await at.change(enabled=False)).status_code == 200
    assert code_of(await browser.get(of(acme))) == (401, "SESSION_ENDED")
    assert (await browser.get(f"/api/v1/auth/oidc/{at.id}/start")).status_code == 404
    await at.change(enabled=True)
    assert (await browser.sign_in(at, "ann")).status_code == 303
    assert (await admin.call("DELETE", at.path)).status_code == 204
    assert code_of(await browser.get(of(acme))) == (401, "SESSION_ENDED")
    assert (await admin.get(at.path)).status_code == 404


async def _csrf(services: Services, browser: Browser) -> dict[str, str]:
    from tenants.sessions import csrf_token

    return {"x-csrf-token": csrf_token(services.signing, browser.cookies["tidegate_session"])}


async def test_signing_out_says_where_the_provider_ends_its_own_session(
    liar: IdentityProvider, admin: Client, browser: Browser, acme: Customer, services: Services
) -> None:
    liar.users["ann"] = {"email": "ann@example.com", "groups": ["dev"]}
    at = await register(admin, liar, "Own")
    await at.map(gives("dev", acme, "developer"))
    await browser.sign_in(at, "ann")
    assert (await browser.post("/api/v1/auth/oidc/sign-out")).status_code == 403  # without the CSRF token
    answer = await browser.post("/api/v1/auth/oidc/sign-out", headers=await _csrf(services, browser))
    url = urlsplit(answer.json()["redirect_to"])
    assert f"{url.scheme}://{url.netloc}{url.path}" == f"{liar.issuer}/logout"
    assert parse_qs(url.query)["id_token_hint"][0].count(".") == 2
    assert "tidegate_session" not in browser.cookies


async def test_operators_set_providers_up_and_no_secret_is_read_back(
    liar: IdentityProvider, admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    from tenants.types import OperatorRole
    from tests.factories.people import operator_person

    at: Registered = await register(admin, liar, "Own")
    for answer in (await admin.get(at.path), await admin.get("/api/v1/admin/identity-providers")):
        assert "s3cret" not in answer.text
        assert "client_secret" not in answer.text
    assert (await admin.get(at.path)).json()["has_secret"]
    tried = await admin.post(f"{at.path}/test")
    assert tried.json()["token_endpoint"] == f"{liar.issuer}/token"
    liar.discovery_lies = {"issuer": "https://evil.example"}
    assert code_of(await admin.post(f"{at.path}/test")) == (502, "IDENTITY_PROVIDER_INVALID")
    liar.discovery_lies = {"token_endpoint": "http://169.254.169.254/latest"}
    assert code_of(await admin.post(f"{at.path}/test")) == (502, "IDENTITY_PROVIDER_INVALID")
    liar.down = True
    away = await admin.post(f"{at.path}/test")
    assert code_of(away) == (503, "IDENTITY_PROVIDER_UNAVAILABLE")
    assert int(away.headers["retry-after"]) >= 1
    changed = await at.change(name="Renamed", client_secret="another", email_domains=["example.com"])
    assert changed.json()["name"] == "Renamed"
    assert (
        await admin.post(
            "/api/v1/admin/identity-providers", json={"name": "Twice", "issuer": liar.issuer, "client_id": CLIENT_ID}
        )
    ).status_code == 409
    for bad in ({"scopes": "email"}, {"default_role": "owner"}, {"email_domains": ["A@b"]}, {"name": None}):
        assert (await at.change(**bad)).status_code in {400, 422}, bad
    support = anonymous.visited_by(await operator_person(sessions, OperatorRole.SUPPORT))
    for method, path in (("POST", f"{at.path}/test"), ("PATCH", at.path), ("GET", at.path)):
        assert code_of(await support.call(method, path, json={}))[0] == 403
    async with db.transaction(sessions) as session:
        (record, *_) = await audit.search(session, AuditFilter(action="identity_provider.update"), after=None, limit=1)
    assert record.details == {
        "name": ["Own", "Renamed"],
        "client_secret": "set",
        "email_domains": [[], ["example.com"]],
    }
    assert "another" not in record.details_text

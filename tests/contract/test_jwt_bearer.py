"""OIDC tokens at a gateway that runs as its own process: whose they are, what they may do, and until when."""

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import openai
import pytest
from joserfc import jwt

from billing.spool_reader import SpoolReader
from core import db
from core.clock import SystemClock
from core.settings import Database
from engine import simulator
from engine.simulator import Options
from tenants import identities, identity_providers, members, people_queries, person_status, projects, tenants
from tenants.identity_providers import IdentityProvider as Provider
from tenants.oidc.claims import Grant, GroupMapping
from tenants.oidc.flow import Profile
from tenants.types import Member, Person, Role
from tests.factories.gateway_process import SEALING, Process, Seeded, gateway_process, seed
from tests.factories.identity_provider import IdentityProvider, identity_provider, rsa_key

AUDIENCE = "tidegate-gateway"
HELLO: Any = [{"role": "user", "content": "[[sim n=5 p=30]] hello"}]
SETTINGS = {"TIDEGATE_OIDC__ALLOW_LOOPBACK": "true", "TIDEGATE_OIDC__REFETCH_MIN_S": "0"}


@dataclass(frozen=True)
class Running:
    """A gateway, a provider whose tokens it takes, and Ada, who has signed in once as a developer by her groups."""

    gateway: Process
    seeded: Seeded
    issuer: IdentityProvider
    provider: Provider
    ada: Person
    sessions: db.Sessions
    client: httpx.AsyncClient

    def token(self, subject: str = "ada", **claims: Any) -> str:
        return self.issuer.mint(subject, claims.pop("aud", AUDIENCE), **claims)

    async def ask(self, token: str, project: str = "", padding: int = 0) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **({"OpenAI-Project": project} if project else {})}
        body = {"model": "sim", "messages": HELLO, "stop": ["x" * padding] if padding else []}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def refused(self, token: str, project: str = "") -> tuple[int, str]:
        answer = await self.ask(token, project)
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    async def sign_in(self, subject: str, *groups: str) -> Person:
        """What the control plane does when somebody comes back from the provider."""
        profile = Profile(subject, {"email": f"{subject}@example.com", "groups": list(groups)}, "", "")
        async with db.transaction(self.sessions) as session:
            return (await identities.recognise(session, self.provider, profile, now=SystemClock().now())).person

    async def suspend(self) -> None:
        async with db.transaction(self.sessions) as session:
            await person_status.suspend(session, self.ada.id, now=SystemClock().now())

    async def resume(self) -> None:
        async with db.transaction(self.sessions) as session:
            await person_status.resume(session, self.ada.id)

    async def members(self) -> list[Member]:
        async with db.transaction(self.sessions) as session:
            rows = await people_queries.members_of_person(session, self.ada.id)
            return [members.member_of(row) for row in rows]


@pytest.fixture
async def running(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> AsyncIterator[Running]:
    engine = await simulator.serve(Options(), SystemClock())
    host, port = engine.addresses[0][:2]
    try:
        async with identity_provider() as issuer:
            seeded = await seed(sessions, f"http://{host}:{port}")
            async with db.transaction(sessions) as session:
                provider = await identity_providers.create(
                    session,
                    {"name": "Own", "client_id": "c", "groups_claim": "groups", "gateway_audience": AUDIENCE},
                    issuer=issuer.issuer,
                    client_secret="",
                    sealing_key=SEALING,
                    loopback=True,
                )
                tenant = seeded.customer.tenant.id
                mapping = GroupMapping("dev", grant=Grant(tenant, None, Role.DEVELOPER))
                await identity_providers.set_mappings(session, provider.id, [mapping])
            async with (
                gateway_process(database_settings, valkey, tmp_path, settings=SETTINGS) as gateway,
                httpx.AsyncClient(base_url=gateway.url, timeout=20) as client,
            ):
                found = Running(gateway, seeded, issuer, provider, None, sessions, client)  # type: ignore[arg-type]  # signs in below
                ada = await found.sign_in("ada", "dev")
                yield Running(gateway, seeded, issuer, provider, ada, sessions, client)
    finally:
        await engine.cleanup()


async def within_a_second(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(1):
        while not await condition():
            pass


async def test_tokens_of_a_provider(running: Running) -> None:
    """One process for all of it, because a start costs seconds."""
    await _a_token_calls_as_a_member_of_its_project(running)
    await _what_is_not_a_good_token_for_us_is_refused(running)
    await _keys_rotate_and_are_trusted_while_the_provider_is_away(running)
    await _the_header_names_the_project(running)
    await _a_group_that_the_token_no_longer_tells_gives_nothing(running)
    await _suspension_and_removal_are_obeyed_within_a_second(running)
    await _a_provider_that_is_disabled_vouches_for_nobody(running)


async def _a_token_calls_as_a_member_of_its_project(running: Running) -> None:
    token = running.token()
    async with openai.AsyncOpenAI(base_url=running.gateway.url + "/v1", api_key=token, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["sim"]
        answer = await client.chat.completions.create(model="sim", messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    (member,) = await running.members()
    (event,) = SpoolReader(running.gateway.home / "spool" / "g1").read(10)
    customer = running.seeded.customer
    assert (event.tenant_id, event.project_id, event.key_id) == (customer.tenant.id, customer.project.id, member.id)
    by_key = await running.ask(customer.secret)
    assert by_key.status_code == 200


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


async def _what_is_not_a_good_token_for_us_is_refused(running: Running) -> None:
    issuer, now = running.issuer, running.issuer.now_s
    claims = {"iss": issuer.issuer, "sub": "ada", "aud": AUDIENCE, "exp": now + 60, "iat": now}
    unsigned = f"{_part({'alg': 'none', 'kid': 'one'})}.{_part(claims)}."
    text = f"{_part({'alg': 'HS256', 'kid': 'one'})}.{_part(claims)}"
    public: Any = issuer.keys[0]
    mac = hmac.digest(public.as_pem(private=False), text.encode(), "sha256")
    shared = f"{text}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
    stranger = rsa_key("one")
    forged = jwt.encode({"alg": "RS256", "kid": "one"}, claims, stranger, algorithms=["RS256"])
    good = running.token()
    changed = good[:-20] + ("A" if good[-20] != "A" else "B") + good[-19:]
    for token in (
        unsigned,
        shared,
        forged,
        changed,
        running.token(aud="another"),
        running.token(aud=[]),
        running.token(iss="https://evil.example"),
        running.token(exp=now - 61),
        running.token(nbf=now + 120),
        running.token(exp=None),
        running.token(header={"kid": "unknown"}),
        running.token(header={"kid": None}),
        "eyJ.e.x",
        good + ".",
    ):
        status, code = await running.refused(token)
        assert (status, code) in {(401, "INVALID_TOKEN"), (401, "INVALID_API_KEY")}, token
    assert (await running.ask(running.token(exp=now - 50))).status_code == 200  # clocks may differ by a minute
    assert await running.refused(running.token("never-signed-in")) == (403, "NOT_SIGNED_IN_YET")
    await running.sign_in("bob", "dev")
    bob = running.token("bob")
    await within_a_second(lambda: _served(running, bob))


async def _served(running: Running, token: str, project: str = "") -> bool:
    return (await running.ask(token, project)).status_code == 200


async def _keys_rotate_and_are_trusted_while_the_provider_is_away(running: Running) -> None:
    running.issuer.rotate("two")
    assert (await running.ask(running.token())).status_code == 200
    running.issuer.rotate("three")
    large = running.token()
    assert (await running.ask(large, padding=70_000)).status_code == 503  # its body is not taken on trust
    await within_a_second(lambda: _served(running, large))
    running.issuer.down = True
    assert (await running.ask(running.token())).status_code == 200
    running.issuer.rotate("four")
    assert await running.refused(running.token()) == (401, "INVALID_TOKEN")
    running.issuer.down = False
    assert (await running.ask(running.token())).status_code == 200


async def _the_header_names_the_project(running: Running) -> None:
    tenant = running.seeded.customer.tenant.id
    async with db.transaction(running.sessions) as session:
        other = await projects.create(session, tenant, name="second")
        elsewhere = await tenants.create(session, name="elsewhere", currency=running.seeded.customer.tenant.currency)
        foreign = await projects.create(session, elsewhere.id, name="main")
    token = running.token()

    async def ambiguous() -> bool:
        return await running.refused(token) == (400, "INVALID_REQUEST")

    await within_a_second(ambiguous)
    for project in (other.id, running.seeded.customer.project.id):
        assert (await running.ask(token, f"prj_{project.hex}")).status_code == 200
    events = SpoolReader(running.gateway.home / "spool" / "g1").read(1000)
    assert events[-2].project_id == other.id
    for text in (f"prj_{foreign.id.hex}", f"prj_{UUID(int=0).hex}", "nonsense"):
        assert await running.refused(token, text) == (404, "NOT_FOUND")
    models = await running.client.get(
        "/v1/models", headers={"Authorization": f"Bearer {token}", "OpenAI-Project": f"prj_{other.id.hex}"}
    )
    assert models.status_code == 200


async def _a_group_that_the_token_no_longer_tells_gives_nothing(running: Running) -> None:
    project = f"prj_{running.seeded.customer.project.id.hex}"
    assert (await running.ask(running.token(groups=["dev", "x"]), project)).status_code == 200
    assert await running.refused(running.token(groups=["x"]), project) == (403, "NO_ACCESS")


async def _suspension_and_removal_are_obeyed_within_a_second(running: Running) -> None:
    customer, token = running.seeded.customer, running.token()
    project = f"prj_{customer.project.id.hex}"

    async def code(expected: str) -> None:
        async def told() -> bool:
            answer = await running.ask(token, project)
            return answer.status_code == 403 and answer.json()["error"]["code"] == expected

        await within_a_second(told)

    async def served() -> None:
        await within_a_second(lambda: _served(running, token, project))

    await served()
    await running.suspend()
    await code("PERSON_SUSPENDED")
    await running.resume()
    await served()
    async with db.transaction(running.sessions) as session:
        await projects.suspend(session, customer.tenant.id, customer.project.id)
    await code("PROJECT_SUSPENDED")
    async with db.transaction(running.sessions) as session:
        await projects.resume(session, customer.tenant.id, customer.project.id)
    await served()
    async with db.transaction(running.sessions) as session:
        await tenants.suspend(session, customer.tenant.id)
    await code("TENANT_SUSPENDED")
    async with db.transaction(running.sessions) as session:
        await tenants.resume(session, customer.tenant.id)
    await served()
    await running.sign_in("ada")  # no group any more
    await code("NO_ACCESS")
    async with db.transaction(running.sessions) as session:
        await members.add(session, customer.tenant.id, running.ada.id, Role.VIEWER)
    await code("NO_ACCESS")  # a viewer calls no model


async def _a_provider_that_is_disabled_vouches_for_nobody(running: Running) -> None:
    token, project = running.token("bob"), f"prj_{running.seeded.customer.project.id.hex}"
    assert await _served(running, token, project)
    async with db.transaction(running.sessions) as session:
        await identity_providers.update(
            session, running.provider.id, {"enabled": False}, sealing_key=SEALING, now=SystemClock().now()
        )

    async def gone() -> bool:
        return await running.refused(token, project) == (401, "INVALID_TOKEN")

    await within_a_second(gone)

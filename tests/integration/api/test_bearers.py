"""What a gateway knows of tokens and people, when things happen at the wrong moment."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from api.inference.bearers import Bearers
from api.inference.directory import Directory
from core import db
from core.clock import ManualClock, SystemClock
from core.errors import PlatformError
from core.settings import Database, Oidc
from tenants import identities, identity_providers, person_status
from tenants.identity_providers import IdentityProvider as Provider
from tenants.oidc.claims import Grant, GroupMapping
from tenants.oidc.clients import Clients
from tenants.oidc.flow import Profile
from tenants.types import Person, Role
from tests.factories.identity_provider import IdentityProvider, identity_provider
from tests.factories.tenants import PEPPER, Customer, customer

AUDIENCE = "gateway"


class Interrupted:
    """Sessions of which the first lets something happen after its reads and before its reader goes on."""

    def __init__(self, inner: db.Sessions) -> None:
        self._inner = inner
        self.then: Callable[[], Any] | None = None

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[AsyncSession]:
        async with self._inner() as session:
            yield session
        if self.then is not None:
            then, self.then = self.then, None
            await then()


@dataclass
class World:
    """Ada, who has signed in by a provider whose tokens gateways take."""

    issuer: IdentityProvider
    provider: Provider
    made: Customer
    ada: Person
    sessions: db.Sessions

    async def bearers(self, sessions: Any = None, clock: Any = None) -> Bearers:
        directory = Directory()
        directory.loaded = True
        found = Bearers(
            directory,
            self.sessions if sessions is None else sessions,
            Clients(Oidc(allow_loopback=True, refetch_min_s=0), clock or SystemClock()),
            PEPPER,
        )
        await found.load()
        return found

    async def suspend(self) -> None:
        async with db.transaction(self.sessions) as session:
            await person_status.suspend(session, self.ada.id, now=SystemClock().now())


@pytest.fixture
async def world(sessions: db.Sessions) -> AsyncIterator[World]:
    made = await customer(sessions)
    async with identity_provider() as issuer:
        async with db.transaction(sessions) as session:
            provider = await identity_providers.create(
                session,
                {"name": "Own", "client_id": "c", "groups_claim": "groups", "gateway_audience": AUDIENCE},
                issuer=issuer.issuer,
                client_secret="",
                sealing_key=bytes(32),
                loopback=True,
            )
            mapping = GroupMapping("dev", grant=Grant(made.tenant.id, made.project.id, Role.DEVELOPER))
            await identity_providers.set_mappings(session, provider.id, [mapping])
            profile = Profile("ada", {"email": "ada@example.com", "groups": ["dev"]}, "", "")
            found = await identities.recognise(session, provider, profile, now=SystemClock().now())
        yield World(issuer, provider, made, found.person, sessions)


async def test_a_suspension_while_a_person_is_read_is_not_missed(world: World) -> None:
    """Its news comes when nothing is known of the person yet, and so finds nobody to refuse."""
    interrupted = Interrupted(world.sessions)
    bearers = await world.bearers(interrupted)

    async def suspended_and_told() -> None:
        await world.suspend()
        await bearers.follow({"person": [world.ada.id]})

    interrupted.then = suspended_and_told
    with pytest.raises(PlatformError) as caught:
        await bearers.find(world.issuer.mint("ada", AUDIENCE), b"")
    assert caught.value.code == "PERSON_SUSPENDED"
    await bearers.close()


async def test_who_is_known_goes_on_with_postgres_away_and_nobody_else_is_let_in(
    world: World, database_settings: Database
) -> None:
    away = db.create_engine(Database.model_validate({"url": "postgresql://x@127.0.0.1:1/x"}))
    bearers = await world.bearers()
    known = world.issuer.mint("ada", AUDIENCE)
    digest = await bearers.find(known, b"")
    bearers._sessions = db.create_sessions(away)
    assert await bearers.find(known, b"") == digest
    assert await bearers.find(world.issuer.mint("ada", AUDIENCE, jti="another"), b"") != digest
    with pytest.raises(PlatformError) as caught:
        await bearers.find(world.issuer.mint("bob", AUDIENCE), b"")
    assert (caught.value.code, caught.value.retry_after_s) == ("SERVICE_UNAVAILABLE", 1)
    await bearers.close()
    await away.dispose()


async def test_an_expired_token_is_refused_and_forgotten(world: World) -> None:
    clock = ManualClock(SystemClock().now())
    bearers = await world.bearers(clock=clock)
    token = world.issuer.mint("ada", AUDIENCE, exp=world.issuer.now_s + 100)
    digest = await bearers.find(token, b"")
    clock.advance(158)
    assert bearers.known(token, b"") == digest
    clock.advance(4)
    with pytest.raises(PlatformError, match="expired"):
        bearers.known(token, b"")
    assert digest in bearers._directory.principals
    bearers.sweep(clock.now_us())
    assert bearers._directory.principals == {}
    await bearers.close()


async def test_a_token_is_nobodys_under_another_project_or_cut_short(world: World) -> None:
    bearers = await world.bearers()
    token, project = world.issuer.mint("ada", AUDIENCE), f"prj_{world.made.project.id.hex}".encode()
    with_project, without = await bearers.find(token, project), await bearers.find(token, b"")
    principals = bearers._directory.principals
    assert with_project != without
    assert principals[with_project] is principals[without]
    for wrong in (token[:-1], token + "A", token.upper()):
        with pytest.raises(PlatformError) as caught:
            await bearers.find(wrong, b"")
        assert caught.value.code == "INVALID_TOKEN"
    assert len(principals) == 2
    await bearers.close()

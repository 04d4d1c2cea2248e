"""`tidegate secrets`: turn the pepper or the signing key of a home, and see what the old ones still carry."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from catalog.registry import versions
from catalog.registry.manifest import keys_of
from cli import home as homes
from cli import installation, screen
from cli.books import database
from core import db
from core.settings import Settings
from tenants import key_secrets
from tenants.credentials import peppers_of
from tenants.key_types import PepperUse

RESTART = "Restart the platform: it takes effect with the next start."


def rotate_pepper(home_path: Path) -> int:
    """Make a new pepper; the one before is believed until it is dropped."""
    home, old = _secrets(home_path)
    previous = (old.pepper, *old.previous_peppers)
    homes.save_secrets(home, msgspec.structs.replace(old, pepper=homes.random_hex(), previous_peppers=previous))
    screen.say(f"There is a new pepper. API keys are stored under it as they are used. {RESTART}")
    return 0


def rotate_signing(home_path: Path) -> int:
    """Make a new signing key; what the one before signed is believed until it is dropped."""
    home, old = _secrets(home_path)
    previous = (old.signing, *old.previous_signing)
    homes.save_secrets(home, msgspec.structs.replace(old, signing=homes.random_hex(), previous_signing=previous))
    screen.say(f"There is a new signing key. {RESTART}")
    return 0


def drop_previous(home_path: Path, *, force: bool) -> int:
    """Forget the previous peppers and signing keys; refused while something living needs one, unless forced."""
    home, old = _secrets(home_path)
    carrying = [use for use in _use(home_path) if not use.current and (use.api_keys or use.operator_tokens)]
    manifests = _manifests(home_path) if old.previous_signing and not force else 0
    if (carrying or manifests) and not force:
        for use in carrying:
            screen.say(_line(use))
        if manifests:
            screen.say(
                f"{screen.count(manifests, 'manifest')} of model versions: the worker signs them anew in an hour."
            )
        screen.say("These may stop working. Wait until they were used, or rotate them, or give --force.")
        return 1
    homes.save_secrets(home, msgspec.structs.replace(old, previous_peppers=(), previous_signing=()))
    screen.say(f"The previous peppers and signing keys are forgotten. {RESTART}")
    return 0


def status(home_path: Path) -> int:
    """Print what each pepper still carries."""
    for use in _use(home_path):
        screen.say(_line(use))
    return 0


def _manifests(home_path: Path) -> int:
    """Return how many manifests of model versions the present signing key has not signed yet."""

    async def ask(settings: Settings) -> int:
        engine = db.create_engine(settings.database)
        try:
            async with db.transaction(db.create_sessions(engine)) as session:
                return await versions.signed_by_previous(session, keys_of(settings.secrets))
        finally:
            await engine.dispose()

    with database(home_path) as settings:
        return asyncio.run(ask(settings))


def _secrets(home_path: Path) -> tuple[homes.Home, homes.HomeSecrets]:
    home = homes.existing_home(home_path)
    return home, homes.load_secrets(home, installation.refuse)


def _use(home_path: Path) -> Sequence[PepperUse]:
    with database(home_path) as settings:
        return asyncio.run(_ask(settings))


async def _ask(settings: Settings) -> Sequence[PepperUse]:
    engine = db.create_engine(settings.database)
    try:
        async with db.transaction(db.create_sessions(engine)) as session:
            return await key_secrets.pepper_use(session, peppers_of(settings.secrets))
    finally:
        await engine.dispose()


def _line(use: PepperUse) -> str:
    what = "current" if use.current else "previous" if use.configured else "not configured"
    name = use.name or "(of before names)"
    return f"pepper {name}  {what}  {use.api_keys} key secrets  {use.operator_tokens} operator tokens"

"""Secrets of a home turn: the old ones are kept beside, and dropped when nothing needs them."""

from pathlib import Path

import pytest

from cli import home as homes
from cli import installation, rotation
from cli.home import HomeSecrets
from core.settings import Settings
from tenants.credentials import peppers_of, signing_keys_of
from tenants.key_types import PepperUse

FIRST = HomeSecrets("11" * 32, "22" * 32, "33" * 32, "owner", "app", "tgo_x", "tg_x")


def _secrets(path: Path) -> HomeSecrets:
    return homes.load_secrets(homes.existing_home(path), installation.refuse)


def _settings(path: Path) -> Settings:
    return installation.settings(homes.existing_home(path), _secrets(path), homes.HomeState(database_port=1))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    homes.load_secrets(homes.open_home(tmp_path), lambda: FIRST)
    return tmp_path


def test_a_new_pepper_stands_before_the_old_ones(home: Path) -> None:
    assert rotation.rotate_pepper(home) == 0
    second = _secrets(home).pepper
    assert rotation.rotate_pepper(home) == 0
    now = _secrets(home)
    assert now.previous_peppers == (second, FIRST.pepper)
    assert len({now.pepper, second, FIRST.pepper}) == 3
    assert (now.signing, now.sealing, now.api_key) == (FIRST.signing, FIRST.sealing, FIRST.api_key)
    assert home.joinpath("secrets.json").stat().st_mode & 0o777 == 0o600
    peppers = peppers_of(_settings(home).secrets)
    assert (peppers.current.hex(), [p.hex() for p in peppers.previous]) == (now.pepper, [second, FIRST.pepper])


def test_a_new_signing_key_leaves_the_old_one_believed(home: Path) -> None:
    assert rotation.rotate_signing(home) == 0
    keys = [key.hex() for key in signing_keys_of(_settings(home).secrets)]
    assert keys == [_secrets(home).signing, FIRST.signing]
    assert _secrets(home).pepper == FIRST.pepper


@pytest.mark.parametrize(("left", "force", "code"), [(0, False, 0), (3, False, 1), (3, True, 0)])
def test_an_old_pepper_is_dropped_when_nothing_needs_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, left: int, force: bool, code: int
) -> None:
    rotation.rotate_pepper(home)
    uses = [PepperUse("a" * 12, True, True, 9, 1), PepperUse("b" * 12, False, True, left, 0)]
    monkeypatch.setattr(rotation, "_use", lambda _: uses)
    assert rotation.drop_previous(home, force=force) == code
    assert bool(_secrets(home).previous_peppers) == bool(code)

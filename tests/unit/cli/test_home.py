"""The home folder: private, locked, with secrets that are made once."""

import os
import tempfile
from pathlib import Path

import pytest

from cli import home as homes
from cli.home import HomeSecrets


def secrets(mark: str) -> HomeSecrets:
    return HomeSecrets(mark, mark, mark, mark, mark)


def test_everything_in_it_is_for_its_owner_only(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    home = homes.open_home(tmp_path / "home")
    homes.load_secrets(home, lambda: secrets("a"))
    homes.save_state(home, homes.HomeState())
    modes = {path.name: path.stat().st_mode & 0o777 for path in (home.path, *home.path.iterdir())}
    assert modes.pop("secrets.json") == 0o600
    assert set(modes.values()) == {0o700}


def test_secrets_are_made_once(tmp_path: Path) -> None:
    home = homes.open_home(tmp_path)
    assert homes.load_secrets(home, lambda: secrets("first")).pepper == "first"
    assert homes.load_secrets(home, lambda: secrets("second")).pepper == "first"


def test_lost_secrets_are_not_replaced_under_an_existing_database(tmp_path: Path) -> None:
    home = homes.open_home(tmp_path)
    (home.path / "postgres" / "data").mkdir()
    with pytest.raises(homes.HomeError, match="cannot be opened without it"):
        homes.load_secrets(home, lambda: secrets("new"))
    assert not home.secrets_file.exists()


def test_damaged_secrets_are_said_and_kept(tmp_path: Path) -> None:
    home = homes.open_home(tmp_path)
    home.secrets_file.write_text('{"pepper": "top-secret"', encoding="utf-8")
    with pytest.raises(homes.HomeError) as caught:
        homes.load_secrets(home, lambda: secrets("new"))
    assert "cannot be read" in str(caught.value)
    assert "top-secret" not in str(caught.value)
    assert home.secrets_file.read_text(encoding="utf-8") == '{"pepper": "top-secret"'


def test_the_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    home = homes.open_home(tmp_path)
    held = homes.lock(home)
    with pytest.raises(homes.HomeError, match=f"in use by process {os.getpid()}"):
        homes.lock(home)
    os.close(held)
    os.close(homes.lock(home))


def test_a_file_is_not_a_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(homes.HomeError, match="--home"):
        homes.open_home(tmp_path / "file")


def test_sockets_of_a_long_home_lie_in_a_private_folder_that_is_checked_each_time(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    first = homes.open_home(long)
    assert first.run == homes.open_home(long).run
    assert not first.run.is_relative_to(long)
    first.run.chmod(0o777)  # somebody opened it to others
    second = homes.open_home(long)
    try:
        assert second.run != first.run
        assert second.run.stat().st_mode & 0o077 == 0
    finally:
        first.run.rmdir()
        homes.clear_sockets(second)
    assert not second.run.exists()


def test_sockets_of_a_usual_home_lie_in_it_and_stay() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home = homes.open_home(Path(folder))
        assert home.run == home.path / "run"
        homes.clear_sockets(home)
        assert home.run.is_dir()


def test_an_unreadable_list_of_processes_counts_as_none(tmp_path: Path) -> None:
    home = homes.open_home(tmp_path)
    assert homes.load_state(home) == homes.HomeState()
    home.state_file.write_text("{", encoding="utf-8")
    assert homes.load_state(home) == homes.HomeState()

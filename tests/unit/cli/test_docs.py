"""What the docs tell people to type is there: routes, commands and their options."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from api.permissions import RULES
from cli import main

PAGES = ("README.md", "docs/money.md", "docs/models.md", "docs/runbooks/backup.md")
SHAPES = {re.sub(r"\{\w+\}", "{}", path) for _, path in RULES}


def _blocks(page: str) -> str:
    text = (main.ROOT / page).read_text("utf-8")
    return "\n".join(re.findall(r"```\w+\n(.*?)```", text, re.DOTALL))


def _commands(page: str) -> Iterator[list[str]]:
    for line in _blocks(page).splitlines():
        for part in re.split(r"[;&|]+ ", line.split("  #")[0]):
            if part.strip().startswith("tidegate "):
                yield shlex.split(part.strip(), comments=True)[1:]


@pytest.mark.parametrize("page", ["README.md", "docs/money.md"])
def test_every_route_that_is_called_there_exists(page: str) -> None:
    called = re.findall(r"\$API((?:/[\w$-]+)+)", _blocks(page))
    assert len(called) > 10
    for path in called:
        assert "/api/v1" + re.sub(r"\$\w+", "{}", path) in SHAPES, path


@pytest.mark.parametrize("page", ["docs/money.md", "docs/models.md", "docs/runbooks/backup.md"])
def test_every_command_there_is_understood(page: str) -> None:
    commands = list(_commands(page))
    assert len(commands) > 5
    for command in commands:
        typed = [re.sub(r"^\$TODAY$", "2026-11-30", word) for word in command]
        assert isinstance(main._parser().parse_args(typed), argparse.Namespace)


def test_a_command_that_is_not_there_is_found() -> None:
    with pytest.raises(SystemExit):
        main._parser().parse_args(["ledger", "verfiy"])
    assert "/api/v1/admin/price-book" not in SHAPES

"""Roles in words: complete, and in the docs as they are enforced."""

from pathlib import Path

from cli.main import ROOT
from cli.role_page import page
from tenants import roles
from tenants.types import OperatorRole, Role

PAGE = Path("docs/roles.md")


def test_the_docs_say_what_is_enforced() -> None:
    assert (ROOT / PAGE).read_text("utf-8") == page(), f"run: .venv/bin/tidegate roles > {PAGE}"


def test_every_right_has_words_and_every_role_a_row() -> None:
    assert roles.WORDS.keys() == set(roles.Permission)
    assert roles.OPERATOR_WORDS.keys() == set(roles.OperatorPermission)
    assert roles.PERMISSIONS.keys() == roles.SCOPES.keys() == set(Role)
    assert roles.OPERATOR_PERMISSIONS.keys() == set(OperatorRole)


def test_a_line_of_the_page_is_read_as_meant() -> None:
    line = next(line for line in page().splitlines() if "`tenant.close`" in line)
    assert line == "| close the organisation for good | `tenant.close` | yes |  |  |  |  |"

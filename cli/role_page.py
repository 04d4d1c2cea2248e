"""The page of roles: who may do what, in words, from the one table in `tenants.roles`. `tidegate roles` prints it."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from tenants.roles import (
    OPERATOR_PERMISSIONS,
    OPERATOR_WORDS,
    PERMISSIONS,
    SCOPES,
    WORDS,
    OperatorPermission,
    Permission,
)
from tenants.types import OperatorRole, Role, Scope

_HEAD = """# Roles

`tidegate roles` prints this page; a test keeps it equal to the table that the platform enforces (`tenants/roles.py`).
Which route needs which right is in `api/permissions.py`.
"""


def _table(
    first: str, roles: Sequence[StrEnum], rows: Sequence[tuple[str, Sequence[bool]]], name: str = "right"
) -> list[str]:
    lines = [f"| {first} | {name} | " + " | ".join(role.value for role in roles) + " |"]
    lines.append("|---|---|" + ":-:|" * len(roles))
    lines += [f"| {row} | " + " | ".join("yes" if held else "" for held in cells) + " |" for row, cells in rows]
    return lines


def _members() -> list[str]:
    roles = list(Role)
    held: Mapping[Role, frozenset[Permission]] = PERMISSIONS
    rows = [(f"{WORDS[p]} | `{p.value}`", [p in held[role] for role in roles]) for p in Permission]
    return _table("a member may", roles, rows)


def _scopes() -> list[str]:
    roles = list(Role)
    rows = [(f"be good for | `{scope.value}`", [scope in SCOPES[role] for role in roles]) for scope in Scope]
    return _table("an API key of theirs may", roles, rows, "scope")


def _operators() -> list[str]:
    roles = list(OperatorRole)
    rows = [
        (f"{OPERATOR_WORDS[p]} | `{p.value}`", [p in OPERATOR_PERMISSIONS[role] for role in roles])
        for p in OperatorPermission
    ]
    return _table("an operator may", roles, rows)


def page() -> str:
    """Return the page as Markdown."""
    sections = (
        ("Members of a tenant", "A role holds in the whole tenant, or in one project of it.", _members()),
        (
            "Their API keys",
            "A key is never good for more than its maker may give, at its making and at every change.",
            _scopes(),
        ),
        (
            "Operators of the platform",
            "They are no members of any tenant, and no token of theirs can call a model.",
            _operators(),
        ),
    )
    parts = [_HEAD]
    for title, words, table in sections:
        parts.append("\n".join(["", f"## {title}", "", words, "", *table, ""]))
    return "".join(parts)

"""Pure: what a provider's claims mean here. Groups become rights anew at each look; nothing is remembered."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tenants.types import OperatorRole, Role

GROUPS_MAX = 2000
GROUP_MAX = 256
NAME_MAX = 120


@dataclass(frozen=True, slots=True)
class Grant:
    """A role in a tenant, or in one of its projects."""

    tenant_id: UUID
    project_id: UUID | None
    role: Role


@dataclass(frozen=True, slots=True)
class GroupMapping:
    """What a group gives: a role among the operators, or one in a tenant. Exactly one of the two is set."""

    group: str
    operator_role: OperatorRole | None = None
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What a provider gives somebody now."""

    operator_role: OperatorRole | None = None
    grants: frozenset[Grant] = frozenset()

    @property
    def any(self) -> bool:
        return self.operator_role is not None or bool(self.grants)


def groups_of(claims: Mapping[str, Any], claim: str) -> frozenset[str] | None:
    """Return the groups in `claim`, a name or a dotted path such as ``realm_access.roles``; None when it is not there.

    A name that has dots itself, such as ``https://example.com/groups``, is looked up whole first. What is neither a
    text nor a list of texts counts as no groups, as does a list that is too long: an excess gives no rights by chance.
    """
    if not claim:
        return None
    value: Any = claims
    for step in (claim,) if claim in claims else claim.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > GROUPS_MAX:
        return frozenset()
    return frozenset(group for group in listed if isinstance(group, str) and 0 < len(group) <= GROUP_MAX)


def given_by(groups: frozenset[str] | None, mappings: Iterable[GroupMapping], default: Grant | None = None) -> Given:
    """Return what these groups give. Of several operator roles the first of admin, finance, support counts.

    `default` is what everybody has whom the provider lets sign in.
    """
    found = [mapping for mapping in mappings if groups is not None and mapping.group in groups]
    roles = {mapping.operator_role for mapping in found}
    grants = {mapping.grant for mapping in found if mapping.grant is not None}
    if default is not None:
        grants.add(default)
    return Given(next((role for role in OperatorRole if role in roles), None), frozenset(grants))


def email_of(claims: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the e-mail address, empty when none is told, and whether the provider says that it has verified it."""
    email = claims.get("email")
    verified = claims.get("email_verified")
    return (email if isinstance(email, str) else ""), verified is True or verified == "true"


def name_of(claims: Mapping[str, Any]) -> str:
    """Return how the person is called, on one line; empty when it is not told."""
    name = claims.get("name")
    return (
        " ".join("".join(c if c.isprintable() else " " for c in name).split())[:NAME_MAX]
        if isinstance(name, str)
        else ""
    )


def in_domains(email: str, domains: Iterable[str]) -> bool:
    """Say whether the address is in one of these domains exactly; a subdomain is another one."""
    local, _, domain = email.lower().rpartition("@")
    return bool(local) and domain in set(domains)

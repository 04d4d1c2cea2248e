"""Rights: the union of memberships, and nobody gives more than they have."""

from itertools import combinations
from uuid import UUID

import pytest

from tenants.roles import PERMISSIONS, SCOPES, Permission, may_give, rights_of
from tenants.types import Role, Scope

HERE, THERE = UUID(int=1), UUID(int=2)


def test_a_role_in_a_project_holds_there_only() -> None:
    rights = rights_of([(HERE, Role.ADMIN), (None, Role.VIEWER)])
    assert rights.allow(Permission.KEY_WRITE, HERE)
    assert not rights.allow(Permission.KEY_WRITE, THERE)
    assert not rights.allow(Permission.KEY_WRITE)
    assert rights.allow_anywhere(Permission.KEY_WRITE)
    assert rights.allow(Permission.USAGE_READ, THERE)
    assert not rights.allow_anywhere(Permission.TENANT_CLOSE)


@pytest.mark.parametrize(("first", "second"), list(combinations(Role, 2)))
def test_two_memberships_allow_what_either_allows(first: Role, second: Role) -> None:
    rights = rights_of([(None, first), (HERE, second)])
    for permission in Permission:
        assert rights.allow(permission, HERE) == (permission in PERMISSIONS[first] | PERMISSIONS[second])
    assert rights.scopes(HERE) == SCOPES[first] | SCOPES[second]
    assert rights.scopes(THERE) == SCOPES[first]


def test_no_membership_allows_nothing() -> None:
    rights = rights_of([])
    assert not rights.any
    assert not any(rights.allow_anywhere(permission) for permission in Permission)
    assert rights.scopes(HERE) == frozenset()


def test_who_may_give_which_role() -> None:
    given = {role: {other for other in Role if may_give(rights_of([(None, role)]), other)} for role in Role}
    assert given[Role.OWNER] == set(Role)
    assert given[Role.ADMIN] == set(Role) - {Role.OWNER}
    assert given[Role.DEVELOPER] == {Role.DEVELOPER, Role.VIEWER}
    assert given[Role.FINANCE] == {Role.FINANCE, Role.VIEWER}
    assert given[Role.VIEWER] == {Role.VIEWER}


def test_only_who_manages_gives_keys_that_manage() -> None:
    assert {role for role in Role if Scope.MANAGE in SCOPES[role]} == {Role.OWNER, Role.ADMIN}

"""Claims become rights: by the groups as they are now, and by nothing else."""

from typing import Any
from uuid import UUID

import pytest

from tenants.oidc.claims import Given, Grant, GroupMapping, email_of, given_by, groups_of, in_domains, name_of
from tenants.types import OperatorRole, Role

ACME, LABS, PROJECT = UUID(int=1), UUID(int=2), UUID(int=3)
DEVELOPERS = Grant(ACME, None, Role.DEVELOPER)
FINANCE = Grant(ACME, None, Role.FINANCE)
LABS_ADMIN = Grant(LABS, PROJECT, Role.ADMIN)
MAPPINGS = (
    GroupMapping("dev", grant=DEVELOPERS),
    GroupMapping("money", grant=FINANCE),
    GroupMapping("labs", grant=LABS_ADMIN),
    GroupMapping("ops", operator_role=OperatorRole.SUPPORT),
    GroupMapping("root", operator_role=OperatorRole.ADMIN),
    GroupMapping("dev", operator_role=OperatorRole.FINANCE),
)


@pytest.mark.parametrize(
    ("claims", "claim", "expected"),
    [
        ({"groups": ["a", "b"]}, "groups", {"a", "b"}),
        ({"groups": "a"}, "groups", {"a"}),
        ({"groups": []}, "groups", set()),
        ({"realm_access": {"roles": ["r"]}}, "realm_access.roles", {"r"}),  # Keycloak
        ({"https://example.com/groups": ["x"]}, "https://example.com/groups", {"x"}),  # Auth0
        ({"groups": ["a", 7, None, "", "x" * 257, ["b"]]}, "groups", {"a"}),
        ({"groups": {"a": True}}, "groups", set()),
        ({"groups": ["g"] * 2001}, "groups", set()),
        ({"_claim_names": {"groups": "src1"}}, "groups", None),  # Entra ID, when there are too many
        ({"realm_access": "r"}, "realm_access.roles", None),
        ({"groups": ["a"]}, "", None),
        ({}, "groups", None),
    ],
)
def test_groups_are_read_where_providers_put_them(
    claims: dict[str, Any], claim: str, expected: set[str] | None
) -> None:
    assert groups_of(claims, claim) == expected


def test_a_group_gives_what_it_is_mapped_to_and_no_group_gives_nothing() -> None:
    assert given_by(frozenset({"money"}), MAPPINGS) == Given(None, frozenset({FINANCE}))
    assert given_by(frozenset({"dev"}), MAPPINGS) == Given(OperatorRole.FINANCE, frozenset({DEVELOPERS}))
    assert given_by(frozenset({"labs", "money"}), MAPPINGS).grants == {FINANCE, LABS_ADMIN}
    assert not given_by(frozenset({"DEV", "dev ", "unknown"}), MAPPINGS).any
    assert not given_by(frozenset(), MAPPINGS).any
    assert not given_by(None, MAPPINGS).any


def test_of_several_operator_roles_admin_counts_before_finance_before_support() -> None:
    assert given_by(frozenset({"ops", "dev"}), MAPPINGS).operator_role is OperatorRole.FINANCE
    assert given_by(frozenset({"ops", "dev", "root"}), MAPPINGS).operator_role is OperatorRole.ADMIN


def test_the_default_is_for_everybody_beside_what_groups_give() -> None:
    viewer = Grant(ACME, None, Role.VIEWER)
    assert given_by(None, MAPPINGS, viewer).grants == {viewer}
    assert given_by(frozenset({"money"}), MAPPINGS, viewer).grants == {viewer, FINANCE}


def test_an_address_is_verified_only_when_the_provider_says_so() -> None:
    assert email_of({"email": "a@b.c", "email_verified": True}) == ("a@b.c", True)
    assert email_of({"email": "a@b.c", "email_verified": "true"}) == ("a@b.c", True)  # AWS Cognito
    for claimed in (False, None, "false", 1, "yes"):
        assert email_of({"email": "a@b.c", "email_verified": claimed}) == ("a@b.c", False)
    assert email_of({"email": 7}) == email_of({}) == ("", False)


def test_a_domain_is_met_exactly() -> None:
    assert in_domains("Ada@Example.com", ["example.com"])
    for email in ("ada@sub.example.com", "ada@example.com.evil.net", "example.com", "ada@notexample.com", ""):
        assert not in_domains(email, ["example.com"])


def test_a_name_is_one_printable_line() -> None:
    assert name_of({"name": " Ada\n\tLovelace\x00 "}) == "Ada Lovelace"
    assert len(name_of({"name": "x" * 500})) == 120
    assert name_of({"name": ["Ada"]}) == name_of({}) == ""

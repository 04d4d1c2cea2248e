"""What a tenant owns is asked for by tenant. The few queries that work across tenants are listed with their reasons."""

import ast
import re
from pathlib import Path

from tests.architecture.rules import ROOT

ACROSS_TENANTS = {
    "tenants/key_queries.py:principal_rows_by_digest": "a key is found by its digest; the tenant is what is asked",
    "tenants/key_queries.py:read_by_digest": "the same, for a gateway",
    "tenants/queries.py:insert_named": "the row brings its tenant",
    "tenants/key_queries.py:mark_used": "the worker notes last uses of many keys; each comes with its tenant",
    "tenants/tenant_queries.py:tenants_to_erase": "the worker walks all closed tenants",
    "tenants/people_queries.py:members_of_person": "who signs in sees their memberships everywhere",
    "tenants/invite_queries.py:open_operator_count": "invites to the operators are no tenant's",
    "tenants/invite_queries.py:revoke_same_operator": "invites to the operators are no tenant's",
    "tenants/invite_queries.py:operator_invite": "invites to the operators are no tenant's",
    "tenants/invite_queries.py:operator_invites": "invites to the operators are no tenant's",
    "tenants/invite_queries.py:lock_by_digest": "who has the link is invited; the tenant is what is asked",
    "tenants/people_queries.py:delete_memberships": "who is deleted leaves every tenant",
    "tenants/people_queries.py:revoke_invites_by": "who is deleted has invited nobody, wherever",
    "tenants/people_queries.py:insert_member": "the row brings its tenant",
    "tenants/limit_queries.py:all_rules": "gateways load every limit",
    "tenants/limit_queries.py:rules_on_plan": "gateways follow a changed plan, whatever tenants are on it",
    "tenants/limit_queries.py:tenants_limited": "the worker walks all tenants that have a budget",
    "tenants/limit_queries.py:plan_rule": "a plan's rule has no tenant",
    "tenants/limit_queries.py:plan_changes": "a plan's history has no tenant",
    "tenants/limit_queries.py:plan_change": "a plan's history has no tenant",
    "tenants/identity_queries.py:given_members": "a provider gives roles in any tenant",
    "tenants/identity_queries.py:member_tenants": "whose account may be linked depends on all of them",
    "tenants/identity_queries.py:delete_provider": "all that a provider gave goes with it",
    "tenants/identity_queries.py:people_of_member": "gateways follow one changed membership",
    "tenants/identity_queries.py:tenant_of_project": "gateways follow one changed project",
    "tenants/identity_queries.py:bearer_rows": "a token of a person is good wherever the person is a member",
    "billing/price_queries.py:put_items": "price items are the platform's; a tenant override names its tenant",
    "billing/price_queries.py:copy_items": "a new draft begins with all items",
    "billing/price_queries.py:items": "a price version whole, for operators and the price table",
    "billing/price_queries.py:discounts": "a price version whole, as its items",
    "billing/price_queries.py:versions_in_force": "the price table holds all tenants' overrides",
    "billing/price_preview_queries.py:offers": "operators preview prices on the usage of all tenants",
    "billing/price_preview_queries.py:day": "operators preview prices on the usage of all tenants",
    "billing/price_preview_queries.py:unpriced": "operators preview prices on the usage of all tenants",
    "billing/queries.py:last_uses": "the worker notes last uses of all keys",
    "billing/queries.py:balances_after": "the reconciliation walks all tenants",
}


def owned_tables() -> dict[str, str]:
    """Return mapped class → table name of everything that has a tenant_id."""
    owned = {}
    for path in (
        ROOT / "tenants/tables.py",
        ROOT / "tenants/limit_tables.py",
        ROOT / "billing/tables.py",
    ):
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            if "tenant_id" in fields:
                names = re.findall(r"__tablename__ = \"(\w+)\"", ast.unparse(node).replace("'", '"'))
                owned[node.name] = names[0] if names else ""
    return owned


def queries_ask_by_tenant(path: Path, text: str, owned: dict[str, str]) -> list[str]:
    """A query function that touches a tenant's table takes tenant_id or tenant_ids right after the session."""
    found = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if f"{path}:{node.name}" in ACROSS_TENANTS:
            continue
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        arguments = [argument.arg for argument in node.args.args]
        if names & owned.keys() and arguments[1:2] not in (["tenant_id"], ["tenant_ids"]):
            found.append(
                f"{path}:{node.lineno} {node.name} reads {sorted(names & owned.keys())} without tenant_id first."
            )
    return found

"""Who may call which route: one table. A route without a rule does not start; `api.guard` enforces it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from tenants.types import Scope

ADMIN = "/api/v1/admin"
TENANT = f"{ADMIN}/tenants/{{tenant_id}}"


class CallerKind(StrEnum):
    """Whose credential a route takes."""

    PUBLIC = "public"
    TENANT = "tenant"  # an API key, tg_…
    OPERATOR = "operator"  # an operator token, tgo_…


@dataclass(frozen=True, slots=True)
class Rule:
    """`scope` is what a tenant's key must have; `action` names a change in the audit trail, empty for a read."""

    caller: CallerKind
    scope: Scope | None = None
    action: str = ""


def _operator(action: str = "") -> Rule:
    return Rule(CallerKind.OPERATOR, action=action)


PUBLIC = Rule(CallerKind.PUBLIC)
USAGE_READ = Rule(CallerKind.TENANT, Scope.USAGE_READ)

RULES: Mapping[tuple[str, str], Rule] = MappingProxyType(
    {
        ("GET", "/api/health"): PUBLIC,
        ("GET", "/api/health/live"): PUBLIC,
        ("GET", "/api/openapi.json"): PUBLIC,
        ("GET", "/api/metrics"): _operator(),
        ("GET", "/api/metrics/{process}"): _operator(),
        ("GET", f"{ADMIN}/tenants"): _operator(),
        ("POST", f"{ADMIN}/tenants"): _operator("tenant.create"),
        ("GET", TENANT): _operator(),
        ("PATCH", TENANT): _operator("tenant.update"),
        ("GET", f"{TENANT}/projects"): _operator(),
        ("POST", f"{TENANT}/projects"): _operator("project.create"),
        ("GET", f"{TENANT}/projects/{{project_id}}"): _operator(),
        ("PATCH", f"{TENANT}/projects/{{project_id}}"): _operator("project.update"),
        ("GET", f"{TENANT}/keys"): _operator(),
        ("POST", f"{TENANT}/projects/{{project_id}}/keys"): _operator("api_key.create"),
        ("GET", f"{TENANT}/keys/{{key_id}}"): _operator(),
        ("POST", f"{TENANT}/keys/{{key_id}}/revoke"): _operator("api_key.revoke"),
        ("GET", f"{ADMIN}/audit"): _operator(),
        ("GET", f"{ADMIN}/operators"): _operator(),
        ("POST", f"{ADMIN}/operators"): _operator("operator.create"),
        ("POST", f"{ADMIN}/operators/{{operator_id}}/tokens"): _operator("operator_token.issue"),
        ("POST", f"{ADMIN}/operators/{{operator_id}}/tokens/revoke"): _operator("operator_token.revoke"),
        ("POST", f"{ADMIN}/operators/{{operator_id}}/disable"): _operator("operator.disable"),
        ("POST", f"{TENANT}/credits"): _operator("credit.top_up"),
        ("GET", f"{TENANT}/balance"): _operator(),
        ("GET", f"{TENANT}/usage"): _operator(),
        ("GET", f"{ADMIN}/price-books"): _operator(),
        ("POST", f"{ADMIN}/price-books"): _operator("price_book.create"),
        ("GET", f"{ADMIN}/price-books/{{book_id}}/versions"): _operator(),
        ("POST", f"{ADMIN}/price-books/{{book_id}}/versions"): _operator("price_version.draft"),
        ("GET", f"{ADMIN}/price-versions/{{price_version_id}}"): _operator(),
        ("PATCH", f"{ADMIN}/price-versions/{{price_version_id}}"): _operator("price_version.change"),
        ("POST", f"{ADMIN}/price-versions/{{price_version_id}}/publish"): _operator("price_version.publish"),
        ("GET", f"{ADMIN}/models"): _operator(),
        ("POST", f"{ADMIN}/models"): _operator("model.create"),
        ("GET", f"{ADMIN}/models/{{model_id}}/versions"): _operator(),
        ("POST", f"{ADMIN}/models/{{model_id}}/versions"): _operator("model_version.create"),
        ("POST", f"{ADMIN}/models/{{model_id}}/retire"): _operator("model.retire"),
        ("POST", f"{ADMIN}/aliases"): _operator("model_alias.set"),
        ("GET", f"{ADMIN}/deployments"): _operator(),
        ("POST", f"{ADMIN}/deployments"): _operator("deployment.create"),
        ("GET", f"{ADMIN}/deployments/{{deployment_id}}"): _operator(),
        ("PATCH", f"{ADMIN}/deployments/{{deployment_id}}"): _operator("deployment.update"),
        ("POST", f"{ADMIN}/deployments/{{deployment_id}}/retire"): _operator("deployment.retire"),
        ("GET", "/api/v1/balance"): USAGE_READ,
        ("GET", "/api/v1/usage"): USAGE_READ,
        # any key reads the receipts of its own calls; with usage.read, all of the tenant's
        ("GET", "/v1/generations/{generation_id}"): Rule(CallerKind.TENANT),
    }
)


def rule_of(method: str, path: str) -> Rule:
    """Return the rule of a route by its path template.

    Raises:
        LookupError: there is none, which is a mistake of ours found at start.
    """
    rule = RULES.get((method, path))
    if rule is None:
        raise LookupError(f"{method} {path} has no rule in api/permissions.py")
    return rule

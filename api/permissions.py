"""Who may call which route: one table. A route without a rule does not start; `api.guard` enforces it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from tenants.roles import OperatorPermission as Op
from tenants.roles import Permission
from tenants.types import Scope

ADMIN = "/api/v1/admin"
AUTH = "/api/v1/auth"
ME = "/api/v1/me"
TENANT = f"{ADMIN}/tenants/{{tenant_id}}"
MY_TENANT = "/api/v1/tenants/{tenant_id}"
MY_MEMBER = f"{MY_TENANT}/members/{{member_id}}"
MY_INVITE = f"{MY_TENANT}/invites/{{invite_id}}"
MY_ACCOUNT = f"{MY_TENANT}/service-accounts/{{service_account_id}}"
OPERATOR = f"{ADMIN}/operators/{{operator_id}}"
PERSON = f"{ADMIN}/people/{{person_id}}"
PLAN = f"{ADMIN}/plans/{{plan_id}}"
IDENTITY_PROVIDER = f"{ADMIN}/identity-providers/{{identity_provider_id}}"
LIMIT_REQUEST = f"{TENANT}/limit-requests/{{limit_request_id}}"
ADJUSTMENT = f"{TENANT}/adjustments/{{adjustment_id}}"
QUARANTINED = f"{TENANT}/quarantine/{{generation_id}}"
MY_PROJECT = f"{MY_TENANT}/projects/{{project_id}}"
RERATING = f"{ADMIN}/reratings/{{rerating_id}}"
ROLLOUT = f"{ADMIN}/rollouts/{{rollout_id}}"
PRICE_VERSION = f"{ADMIN}/price-versions/{{price_version_id}}"
MODEL_VERSION = f"{ADMIN}/model-versions/{{version_id}}"
INTAKE = f"{ADMIN}/registry/intakes/{{intake_id}}"
INTAKE_PART = f"{INTAKE}/files/{{file_no}}"


class CallerKind(StrEnum):
    """Whose credential a route takes."""

    PUBLIC = "public"
    KEY = "key"  # an API key, tg_…
    PERSON = "person"  # a session, for what is one's own
    MEMBER = "member"  # a session, or a key with the scope manage, with a right in the tenant of the path
    OPERATOR = "operator"  # an operator token, tgo_…, or the session of somebody who is an operator


@dataclass(frozen=True, slots=True)
class Rule:
    """`action` names a change in the audit trail, empty for a read.

    `scope` is what a key must have, `permission` what a member must hold, or the owner of a key, `operator` what an
    operator must. With `in_any_project` a member needs the permission in one project of the tenant at least, and the
    route shows no more than that; without it, in the project of the path, or where the path has none in the whole
    tenant.
    """

    caller: CallerKind
    scope: Scope | None = None
    permission: Permission | None = None
    operator: Op | None = None
    action: str = ""
    in_any_project: bool = False


AFTER_CLOSING = frozenset({Op.CREDIT_WRITE})
"""What operators may still change of a closed tenant: its money is settled to the end."""


UNRECORDED = frozenset({("PUT", INTAKE_PART)})
"""Changes that the audit trail does not have one by one: an upload's parts, of which there are thousands. Its opening,
with all sizes and hashes, and its completion are there."""


def _operator(permission: Op, action: str = "") -> Rule:
    return Rule(CallerKind.OPERATOR, operator=permission, action=action)


def _member(permission: Permission, action: str = "", *, in_any_project: bool = False) -> Rule:
    return Rule(CallerKind.MEMBER, permission=permission, action=action, in_any_project=in_any_project)


def _public(action: str) -> Rule:
    return Rule(CallerKind.PUBLIC, action=action)


def _own(action: str = "") -> Rule:
    return Rule(CallerKind.PERSON, action=action)


PUBLIC = Rule(CallerKind.PUBLIC)
USAGE_READ = Rule(CallerKind.KEY, Scope.USAGE_READ, Permission.USAGE_READ)
BALANCE_READ = Rule(CallerKind.KEY, Scope.USAGE_READ, Permission.BILLING_READ)

RULES: Mapping[tuple[str, str], Rule] = MappingProxyType(
    {
        ("GET", "/api/health"): PUBLIC,
        ("GET", "/api/health/live"): PUBLIC,
        ("GET", "/api/openapi.json"): PUBLIC,
        ("GET", "/api/metrics"): _operator(Op.PLATFORM_READ),
        ("GET", "/api/metrics/{process}"): _operator(Op.PLATFORM_READ),
        ("GET", f"{ADMIN}/tenants"): _operator(Op.TENANT_READ),
        ("POST", f"{ADMIN}/tenants"): _operator(Op.TENANT_WRITE, "tenant.create"),
        ("GET", TENANT): _operator(Op.TENANT_READ),
        ("PATCH", TENANT): _operator(Op.TENANT_WRITE, "tenant.update"),
        ("POST", f"{TENANT}/suspend"): _operator(Op.SUSPEND, "tenant.suspend"),
        ("POST", f"{TENANT}/resume"): _operator(Op.SUSPEND, "tenant.resume"),
        ("POST", f"{TENANT}/close"): _operator(Op.TENANT_WRITE, "tenant.close"),
        ("GET", f"{TENANT}/billing-profile"): _operator(Op.TENANT_READ),
        ("PUT", f"{TENANT}/billing-profile"): _operator(Op.TENANT_WRITE, "billing_profile.put"),
        ("POST", f"{TENANT}/projects/{{project_id}}/suspend"): _operator(Op.SUSPEND, "project.suspend"),
        ("POST", f"{TENANT}/projects/{{project_id}}/resume"): _operator(Op.SUSPEND, "project.resume"),
        ("GET", f"{TENANT}/projects"): _operator(Op.TENANT_READ),
        ("POST", f"{TENANT}/projects"): _operator(Op.TENANT_WRITE, "project.create"),
        ("GET", f"{TENANT}/projects/{{project_id}}"): _operator(Op.TENANT_READ),
        ("PATCH", f"{TENANT}/projects/{{project_id}}"): _operator(Op.TENANT_WRITE, "project.update"),
        ("GET", f"{TENANT}/keys"): _operator(Op.TENANT_READ),
        ("POST", f"{TENANT}/projects/{{project_id}}/keys"): _operator(Op.KEY_WRITE, "api_key.create"),
        ("GET", f"{TENANT}/keys/{{key_id}}"): _operator(Op.TENANT_READ),
        ("POST", f"{TENANT}/keys/revoke"): _operator(Op.KEY_WRITE, "api_key.revoke_matching"),
        ("PATCH", f"{TENANT}/keys/{{key_id}}"): _operator(Op.KEY_WRITE, "api_key.update"),
        ("POST", f"{TENANT}/keys/{{key_id}}/rotate"): _operator(Op.KEY_WRITE, "api_key.rotate"),
        ("POST", f"{TENANT}/keys/{{key_id}}/suspend"): _operator(Op.SUSPEND, "api_key.suspend"),
        ("POST", f"{TENANT}/keys/{{key_id}}/resume"): _operator(Op.SUSPEND, "api_key.resume"),
        ("POST", f"{TENANT}/keys/{{key_id}}/revoke"): _operator(Op.KEY_WRITE, "api_key.revoke"),
        ("GET", f"{ADMIN}/secrets"): _operator(Op.SECRET_WRITE),
        ("POST", f"{MY_TENANT}/projects/{{project_id}}/keys"): _member(Permission.KEY_WRITE_OWN, "api_key.create"),
        ("GET", f"{MY_TENANT}/keys"): _member(Permission.KEY_WRITE_OWN, in_any_project=True),
        ("POST", f"{MY_TENANT}/keys/revoke"): _member(
            Permission.KEY_WRITE, "api_key.revoke_matching", in_any_project=True
        ),
        **{
            (method, f"{MY_TENANT}/keys/{{key_id}}{path}"): _member(permission, action, in_any_project=True)
            for method, path, permission, action in (
                ("GET", "", Permission.KEY_WRITE_OWN, ""),
                ("PATCH", "", Permission.KEY_WRITE_OWN, "api_key.update"),
                ("POST", "/rotate", Permission.KEY_WRITE_OWN, "api_key.rotate"),
                ("POST", "/suspend", Permission.KEY_WRITE, "api_key.suspend"),
                ("POST", "/resume", Permission.KEY_WRITE, "api_key.resume"),
                ("POST", "/revoke", Permission.KEY_WRITE_OWN, "api_key.revoke"),
            )
        },
        ("GET", f"{TENANT}/limits"): _operator(Op.LIMIT_READ),
        ("PUT", f"{TENANT}/limits"): _operator(Op.LIMIT_WRITE, "limit.set"),
        ("DELETE", f"{TENANT}/limits/{{limit_id}}"): _operator(Op.LIMIT_WRITE, "limit.remove"),
        ("GET", f"{TENANT}/projects/{{project_id}}/limits"): _operator(Op.LIMIT_READ),
        ("PUT", f"{TENANT}/projects/{{project_id}}/limits"): _operator(Op.LIMIT_WRITE, "limit.set"),
        ("GET", f"{TENANT}/projects/{{project_id}}/limits/effective"): _operator(Op.LIMIT_READ),
        ("GET", f"{TENANT}/keys/{{key_id}}/limits"): _operator(Op.LIMIT_READ),
        ("PUT", f"{TENANT}/keys/{{key_id}}/limits"): _operator(Op.LIMIT_WRITE, "limit.set"),
        ("GET", f"{TENANT}/keys/{{key_id}}/limits/effective"): _operator(Op.LIMIT_READ),
        ("POST", f"{TENANT}/limits/what-if"): _operator(Op.LIMIT_WRITE, "limit.preview"),
        ("GET", f"{TENANT}/limit-changes"): _operator(Op.LIMIT_READ),
        ("POST", f"{TENANT}/limit-changes/{{limit_change_id}}/revert"): _operator(Op.LIMIT_WRITE, "limit.revert"),
        ("PUT", f"{TENANT}/plan"): _operator(Op.LIMIT_WRITE, "tenant.put_on_plan"),
        ("GET", f"{ADMIN}/plans"): _operator(Op.LIMIT_READ),
        ("POST", f"{ADMIN}/plans"): _operator(Op.LIMIT_WRITE, "plan.create"),
        ("GET", PLAN): _operator(Op.LIMIT_READ),
        ("PATCH", PLAN): _operator(Op.LIMIT_WRITE, "plan.update"),
        ("DELETE", PLAN): _operator(Op.LIMIT_WRITE, "plan.delete"),
        ("GET", f"{PLAN}/limits"): _operator(Op.LIMIT_READ),
        ("PUT", f"{PLAN}/limits"): _operator(Op.LIMIT_WRITE, "limit.set"),
        ("DELETE", f"{PLAN}/limits/{{limit_id}}"): _operator(Op.LIMIT_WRITE, "limit.remove"),
        ("GET", f"{PLAN}/limit-changes"): _operator(Op.LIMIT_READ),
        ("POST", f"{PLAN}/limit-changes/{{limit_change_id}}/revert"): _operator(Op.LIMIT_WRITE, "limit.revert"),
        **{
            (method, f"{owner}/{path}"): _operator(Op.LIMIT_WRITE if action else Op.LIMIT_READ, action)
            for owner in (TENANT, PLAN)
            for method, path, action in (
                ("GET", "entitlements", ""),
                ("PUT", "entitlements", "entitlement.set"),
                ("DELETE", "entitlements/{entitlement_id}", "entitlement.remove"),
                ("GET", "entitlement-changes", ""),
                ("POST", "entitlement-changes/{entitlement_change_id}/revert", "entitlement.revert"),
            )
        },
        ("GET", f"{ADMIN}/limit-requests"): _operator(Op.LIMIT_READ),
        ("GET", LIMIT_REQUEST): _operator(Op.LIMIT_READ),
        ("POST", f"{LIMIT_REQUEST}/approve"): _operator(Op.LIMIT_WRITE, "limit_request.approve"),
        ("POST", f"{LIMIT_REQUEST}/decline"): _operator(Op.LIMIT_WRITE, "limit_request.decline"),
        ("POST", f"{PLAN}/limits/what-if"): _operator(Op.LIMIT_WRITE, "limit.preview"),
        ("GET", f"{TENANT}/refusals"): _operator(Op.USAGE_READ),
        ("GET", f"{ADMIN}/audit"): _operator(Op.AUDIT_READ),
        ("GET", f"{ADMIN}/audit/export"): _operator(Op.AUDIT_READ),
        ("GET", f"{ADMIN}/operators"): _operator(Op.OPERATOR_READ),
        ("POST", f"{ADMIN}/operators"): _operator(Op.OPERATOR_WRITE, "operator.create"),
        ("POST", f"{OPERATOR}/tokens"): _operator(Op.OPERATOR_WRITE, "operator_token.issue"),
        ("POST", f"{OPERATOR}/tokens/revoke"): _operator(Op.OPERATOR_WRITE, "operator_token.revoke"),
        ("POST", f"{OPERATOR}/confirm"): _operator(Op.OPERATOR_WRITE, "operator.confirm"),
        ("POST", f"{OPERATOR}/disable"): _operator(Op.OPERATOR_WRITE, "operator.disable"),
        ("POST", f"{TENANT}/credits"): _operator(Op.CREDIT_WRITE, "credit.top_up"),
        ("POST", f"{TENANT}/grants"): _operator(Op.CREDIT_WRITE, "credit.give"),
        ("POST", f"{TENANT}/transactions/{{transaction_id}}/reverse"): _operator(
            Op.CREDIT_WRITE, "transaction.reverse"
        ),
        ("POST", f"{ADJUSTMENT}/approve"): _operator(Op.CREDIT_WRITE, "adjustment.approve"),
        ("POST", f"{ADJUSTMENT}/decline"): _operator(Op.CREDIT_WRITE, "adjustment.decline"),
        ("GET", f"{ADMIN}/adjustments"): _operator(Op.USAGE_READ),
        ("GET", f"{ADMIN}/spools"): _operator(Op.LEDGER_READ),
        ("GET", f"{ADMIN}/quarantine"): _operator(Op.USAGE_READ),
        ("GET", QUARANTINED): _operator(Op.USAGE_READ),
        ("POST", f"{QUARANTINED}/bill"): _operator(Op.CREDIT_WRITE, "quarantine.bill"),
        ("POST", f"{QUARANTINED}/dismiss"): _operator(Op.CREDIT_WRITE, "quarantine.dismiss"),
        ("GET", f"{TENANT}/credit-lots"): _operator(Op.USAGE_READ),
        ("GET", f"{TENANT}/billing-terms"): _operator(Op.USAGE_READ),
        ("PUT", f"{TENANT}/billing-terms"): _operator(Op.CREDIT_WRITE, "billing_terms.put"),
        ("GET", f"{TENANT}/budgets"): _operator(Op.LIMIT_READ),
        ("GET", f"{TENANT}/budget-crossings"): _operator(Op.LIMIT_READ),
        ("GET", f"{TENANT}/credit-alerts"): _operator(Op.USAGE_READ),
        ("GET", f"{TENANT}/alert-settings"): _operator(Op.USAGE_READ),
        ("PUT", f"{TENANT}/alert-settings"): _operator(Op.TENANT_WRITE, "alert_settings.put"),
        ("GET", f"{TENANT}/statement"): _operator(Op.USAGE_READ),
        ("GET", f"{TENANT}/balance"): _operator(Op.USAGE_READ),
        ("GET", f"{TENANT}/usage"): _operator(Op.USAGE_READ),
        ("GET", f"{ADMIN}/ledger/export"): _operator(Op.LEDGER_READ),
        ("GET", f"{ADMIN}/price-books"): _operator(Op.PRICE_READ),
        ("POST", f"{ADMIN}/price-books"): _operator(Op.PRICE_WRITE, "price_book.create"),
        ("GET", f"{ADMIN}/price-books/{{book_id}}/versions"): _operator(Op.PRICE_READ),
        ("POST", f"{ADMIN}/price-books/{{book_id}}/versions"): _operator(Op.PRICE_WRITE, "price_version.draft"),
        ("GET", PRICE_VERSION): _operator(Op.PRICE_READ),
        ("GET", f"{PRICE_VERSION}/impact"): _operator(Op.LEDGER_READ),
        ("GET", f"{PRICE_VERSION}/changes"): _operator(Op.PRICE_READ),
        ("GET", f"{ADMIN}/reratings"): _operator(Op.LEDGER_READ),
        ("POST", f"{ADMIN}/reratings"): _operator(Op.CREDIT_WRITE, "rerating.ask"),
        ("GET", RERATING): _operator(Op.LEDGER_READ),
        ("GET", f"{RERATING}/tenants"): _operator(Op.LEDGER_READ),
        ("POST", f"{RERATING}/execute"): _operator(Op.CREDIT_WRITE, "rerating.execute"),
        ("POST", f"{RERATING}/cancel"): _operator(Op.CREDIT_WRITE, "rerating.cancel"),
        ("PATCH", PRICE_VERSION): _operator(Op.PRICE_WRITE, "price_version.change"),
        ("DELETE", PRICE_VERSION): _operator(Op.PRICE_WRITE, "price_version.delete"),
        ("POST", f"{PRICE_VERSION}/publish"): _operator(Op.PRICE_WRITE, "price_version.publish"),
        ("GET", f"{ADMIN}/models"): _operator(Op.CATALOG_READ),
        ("POST", f"{ADMIN}/models"): _operator(Op.CATALOG_WRITE, "model.create"),
        ("GET", f"{ADMIN}/models/{{model_id}}/versions"): _operator(Op.CATALOG_READ),
        ("POST", f"{ADMIN}/models/{{model_id}}/versions"): _operator(Op.CATALOG_WRITE, "model_version.create"),
        ("POST", f"{ADMIN}/models/{{model_id}}/retire"): _operator(Op.CATALOG_WRITE, "model.retire"),
        ("POST", f"{ADMIN}/aliases"): _operator(Op.CATALOG_WRITE, "model_alias.set"),
        ("POST", f"{ADMIN}/registry/uploads"): _operator(Op.CATALOG_WRITE, "model_intake.open_upload"),
        ("POST", f"{ADMIN}/registry/imports"): _operator(Op.CATALOG_WRITE, "model_intake.import"),
        ("GET", f"{ADMIN}/registry/intakes"): _operator(Op.CATALOG_READ),
        ("GET", INTAKE): _operator(Op.CATALOG_READ),
        ("GET", f"{INTAKE}/events"): _operator(Op.CATALOG_READ),
        ("PUT", INTAKE_PART): _operator(Op.CATALOG_WRITE),
        ("POST", f"{INTAKE}/complete"): _operator(Op.CATALOG_WRITE, "model_intake.complete"),
        ("POST", f"{INTAKE}/cancel"): _operator(Op.CATALOG_WRITE, "model_intake.cancel"),
        ("GET", f"{ADMIN}/registry/garbage"): _operator(Op.CATALOG_READ),
        ("POST", f"{ADMIN}/registry/garbage/collect"): _operator(Op.CATALOG_WRITE, "model_version.collect"),
        ("GET", f"{ADMIN}/model-versions"): _operator(Op.CATALOG_READ),
        ("GET", MODEL_VERSION): _operator(Op.CATALOG_READ),
        ("GET", f"{MODEL_VERSION}/manifest"): _operator(Op.CATALOG_READ),
        ("POST", f"{MODEL_VERSION}/verify"): _operator(Op.CATALOG_WRITE, "model_version.verify"),
        ("POST", f"{MODEL_VERSION}/deprecate"): _operator(Op.CATALOG_WRITE, "model_version.deprecate"),
        ("POST", f"{ADMIN}/models/{{model_id}}/rollouts"): _operator(Op.CATALOG_WRITE, "rollout.start"),
        ("GET", f"{ADMIN}/rollouts"): _operator(Op.CATALOG_READ),
        ("GET", ROLLOUT): _operator(Op.CATALOG_READ),
        ("GET", f"{ROLLOUT}/events"): _operator(Op.CATALOG_READ),
        ("POST", f"{ROLLOUT}/cancel"): _operator(Op.CATALOG_WRITE, "rollout.cancel"),
        ("POST", f"{ROLLOUT}/rollback"): _operator(Op.CATALOG_WRITE, "rollout.ask_back"),
        ("GET", f"{ADMIN}/deployments"): _operator(Op.CATALOG_READ),
        ("POST", f"{ADMIN}/deployments"): _operator(Op.CATALOG_WRITE, "deployment.create"),
        ("GET", f"{ADMIN}/deployments/{{deployment_id}}"): _operator(Op.CATALOG_READ),
        ("GET", f"{ADMIN}/deployments/{{deployment_id}}/command"): _operator(Op.CATALOG_READ),
        ("GET", f"{ADMIN}/deployments/{{deployment_id}}/routing"): _operator(Op.CATALOG_READ),
        ("PATCH", f"{ADMIN}/deployments/{{deployment_id}}"): _operator(Op.CATALOG_WRITE, "deployment.update"),
        ("GET", f"{ADMIN}/deployments/{{deployment_id}}/wakes"): _operator(Op.CATALOG_READ),
        ("POST", f"{ADMIN}/deployments/{{deployment_id}}/retire"): _operator(Op.CATALOG_WRITE, "deployment.retire"),
        ("GET", f"{ADMIN}/identity-providers"): _operator(Op.IDENTITY_WRITE),
        ("POST", f"{ADMIN}/identity-providers"): _operator(Op.IDENTITY_WRITE, "identity_provider.create"),
        ("GET", IDENTITY_PROVIDER): _operator(Op.IDENTITY_WRITE),
        ("PATCH", IDENTITY_PROVIDER): _operator(Op.IDENTITY_WRITE, "identity_provider.update"),
        ("DELETE", IDENTITY_PROVIDER): _operator(Op.IDENTITY_WRITE, "identity_provider.delete"),
        ("POST", f"{IDENTITY_PROVIDER}/test"): _operator(Op.IDENTITY_WRITE, "identity_provider.test"),
        ("GET", f"{IDENTITY_PROVIDER}/mappings"): _operator(Op.IDENTITY_WRITE),
        ("PUT", f"{IDENTITY_PROVIDER}/mappings"): _operator(Op.IDENTITY_WRITE, "identity_provider.map"),
        ("GET", f"{AUTH}/providers"): PUBLIC,
        ("GET", f"{AUTH}/oidc/{{identity_provider_id}}/start"): PUBLIC,
        ("GET", f"{AUTH}/oidc/{{identity_provider_id}}/callback"): PUBLIC,
        ("POST", f"{AUTH}/oidc/sign-out"): Rule(CallerKind.PERSON, action="session.end"),
        ("GET", MY_TENANT): _member(Permission.TENANT_READ, in_any_project=True),
        ("POST", f"{MY_TENANT}/close"): _member(Permission.TENANT_CLOSE, "tenant.close"),
        ("GET", f"{MY_TENANT}/billing-profile"): _member(Permission.BILLING_READ),
        ("PUT", f"{MY_TENANT}/billing-profile"): _member(Permission.BILLING_WRITE, "billing_profile.put"),
        ("GET", f"{MY_TENANT}/balance"): _member(Permission.BILLING_READ),
        ("GET", f"{MY_TENANT}/credit-lots"): _member(Permission.BILLING_READ),
        ("GET", f"{MY_TENANT}/budgets"): _member(Permission.LIMIT_READ, in_any_project=True),
        ("GET", f"{MY_TENANT}/budget-crossings"): _member(Permission.LIMIT_READ, in_any_project=True),
        ("GET", f"{MY_TENANT}/credit-alerts"): _member(Permission.BILLING_READ),
        ("GET", f"{MY_TENANT}/alert-settings"): _member(Permission.BILLING_READ),
        ("PUT", f"{MY_TENANT}/alert-settings"): _member(Permission.BILLING_WRITE, "alert_settings.put"),
        ("GET", f"{MY_TENANT}/statement"): _member(Permission.BILLING_READ),
        ("GET", f"{MY_TENANT}/usage"): _member(Permission.USAGE_READ),
        ("GET", f"{MY_TENANT}/audit"): _member(Permission.AUDIT_READ),
        ("GET", f"{MY_TENANT}/refusals"): _member(Permission.USAGE_READ),
        ("POST", f"{MY_TENANT}/limits/what-if"): _member(Permission.LIMIT_WRITE, "limit.preview"),
        ("PATCH", MY_TENANT): _member(Permission.TENANT_UPDATE, "tenant.update"),
        ("GET", f"{MY_TENANT}/projects"): _member(Permission.TENANT_READ, in_any_project=True),
        ("POST", f"{MY_TENANT}/projects"): _member(Permission.PROJECT_WRITE, "project.create"),
        ("GET", f"{MY_TENANT}/projects/{{project_id}}"): _member(Permission.TENANT_READ),
        ("PATCH", f"{MY_TENANT}/projects/{{project_id}}"): _member(Permission.PROJECT_WRITE, "project.update"),
        ("POST", f"{MY_TENANT}/projects/{{project_id}}/suspend"): _member(Permission.PROJECT_WRITE, "project.suspend"),
        ("POST", f"{MY_TENANT}/projects/{{project_id}}/resume"): _member(Permission.PROJECT_WRITE, "project.resume"),
        ("GET", f"{MY_TENANT}/members"): _member(Permission.MEMBER_READ, in_any_project=True),
        ("POST", f"{MY_TENANT}/members"): _member(Permission.MEMBER_WRITE, "member.add", in_any_project=True),
        ("GET", MY_MEMBER): _member(Permission.MEMBER_READ, in_any_project=True),
        ("PATCH", MY_MEMBER): _member(Permission.MEMBER_WRITE, "member.update", in_any_project=True),
        ("DELETE", MY_MEMBER): _member(Permission.MEMBER_WRITE, "member.remove", in_any_project=True),
        ("GET", f"{MY_TENANT}/invites"): _member(Permission.MEMBER_READ, in_any_project=True),
        ("POST", f"{MY_TENANT}/invites"): _member(Permission.MEMBER_WRITE, "invite.create", in_any_project=True),
        ("POST", f"{MY_INVITE}/resend"): _member(Permission.MEMBER_WRITE, "invite.resend", in_any_project=True),
        ("POST", f"{MY_INVITE}/revoke"): _member(Permission.MEMBER_WRITE, "invite.revoke", in_any_project=True),
        ("GET", f"{MY_TENANT}/service-accounts"): _member(Permission.MEMBER_READ, in_any_project=True),
        ("POST", f"{MY_TENANT}/projects/{{project_id}}/service-accounts"): _member(
            Permission.SERVICE_ACCOUNT_WRITE, "service_account.create"
        ),
        ("PATCH", MY_ACCOUNT): _member(Permission.SERVICE_ACCOUNT_WRITE, "service_account.update", in_any_project=True),
        ("DELETE", MY_ACCOUNT): _member(
            Permission.SERVICE_ACCOUNT_WRITE, "service_account.delete", in_any_project=True
        ),
        ("POST", f"{AUTH}/invites/accept"): _public("invite.accept"),
        ("POST", f"{ME}/invites/accept"): _own("invite.accept"),
        ("POST", f"{ME}/leave"): _own("member.leave"),
        ("GET", f"{TENANT}/members"): _operator(Op.TENANT_READ),
        ("GET", f"{TENANT}/invites"): _operator(Op.TENANT_READ),
        ("POST", f"{TENANT}/invites"): _operator(Op.TENANT_WRITE, "invite.create"),
        ("POST", f"{TENANT}/invites/{{invite_id}}/resend"): _operator(Op.TENANT_WRITE, "invite.resend"),
        ("POST", f"{TENANT}/invites/{{invite_id}}/revoke"): _operator(Op.TENANT_WRITE, "invite.revoke"),
        ("GET", f"{ADMIN}/operator-invites"): _operator(Op.OPERATOR_READ),
        ("POST", f"{ADMIN}/operator-invites"): _operator(Op.OPERATOR_WRITE, "invite.create"),
        ("POST", f"{ADMIN}/operator-invites/{{invite_id}}/resend"): _operator(Op.OPERATOR_WRITE, "invite.resend"),
        ("POST", f"{ADMIN}/operator-invites/{{invite_id}}/revoke"): _operator(Op.OPERATOR_WRITE, "invite.revoke"),
        ("PATCH", OPERATOR): _operator(Op.OPERATOR_WRITE, "operator.update"),
        ("GET", f"{ADMIN}/people"): _operator(Op.TENANT_READ),
        ("GET", PERSON): _operator(Op.TENANT_READ),
        ("POST", f"{PERSON}/suspend"): _operator(Op.SUSPEND, "person.suspend"),
        ("POST", f"{PERSON}/resume"): _operator(Op.SUSPEND, "person.resume"),
        ("DELETE", PERSON): _operator(Op.TENANT_WRITE, "person.delete"),
        ("GET", f"{ADMIN}/mail"): _operator(Op.OPERATOR_WRITE),
        ("GET", "/api/v1/roles"): _own(),
        ("POST", f"{AUTH}/password"): _public("session.open"),
        ("POST", f"{AUTH}/totp"): _public("session.open_with_second_factor"),
        ("POST", f"{AUTH}/password-reset"): _public("password.ask_reset"),
        ("POST", f"{AUTH}/password-reset/confirm"): _public("password.reset"),
        ("POST", f"{AUTH}/sign-out"): _own("session.end"),
        ("POST", f"{AUTH}/sign-out-everywhere"): _own("session.end_all"),
        ("GET", "/api/v1/session"): _own(),
        ("PATCH", ME): _own("person.update"),
        ("POST", f"{ME}/delete"): _own("person.delete"),
        ("POST", f"{ME}/password"): _own("password.change"),
        ("POST", f"{ME}/totp"): _own("second_factor.start"),
        ("POST", f"{ME}/totp/confirm"): _own("second_factor.confirm"),
        ("POST", f"{ME}/totp/remove"): _own("second_factor.remove"),
        ("POST", f"{ME}/recovery-codes"): _own("recovery_codes.renew"),
        ("GET", f"{ME}/sessions"): _own(),
        ("DELETE", f"{ME}/sessions/{{session_id}}"): _own("session.end"),
        ("GET", f"{MY_TENANT}/limits"): _member(Permission.LIMIT_READ),
        ("PUT", f"{MY_TENANT}/limits"): _member(Permission.LIMIT_WRITE, "limit.set"),
        ("DELETE", f"{MY_TENANT}/limits/{{limit_id}}"): _member(Permission.LIMIT_WRITE, "limit.remove"),
        ("GET", f"{MY_PROJECT}/limits"): _member(Permission.LIMIT_READ),
        ("PUT", f"{MY_PROJECT}/limits"): _member(Permission.LIMIT_WRITE, "limit.set"),
        ("DELETE", f"{MY_PROJECT}/limits/{{limit_id}}"): _member(Permission.LIMIT_WRITE, "limit.remove"),
        ("GET", f"{MY_PROJECT}/limits/effective"): _member(Permission.LIMIT_READ),
        ("GET", f"{MY_PROJECT}/keys/{{key_id}}/limits"): _member(Permission.LIMIT_READ),
        ("PUT", f"{MY_PROJECT}/keys/{{key_id}}/limits"): _member(Permission.LIMIT_WRITE, "limit.set"),
        ("GET", f"{MY_PROJECT}/keys/{{key_id}}/limits/effective"): _member(Permission.LIMIT_READ),
        ("GET", f"{MY_TENANT}/limit-changes"): _member(Permission.LIMIT_READ),
        ("POST", f"{MY_TENANT}/limit-changes/{{limit_change_id}}/revert"): _member(
            Permission.LIMIT_WRITE, "limit.revert"
        ),
        ("GET", f"{MY_TENANT}/limit-requests"): _member(Permission.LIMIT_READ, in_any_project=True),
        ("POST", f"{MY_TENANT}/limit-requests"): _member(
            Permission.LIMIT_REQUEST, "limit_request.ask", in_any_project=True
        ),
        ("GET", f"{MY_TENANT}/limit-requests/{{limit_request_id}}"): _member(
            Permission.LIMIT_READ, in_any_project=True
        ),
        ("GET", "/api/v1/balance"): BALANCE_READ,
        ("GET", "/api/v1/usage"): USAGE_READ,
        # any key reads the receipts of its own calls; with usage.read, those that its owner may see
        ("GET", "/v1/generations/{generation_id}"): Rule(CallerKind.KEY),
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

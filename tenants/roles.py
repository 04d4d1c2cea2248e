"""Pure: what each role may do, in one table, and in words: docs/roles.md is made of them.

A person's rights in a tenant are the union over the memberships: those without a project hold everywhere in it, those
with one only there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from uuid import UUID

from tenants.types import OperatorRole, Role, Scope


class Permission(StrEnum):
    """What a member may do in a tenant."""

    TENANT_READ = "tenant.read"
    TENANT_UPDATE = "tenant.update"
    TENANT_CLOSE = "tenant.close"
    PROJECT_WRITE = "project.write"
    MEMBER_READ = "member.read"
    MEMBER_WRITE = "member.write"
    SERVICE_ACCOUNT_WRITE = "service_account.write"
    KEY_WRITE_OWN = "key.write_own"
    KEY_WRITE = "key.write"
    LIMIT_READ = "limit.read"
    LIMIT_WRITE = "limit.write"
    LIMIT_REQUEST = "limit.request"
    USAGE_READ = "usage.read"
    BILLING_READ = "billing.read"
    BILLING_WRITE = "billing.write"
    AUDIT_READ = "audit.read"
    IDENTITY_WRITE = "identity.write"


class OperatorPermission(StrEnum):
    """What an operator may do on the platform."""

    PLATFORM_READ = "platform.read"
    TENANT_READ = "tenant.read"
    TENANT_WRITE = "tenant.write"
    SUSPEND = "suspend"
    KEY_WRITE = "key.write"
    LIMIT_READ = "limit.read"
    LIMIT_WRITE = "limit.write"
    USAGE_READ = "usage.read"
    CREDIT_WRITE = "credit.write"
    LEDGER_READ = "ledger.read"
    PRICE_READ = "price.read"
    PRICE_WRITE = "price.write"
    CATALOG_READ = "catalog.read"
    CATALOG_WRITE = "catalog.write"
    AUDIT_READ = "audit.read"
    OPERATOR_READ = "operator.read"
    OPERATOR_WRITE = "operator.write"
    IDENTITY_WRITE = "identity.write"
    SECRET_WRITE = "secret.write"  # noqa: S105 - the name of a right


WORDS: Mapping[Permission, str] = MappingProxyType(
    {
        Permission.TENANT_READ: "see the organisation, its projects and models",
        Permission.TENANT_UPDATE: "rename the organisation and change its settings",
        Permission.TENANT_CLOSE: "close the organisation for good",
        Permission.PROJECT_WRITE: "make, rename, suspend and resume projects",
        Permission.MEMBER_READ: "see who is a member, with which role",
        Permission.MEMBER_WRITE: "invite people, change roles, suspend and remove members",
        Permission.SERVICE_ACCOUNT_WRITE: "make, suspend and delete service accounts",
        Permission.KEY_WRITE_OWN: "see, make, change, rotate and revoke API keys of one's own",
        Permission.KEY_WRITE: "see, make, change, rotate, suspend and revoke all API keys",
        Permission.LIMIT_READ: "see limits, budgets and what of them is used",
        Permission.LIMIT_WRITE: "set limits and budgets of projects and keys, within the organisation's own",
        Permission.LIMIT_REQUEST: "ask for higher limits",
        Permission.USAGE_READ: "see usage and cost",
        Permission.BILLING_READ: "see balance, credit and invoices",
        Permission.BILLING_WRITE: "change the billing profile, and what people are told about budgets and credit",
        Permission.AUDIT_READ: "read the audit log of the organisation",
        Permission.IDENTITY_WRITE: "set up single sign-on for the organisation",
    }
)
OPERATOR_WORDS: Mapping[OperatorPermission, str] = MappingProxyType(
    {
        OperatorPermission.PLATFORM_READ: "see health and metrics",
        OperatorPermission.TENANT_READ: "see tenants, projects, people and keys (never a key's secret)",
        OperatorPermission.TENANT_WRITE: "make, change and close tenants and projects; invite their first owner",
        OperatorPermission.SUSPEND: "suspend and resume tenants, projects, people and keys",
        OperatorPermission.KEY_WRITE: "make, change, rotate and revoke keys of any tenant",
        OperatorPermission.LIMIT_READ: "see limits, plans and their history",
        OperatorPermission.LIMIT_WRITE: "change limits, plans and entitlements, try changes, decide requests",
        OperatorPermission.USAGE_READ: "see usage and balance of any tenant",
        OperatorPermission.CREDIT_WRITE: "top up, give and reverse credit, change how a tenant pays, and its limit",
        OperatorPermission.LEDGER_READ: "export the whole ledger",
        OperatorPermission.PRICE_READ: "see price books",
        OperatorPermission.PRICE_WRITE: "draft and publish prices",
        OperatorPermission.CATALOG_READ: "see models and deployments",
        OperatorPermission.CATALOG_WRITE: "change models and deployments",
        OperatorPermission.AUDIT_READ: "read, search and export the audit log",
        OperatorPermission.OPERATOR_READ: "see who the operators are",
        OperatorPermission.OPERATOR_WRITE: "invite, confirm and lock out operators, issue tokens, see mail kept here",
        OperatorPermission.IDENTITY_WRITE: "set up identity providers",
        OperatorPermission.SECRET_WRITE: "see how far a rotation of the installation's secrets has come",
    }
)

_P, _O = Permission, OperatorPermission
_VIEWER = frozenset({_P.TENANT_READ, _P.MEMBER_READ, _P.LIMIT_READ, _P.USAGE_READ})
PERMISSIONS: Mapping[Role, frozenset[Permission]] = MappingProxyType(
    {
        Role.OWNER: frozenset(Permission),
        Role.ADMIN: frozenset(Permission) - {_P.TENANT_CLOSE},
        Role.DEVELOPER: _VIEWER | {_P.KEY_WRITE_OWN, _P.LIMIT_REQUEST},
        Role.FINANCE: _VIEWER | {_P.LIMIT_REQUEST, _P.BILLING_READ, _P.BILLING_WRITE, _P.AUDIT_READ},
        Role.VIEWER: _VIEWER,
    }
)
OPERATOR_PERMISSIONS: Mapping[OperatorRole, frozenset[OperatorPermission]] = MappingProxyType(
    {
        OperatorRole.ADMIN: frozenset(OperatorPermission),
        OperatorRole.FINANCE: frozenset(
            {
                *(_O.PLATFORM_READ, _O.TENANT_READ, _O.LIMIT_READ, _O.USAGE_READ, _O.CREDIT_WRITE),
                *(_O.LEDGER_READ, _O.PRICE_READ, _O.PRICE_WRITE, _O.CATALOG_READ, _O.AUDIT_READ),
            }
        ),
        OperatorRole.SUPPORT: frozenset(
            {
                *(_O.PLATFORM_READ, _O.TENANT_READ, _O.SUSPEND, _O.LIMIT_READ, _O.USAGE_READ, _O.PRICE_READ),
                *(_O.CATALOG_READ, _O.AUDIT_READ),
            }
        ),
    }
)
# What an API key of somebody with this role may be good for at most.
SCOPES: Mapping[Role, frozenset[Scope]] = MappingProxyType(
    {
        Role.OWNER: frozenset(Scope),
        Role.ADMIN: frozenset(Scope),
        Role.DEVELOPER: frozenset({Scope.INFERENCE, Scope.BATCH, Scope.USAGE_READ}),
        Role.FINANCE: frozenset({Scope.USAGE_READ}),
        Role.VIEWER: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class Rights:
    """What somebody may do in one tenant: everywhere in it, and beyond that in single projects."""

    roles: frozenset[Role] = frozenset()
    of_project: Mapping[UUID, frozenset[Role]] = field(default_factory=dict)

    def allow(self, permission: Permission, project_id: UUID | None = None) -> bool:
        """Say whether `permission` is held in the project, or without one in the whole tenant."""
        roles = self.roles if project_id is None else self.roles | self.of_project.get(project_id, frozenset())
        return any(permission in PERMISSIONS[role] for role in roles)

    def allow_anywhere(self, permission: Permission) -> bool:
        """Say whether `permission` is held in the tenant or in one of its projects at least."""
        return self.allow(permission) or any(self.allow(permission, project) for project in self.of_project)

    def projects_with(self, permission: Permission) -> frozenset[UUID] | None:
        """Return the projects in which `permission` is held; None when it is held in all of the tenant."""
        if self.allow(permission):
            return None
        return frozenset(project for project in self.of_project if self.allow(permission, project))

    def scopes(self, project_id: UUID) -> frozenset[Scope]:
        """Return the scopes that a key of theirs in that project may have."""
        return scopes_of(self.roles | self.of_project.get(project_id, frozenset()))

    @property
    def any(self) -> bool:
        return bool(self.roles or self.of_project)


def scopes_of(roles: Iterable[str]) -> frozenset[Scope]:
    """Return what a key may be good for at most whose owner has these roles where it is.

    Raises:
        ValueError: one of them is no role.
    """
    return frozenset().union(*(SCOPES[Role(role)] for role in roles))


def rights_of(memberships: Iterable[tuple[UUID | None, Role]]) -> Rights:
    """Return the union of memberships in one tenant, each a project or None, and a role."""
    everywhere: set[Role] = set()
    of_project: dict[UUID, set[Role]] = {}
    for project_id, role in memberships:
        (everywhere if project_id is None else of_project.setdefault(project_id, set())).add(role)
    return Rights(frozenset(everywhere), {project: frozenset(roles) for project, roles in of_project.items()})


def may_give(rights: Rights, role: Role, project_id: UUID | None = None) -> bool:
    """Say whether somebody may make others have `role`: never one that may do more than they may themselves."""
    return all(rights.allow(permission, project_id) for permission in PERMISSIONS[role])

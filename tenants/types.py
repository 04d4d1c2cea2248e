"""Who may call, as the gateway and the control plane see it."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

import msgspec

from core.money import Currency
from core.tiers import Tier

DEFAULT_PLAN_ID = UUID("00000000-0000-7000-8000-000000000001")
"""What a new tenant is on: the plan that the migration made."""


class Scope(StrEnum):
    """What an API key may be used for."""

    INFERENCE = "inference"  # chat, completions, embeddings, tokenize, models
    BATCH = "batch"  # files and batches
    USAGE_READ = "usage.read"  # own balance, usage and receipts
    MANAGE = "manage"  # what the key's owner may do in the console, and no inference


DEFAULT_SCOPES = frozenset({Scope.INFERENCE, Scope.USAGE_READ})
"""Of a key made without a word about it."""


class OperatorRole(StrEnum):
    """Of somebody who runs the platform."""

    ADMIN = "admin"
    FINANCE = "finance"
    SUPPORT = "support"


class Role(StrEnum):
    """Of a member in a tenant, or in one of its projects."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    FINANCE = "finance"
    VIEWER = "viewer"


class PersonStatus(StrEnum):
    """A suspended person keeps everything and may not sign in; a deleted one is gone for ever."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


class SignInMethod(StrEnum):
    """How a session was opened."""

    PASSWORD = "password"  # noqa: S105 - the name of a method
    OIDC = "oidc"


class Status(StrEnum):
    """Of a tenant, project or member. A suspended one keeps everything and may not call; closed is a tenant's end."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    CLOSED = "closed"


class BillingMode(StrEnum):
    """When the tenant pays."""

    PREPAID = "prepaid"
    POSTPAID = "postpaid"


class ActorKind(StrEnum):
    """Who acts, for the audit trail."""

    OPERATOR = "operator"
    API_KEY = "api_key"
    PERSON = "person"
    SYSTEM = "system"


class LimitLevel(StrEnum):
    """Whose counter a limit is."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"


class LimitMetric(StrEnum):
    """What a limit counts. Days and months of spend are those of the tenant's time zone."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    CONCURRENCY = "concurrency"
    SPEND_PER_DAY = "spend_per_day"
    SPEND_PER_MONTH = "spend_per_month"
    SPEND_TOTAL = "spend_total"


class LimitMode(StrEnum):
    """What happens when a limit is passed."""

    HARD = "hard"  # the request is refused
    SOFT = "soft"  # it is served, and people are told
    DARK = "dark"  # it is served, and only counted: a trial before the limit is made hard


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A limit that applies to a principal. `model` is a public model name, empty for all models together."""

    level: LimitLevel
    metric: LimitMetric
    amount: int
    mode: LimitMode = LimitMode.HARD
    model: str = ""


class LimitAuthor(StrEnum):
    """Who set a rule. Operators and the tenant set theirs apart, and the lower of the two holds."""

    OPERATOR = "operator"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class LimitSlot:
    """What a rule is about. A tenant or a plan owns it; there is at most one amount for each slot.

    Level project without `project_id` means every project of the owner, likewise keys.
    """

    level: LimitLevel
    metric: LimitMetric
    mode: LimitMode = LimitMode.HARD
    model: str = ""  # a model's own name; empty for all models together
    project_id: UUID | None = None
    key_id: UUID | None = None
    author: LimitAuthor = LimitAuthor.OPERATOR
    tenant_id: UUID | None = None
    plan_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class LimitRule:
    """A slot with its amount: a count, or pico for spend. 0 allows nothing; no rule, no limit."""

    id: UUID
    slot: LimitSlot
    amount: int
    updated_at: datetime


class Principal(msgspec.Struct, frozen=True, gc=False):
    """An API key with all that a request needs to know of its key, project and tenant.

    `model_patterns` are shell patterns on public model names; empty means every model.
    `refusal` is the error code of a key that is known but may not call (``KEY_REVOKED``, ``KEY_EXPIRED``,
    ``KEY_SUSPENDED``, ``OWNER_SUSPENDED``, ``PROJECT_SUSPENDED``, ``TENANT_SUSPENDED``), else empty.
    """

    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    currency: Currency
    scopes: frozenset[str]
    tier_default: Tier
    tier_max: Tier
    model_patterns: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    expires_at_us: int = 0
    limits: tuple[Limit, ...] = ()  # of key, project and tenant, plan and overrides already merged
    tz: str = "UTC"  # of the tenant: its days and months
    plan_id: UUID | None = None
    price_book_id: UUID | None = None  # of the plan, when it has prices of its own
    cache_salt: str = ""  # per tenant, from a secret: keeps prefix caches of tenants apart
    refusal: str = ""
    keep_answers: bool = False  # of the project: answers to requests with an idempotency key, for repeats


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer. `tz` is an IANA time zone."""

    id: UUID
    name: str
    currency: Currency
    tz: str
    status: Status
    billing_mode: BillingMode
    plan_id: UUID
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Project:
    """A part of a tenant that keys belong to. `keep_answers`: for repeats with the same idempotency key."""

    id: UUID
    tenant_id: UUID
    name: str
    status: Status
    created_at: datetime
    keep_answers: bool = False


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a new key may do. No patterns mean every model; no networks mean from anywhere."""

    scopes: frozenset[Scope] = DEFAULT_SCOPES
    tier_default: Tier = Tier.STANDARD
    tier_max: Tier = Tier.PRIORITY
    model_patterns: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Whose key it is: a person, a service account, or, made by the platform itself, nobody's."""

    person_id: UUID | None = None
    service_account_id: UUID | None = None


NO_OWNER = KeyOwner()


@dataclass(frozen=True, slots=True)
class KeySecret:
    """One secret of a key, by what people recognise it by. It works until the first of its ends and the key's."""

    id: UUID
    prefix: str
    last4: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as people see it: never the secret, never its digest. `secrets` are newest first, ended ones too."""

    id: UUID
    tenant_id: UUID
    project_id: UUID
    name: str
    owner: KeyOwner
    status: Status
    secrets: tuple[KeySecret, ...]
    limits: KeyLimits
    created_at: datetime
    created_by: UUID | None
    updated_at: datetime
    revoked_at: datetime | None
    last_used_at: datetime | None

    @property
    def prefix(self) -> str:
        """How the newest secret begins."""
        return self.secrets[0].prefix

    @property
    def last4(self) -> str:
        """How the newest secret ends."""
        return self.secrets[0].last4


@dataclass(frozen=True, slots=True)
class Operator:
    """Somebody who runs the platform. `person_id` is who signs in as this operator, if anybody does.

    `vouched_by` invited this person, and answers for what they do until they are confirmed. `token_issued_by` is who
    issued the token that the operator was found by.
    """

    id: UUID
    name: str
    role: OperatorRole
    person_id: UUID | None
    created_at: datetime
    disabled_at: datetime | None
    vouched_by: UUID | None = None
    confirmed_at: datetime | None = None
    token_issued_by: UUID | None = None


@dataclass(frozen=True, slots=True)
class Responsible:
    """The operator who does something, and the people who answer for it.

    `people`: who proved to be there or issued the token, then who vouches for them, and so on. `answers`: the last of
    them when confirmed; None: nobody answers. `signed_in`: a person is there, by the own password, and confirmed.
    """

    operator_id: UUID
    people: tuple[UUID, ...] = ()
    answers: UUID | None = None
    signed_in: bool = False


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with an account: member of any number of tenants, or operator. Never a password hash."""

    id: UUID
    email: str
    name: str
    language: str
    status: PersonStatus
    has_password: bool
    has_second_factor: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Member:
    """A person's role in a tenant, or in one of its projects. `origin` is empty or ``oidc:<provider>``."""

    id: UUID
    tenant_id: UUID
    project_id: UUID | None
    person_id: UUID
    role: Role
    status: Status
    origin: str
    created_at: datetime


class InviteState(StrEnum):
    """Only an open invite can be accepted."""

    OPEN = "open"
    ACCEPTED = "accepted"
    REVOKED = "revoked"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Invite:
    """Into a tenant or one of its projects with a role, or among the operators with theirs. Never the link."""

    id: UUID
    tenant_id: UUID | None
    project_id: UUID | None
    role: Role | None
    operator_role: OperatorRole | None
    email: str
    state: InviteState
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A program's account in a project of a tenant: owner of API keys, and no person."""

    id: UUID
    tenant_id: UUID
    project_id: UUID
    name: str
    role: Role
    status: PersonStatus
    created_at: datetime


@dataclass(frozen=True, slots=True)
class SignedIn:
    """An open session and whose it is.

    `only_tenant` is set when a tenant's own provider opened it: what that vouches for ends at the tenant.
    """

    id: UUID
    person: Person
    method: SignInMethod
    provider_id: UUID | None
    second_factor: bool
    created_at: datetime
    expires_at: datetime
    only_tenant: UUID | None = None

    def reaches(self, tenant_id: UUID) -> bool:
        """Say whether the session may be used in this tenant."""
        return self.only_tenant is None or self.only_tenant == tenant_id


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session as its person sees it in a list, never its token."""

    id: UUID
    method: SignInMethod
    second_factor: bool
    created_at: datetime
    seen_at: datetime
    expires_at: datetime
    ip: str
    user_agent: str


@dataclass(frozen=True, slots=True)
class Actor:
    """Who does it, in which request, from which address (as the front door saw it; empty when nobody called)."""

    kind: ActorKind
    id: UUID | None = None
    request_id: str = ""
    client_ip: str = ""


SYSTEM = Actor(ActorKind.SYSTEM)


class AuditFilter(msgspec.Struct, frozen=True):
    """Which audit records: all that is named must hold. `action` is a prefix, `text` stands anywhere in the details."""

    tenant_id: UUID | None = None
    actor_id: UUID | None = None
    target_id: UUID | None = None
    action: str = ""
    since: datetime | None = None  # included
    until: datetime | None = None  # not included
    text: str = ""
    to_members: bool = False  # what operators' records hide from members does not decide whether they are found

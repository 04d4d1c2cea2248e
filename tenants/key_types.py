"""Words of API keys beyond `tenants.types`: states, filters, and what somebody may give."""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from tenants.types import NO_OWNER, ApiKey, KeyOwner, Scope


class KeyState(StrEnum):
    """What a key is now; the first that is true of revoked, expired, suspended, active."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KeyReach:
    """Whose keys somebody may act on: those of one owner, and all of some projects."""

    owner: KeyOwner
    project_ids: frozenset[UUID] = frozenset()

    def has(self, key: ApiKey) -> bool:
        return key.project_id in self.project_ids or (key.owner == self.owner and self.owner != NO_OWNER)


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Which keys of a tenant; what is None or empty does not matter. A key never used counts from its making."""

    project_id: UUID | None = None
    owner_person_id: UUID | None = None
    owner_service_account_id: UUID | None = None
    state: KeyState | None = None
    name: str = ""  # a part of it, upper and lower case alike
    prefix: str = ""
    last4: str = ""
    expiring_before: datetime | None = None
    unused_since: datetime | None = None
    reach: KeyReach | None = None  # of whoever asks; None: every key

    @property
    def narrows(self) -> bool:
        """Whether anything is asked for at all."""
        return replace(self, reach=None) != KeyFilter()


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """What somebody who makes or changes a key must keep to.

    `scopes` are what they may give, None for everything; `max_days` how long from `now` a key may live, 0 for ever.
    """

    now: datetime
    max_days: int = 0
    scopes: frozenset[Scope] | None = None


@dataclass(frozen=True, slots=True)
class BulkRevocation:
    """The keys a bulk revocation ends, oldest first; done or only looked at."""

    keys: tuple[ApiKey, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class PepperUse:
    """How many living secrets are found under one pepper at best. `name` is empty for secrets of before names."""

    name: str
    current: bool
    configured: bool
    api_keys: int
    operator_tokens: int

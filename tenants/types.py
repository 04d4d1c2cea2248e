"""Who may call, as the gateway sees it."""

from uuid import UUID

import msgspec

from core.money import Currency
from core.tiers import Tier


class Principal(msgspec.Struct, frozen=True, gc=False):
    """An API key with all that a request needs to know of its key, project and tenant.

    A limit of 0 means none. `model_patterns` are shell patterns on public model names; empty means every model.
    `refusal` is the error code of a key that is known but may not call (``KEY_REVOKED``, ``KEY_EXPIRED``,
    ``PROJECT_SUSPENDED``, ``TENANT_SUSPENDED``), else empty.
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
    key_rpm: int = 0
    key_concurrency: int = 0
    project_rpm: int = 0
    project_concurrency: int = 0
    tenant_concurrency: int = 0
    cache_salt: str = ""  # per tenant, from a secret: keeps prefix caches of tenants apart
    refusal: str = ""

"""Billing profiles: what invoices say of a tenant, and in which language. Money itself is `billing`'s."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from tenants import tenant_queries as queries
from tenants.errors import invalid
from tenants.people import checked_email
from tenants.tables import LegalProfileRow

ADDRESS_LINES_MAX = 6
LANGUAGES = ("en", "zh-CN")


@dataclass(frozen=True, slots=True)
class BillingProfile:
    """Empty text means not told yet. `country` is ISO 3166 alpha-2; `address` are lines as they go on an envelope."""

    legal_name: str = ""
    address: tuple[str, ...] = ()
    country: str = ""
    tax_id: str = ""
    billing_email: str = ""
    language: str = "en"


def _profile(row: LegalProfileRow) -> BillingProfile:
    return BillingProfile(
        legal_name=row.legal_name,
        address=tuple(row.address),
        country=row.country,
        tax_id=row.tax_id,
        billing_email=row.billing_email,
        language=row.language,
    )


async def get(session: AsyncSession, tenant_id: UUID) -> BillingProfile:
    """Return the tenant's profile, an empty one when nothing was told. Whether the tenant exists is not looked at."""
    row = await queries.legal_profile(session, tenant_id)
    return BillingProfile() if row is None else _profile(row)


async def put(session: AsyncSession, tenant_id: UUID, profile: BillingProfile, *, now: datetime) -> BillingProfile:
    """Replace the profile of a tenant that exists.

    Raises:
        PlatformError: invalid address of mail, language, or too many lines.
    """
    if len(profile.address) > ADDRESS_LINES_MAX:
        raise invalid("address", f"At most {ADDRESS_LINES_MAX} lines.")
    if profile.language not in LANGUAGES:
        raise invalid("language", f"One of {', '.join(LANGUAGES)}.")
    email = checked_email(profile.billing_email, param="billing_email") if profile.billing_email else ""
    row = await queries.legal_profile(session, tenant_id) or LegalProfileRow(tenant_id=tenant_id)
    row.legal_name, row.address, row.country = profile.legal_name, list(profile.address), profile.country
    row.tax_id, row.billing_email, row.language, row.updated_at = profile.tax_id, email, profile.language, now
    session.add(row)
    await session.flush()
    return _profile(row)

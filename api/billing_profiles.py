"""A tenant's billing profile on the wire, the same for its members and for operators; and how a tenant is closed."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from api.schemas import Input, Output
from tenants.billing_profiles import BillingProfile

Line = Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")]
LanguageCode = Literal["en", "zh-CN"]


class BillingProfileIn(Input):
    """The whole profile; what is left out is emptied."""

    legal_name: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    address: list[Line] = Field(default_factory=list, max_length=6, description="Lines as they go on an envelope.")
    country: Annotated[str, StringConstraints(pattern=r"^([A-Z]{2})?$"), Field(description="ISO 3166 alpha-2.")] = ""
    tax_id: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z ./-]{0,40}$")] = ""
    billing_email: Annotated[str, StringConstraints(max_length=254)] = ""
    language: LanguageCode = Field("en", description="Of invoices and of mail about money.")

    def profile(self) -> BillingProfile:
        return BillingProfile(
            legal_name=self.legal_name,
            address=tuple(self.address),
            country=self.country,
            tax_id=self.tax_id,
            billing_email=self.billing_email,
            language=self.language,
        )


class BillingProfileOut(Output):
    """What invoices say. Empty means not told yet."""

    legal_name: str
    address: list[str]
    country: str
    tax_id: str
    billing_email: str
    language: str


class CloseIn(Input):
    """Closing is for good, so it wants the name."""

    confirm_name: Annotated[str, StringConstraints(max_length=120)] = Field(description="The name, exactly as it is.")


def shown(profile: BillingProfile) -> BillingProfileOut:
    return BillingProfileOut(
        legal_name=profile.legal_name,
        address=list(profile.address),
        country=profile.country,
        tax_id=profile.tax_id,
        billing_email=profile.billing_email,
        language=profile.language,
    )

"""What the resources of the control API share: strict shapes, errors, pages."""

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

from tenants.types import BillingMode, OperatorRole, Role, Scope, Status

Name = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f\s]([^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\s])?$"
    ),
    Field(description="1 to 120 printable characters, without spaces at the ends."),
]
PositiveAmount = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,26}(\.[0-9]{1,12})?$"),
    Field(description="A decimal with at most 12 decimals, as a string.", examples=["12.50"]),
]
Reason = Annotated[
    str,
    StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]*\S[^\x00]*$"),
    Field(description="Why, as it is read in the history: 1 to 500 characters."),
]
CurrencyCode = Literal["USD", "CNY"]
TierName = Literal["batch", "standard", "priority"]
Count = Annotated[int, Field(ge=0)]
ScopeName = Annotated[Scope, Field(strict=False)]
StatusName = Annotated[Status, Field(strict=False)]
RoleName = Annotated[Role, Field(strict=False)]
OperatorRoleName = Annotated[OperatorRole, Field(strict=False)]
BillingModeName = Annotated[BillingMode, Field(strict=False)]
# Postgres keeps years that Python cannot read back, and a row that nobody can read stops every gateway.
Instant = Annotated[
    AwareDatetime, Field(strict=False, ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(9000, 1, 1, tzinfo=UTC))
]


class Input(BaseModel):
    """A body: nothing unknown, nothing coerced, nothing quoted back in an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class SuspendIn(Input):
    """Why, for the audit trail."""

    reason: Reason | None = None


class HardSuspendIn(SuspendIn):
    """Why and how to suspend."""

    hard: bool = Field(False, description="Cut running answers too, within a second; they are charged until then.")


NO_REASON = SuspendIn()
SOFTLY = HardSuspendIn()


def because(reason: str | None) -> dict[str, Any]:
    """Return what the audit trail keeps of a reason; nothing without one."""
    return {} if reason is None else {"reason": reason}


class Output(BaseModel):
    """An answer."""

    model_config = ConfigDict(frozen=True)


class Problem(Output):
    """What went wrong, as RFC 9457 problem+json. Programs switch on `code`."""

    type: str = "about:blank"
    title: str
    status: int
    code: str = Field(examples=["NOT_FOUND"])
    detail: str
    request_id: str
    param: str | None = None
    errors: list[dict[str, str]] | None = Field(None, description="Each rule that the request breaks.")


_MEANING = {
    400: "The request cannot be understood.",
    401: "No valid credential.",
    403: "The credential may not do this.",
    404: "There is no such thing, or it is somebody else's.",
    409: "It conflicts with what is there.",
    410: "It was there, and is no longer kept.",
    413: "The body is too large.",
    422: "The request breaks a rule of the schema; `errors` names each.",
    429: "Too often; see Retry-After.",
    502: "Another system that this depends on did not answer properly.",
    503: "A part of the platform is away; see Retry-After.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses=` of a route for these error statuses."""
    return {status: problem_response(status) for status in statuses}


def problem_response(status: int) -> dict[str, Any]:
    content: Mapping[str, Any] = {"schema": {"$ref": "#/components/schemas/Problem"}}
    headers = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}} if status in {429, 503} else {}
    return {
        "description": _MEANING[status],
        "content": {"application/problem+json": content},
        **({"headers": headers} if headers else {}),
    }


class BalanceOut(Output):
    """What a tenant may still spend by the ledger. Calls that run, and usage of the last second, are not taken off."""

    currency: CurrencyCode
    billing_mode: BillingModeName
    available: str = Field(description="Decimal with 12 decimals.", examples=["12.500000000000"])
    credit_limit: str = Field(description="How far a postpaid tenant may go; 0 for prepaid.")


class UsageRow(Output):
    """One model on one day of the tenant's time zone. Token counts are disjoint: every token is in one of them."""

    day: date
    model: str
    requests: Count
    completed: Count
    input_uncached: Count
    input_cached: Count
    input_cache_write: Count
    output: Count
    reasoning: Count
    amount: str
    min_charge: str = Field(description="What of the amount minimum charges add to the price of the tokens.")
    rerated: str = Field(description="By how much re-ratings changed the amount since; below 0, what came back.")
    effective_amount: str = Field(description="The amount with the re-ratings.")


class UsageOut(Output):
    """Usage by day and model; days without any are left out."""

    start: date
    end: date
    tz: str
    currency: CurrencyCode
    rows: list[UsageRow]

"""This package's errors."""

from collections.abc import Sequence
from datetime import date, timedelta
from uuid import UUID

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from core.money import format_pico


def no_account(tenant_id: UUID) -> PlatformError:
    name = format_id(IdKind.TENANT, tenant_id)
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"The tenant {name} has no account here.")


def account_differs(tenant_id: UUID) -> PlatformError:
    name = format_id(IdKind.TENANT, tenant_id)
    return PlatformError(
        "ACCOUNT_EXISTS",
        ErrorKind.CONFLICT,
        f"The tenant {name} has an account already, in another currency or way of paying. Neither can change.",
    )


def invalid_amount(message: str) -> PlatformError:
    return PlatformError("INVALID_AMOUNT", ErrorKind.INVALID, message, param="amount")


def not_prepaid() -> PlatformError:
    return PlatformError(
        "NOT_PREPAID", ErrorKind.CONFLICT, "This tenant pays by invoice; only prepaid tenants have credit to top up."
    )


def invalid_price(message: str) -> PlatformError:
    return PlatformError("INVALID_PRICE", ErrorKind.INVALID, message, param="items")


def no_book(book_id: UUID) -> PlatformError:
    name = format_id(IdKind.PRICE_BOOK, book_id)
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no price book {name}.")


def no_version(version_id: UUID) -> PlatformError:
    name = format_id(IdKind.PRICE_VERSION, version_id)
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no price version {name}.")


def book_exists(currency: str) -> PlatformError:
    return PlatformError(
        "BOOK_EXISTS", ErrorKind.CONFLICT, f"There is a price book in {currency} already; publish a new version of it."
    )


def already_published(version_id: UUID) -> PlatformError:
    name = format_id(IdKind.PRICE_VERSION, version_id)
    return PlatformError(
        "PRICE_VERSION_PUBLISHED",
        ErrorKind.CONFLICT,
        f"The price version {name} is published and cannot change. Make a new draft.",
    )


def invalid_instant(message: str) -> PlatformError:
    return PlatformError("INVALID_EFFECTIVE_AT", ErrorKind.INVALID, message, param="effective_at")


def invalid_grant(message: str, param: str) -> PlatformError:
    return PlatformError("INVALID_GRANT", ErrorKind.INVALID, message, param=param)


def invalid_expiry(message: str) -> PlatformError:
    return PlatformError("INVALID_EXPIRY", ErrorKind.INVALID, message, param="expires_at")


def paid_credit_never_expires() -> PlatformError:
    return PlatformError(
        "PAID_CREDIT_NEVER_EXPIRES",
        ErrorKind.CONFLICT,
        "Paid credit never expires on this installation: leave out `expires_at`. Where the terms allow it, set"
        " TIDEGATE_BOOKS__PAID_CREDIT_MAY_EXPIRE=true on the host and ask again.",
        param="expires_at",
    )


def no_adjustment() -> PlatformError:
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, "This tenant has no such adjustment.")


def no_transaction() -> PlatformError:
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, "This tenant has no such transaction.")


def not_reversible(why: str) -> PlatformError:
    return PlatformError("NOT_REVERSIBLE", ErrorKind.CONFLICT, f"This transaction cannot be reversed. {why}")


def credit_spent() -> PlatformError:
    return PlatformError(
        "CREDIT_SPENT",
        ErrorKind.CONFLICT,
        "Some of this credit is spent, so it cannot be taken back whole.",
    )


def second_person_needed() -> PlatformError:
    return PlatformError(
        "SECOND_PERSON_NEEDED",
        ErrorKind.FORBIDDEN,
        "You asked for this yourself, or answer for who did. Another person must decide: have a second operator "
        "invited and confirmed, or set TIDEGATE_BOOKS__ADJUST_ALONE_MAX higher on the host and ask again.",
    )


def nobody_answers() -> PlatformError:
    return PlatformError(
        "NOBODY_ANSWERS",
        ErrorKind.FORBIDDEN,
        "This is more than may be done alone, and nobody confirmed answers for this sign-in or token. Sign in with "
        "your own password as a confirmed operator, or issue a new token while you are.",
    )


def opened_too_high(alone_max: str) -> PlatformError:
    return PlatformError(
        "SECOND_PERSON_NEEDED",
        ErrorKind.FORBIDDEN,
        f"One person opens a tenant with a limit of at most {alone_max}. Ask for more once it is open, with new "
        "billing terms, on which a second person decides.",
        param="credit_limit",
    )


def decision_waits() -> PlatformError:
    return PlatformError(
        "DECISION_WAITS",
        ErrorKind.CONFLICT,
        "A bill of this usage waits for a second person. Approve or decline that adjustment first.",
    )


def asked_by_nobody() -> PlatformError:
    return PlatformError(
        "SECOND_PERSON_NEEDED",
        ErrorKind.FORBIDDEN,
        "It was asked for before it was kept which person asks. Decline it, and ask again.",
    )


def adjustment_decided(state: str) -> PlatformError:
    return PlatformError("ADJUSTMENT_DECIDED", ErrorKind.CONFLICT, f"This adjustment is {state} already.")


def credit_limit_too_low(owed_pico: int) -> PlatformError:
    return PlatformError(
        "CREDIT_LIMIT_TOO_LOW",
        ErrorKind.CONFLICT,
        f"{format_pico(owed_pico)} are unbilled already, so the limit cannot be lower. Suspend the tenant to stop it.",
    )


def invalid_alert_settings(message: str, param: str) -> PlatformError:
    return PlatformError("INVALID_ALERT_SETTINGS", ErrorKind.INVALID, message, param=param)


def period_not_over(grace: timedelta) -> PlatformError:
    hours = grace // timedelta(hours=1)
    late = f" for {hours} hours, in which late usage comes in" if hours else ""
    return PlatformError("PERIOD_NOT_OVER", ErrorKind.CONFLICT, f"A month is closed when it is over (UTC){late}.")


def spools_not_empty(blocking: Sequence[str]) -> PlatformError:
    shown = "\n".join(f"  {line}" for line in blocking[:20])
    more = f"\n  and {len(blocking) - 20} more" if blocking[20:] else ""
    return PlatformError(
        "SPOOLS_NOT_EMPTY",
        ErrorKind.CONFLICT,
        f"Usage of this month may be on a disk. Have it posted or adopted, or say why not:\n{shown}{more}",
        fields={"spools": list(blocking[:20])},
    )


def period_order(wanted: date) -> PlatformError:
    return PlatformError(
        "PERIOD_ORDER", ErrorKind.CONFLICT, f"Months close one after the other; the next one is {wanted:%Y-%m}."
    )


def invalid_range(message: str) -> PlatformError:
    return PlatformError("INVALID_RANGE", ErrorKind.INVALID, message, param="start")


def invalid_rerating(message: str, param: str) -> PlatformError:
    return PlatformError("INVALID_RERATING", ErrorKind.INVALID, message, param=param)


def no_rerating(run_id: UUID) -> PlatformError:
    name = format_id(IdKind.RERATING, run_id)
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no re-rating {name}.")


def rerating_not_counted() -> PlatformError:
    return PlatformError(
        "RERATING_NOT_COUNTED", ErrorKind.CONFLICT, "What this re-rating would do is still being counted. Try later."
    )


def rerating_over(state: str) -> PlatformError:
    return PlatformError("RERATING_OVER", ErrorKind.CONFLICT, f"This re-rating is {state}. Ask for a new one.")


def not_quarantined() -> PlatformError:
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, "No usage of this generation is in quarantine.")


def already_decided(event_id: UUID) -> PlatformError:
    name = format_id(IdKind.GENERATION, event_id)
    return PlatformError(
        "ALREADY_DECIDED", ErrorKind.CONFLICT, f"{name} was billed or dismissed before; a decision stands for good."
    )


def not_billable(why: str) -> PlatformError:
    return PlatformError("NOT_BILLABLE", ErrorKind.CONFLICT, f"It cannot be billed: {why}. Dismiss it, or mend that.")


def receipt_gone(day: date) -> PlatformError:
    return PlatformError(
        "RECEIPT_GONE",
        ErrorKind.GONE,
        f"Single generations of {day.isoformat()} are no longer kept; the usage of that day is, in sums.",
    )

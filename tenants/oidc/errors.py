"""This package's errors. What a provider or a token said is never quoted: it may hold a secret."""

from core.errors import ErrorKind, PlatformError

RETRY_AFTER_S = 5


class GrantRefusedError(Exception):
    """The provider does not renew or redeem this grant (`invalid_grant`): whoever held it must sign in again."""


def provider_unavailable(reason: str) -> PlatformError:
    """The provider did not answer; another try makes sense."""
    return PlatformError(
        "IDENTITY_PROVIDER_UNAVAILABLE",
        ErrorKind.UNAVAILABLE,
        f"The identity provider does not answer now ({reason}). Try again shortly.",
        retry_after_s=RETRY_AFTER_S,
    )


def provider_invalid(reason: str) -> PlatformError:
    """The provider answered with what cannot be used; somebody has to mend it."""
    return PlatformError(
        "IDENTITY_PROVIDER_INVALID",
        ErrorKind.UPSTREAM,
        f"The identity provider's answer cannot be used: {reason}. Check the issuer and its configuration.",
    )


def sign_in_refused(reason: str) -> PlatformError:
    """This sign-in is not valid, whoever tries it."""
    return PlatformError(
        "SIGN_IN_REFUSED", ErrorKind.UNAUTHENTICATED, f"This sign-in is not valid: {reason}. Start it again."
    )


def token_refused(reason: str) -> PlatformError:
    """A bearer token that is not valid here; the reason names the check, never the token."""
    return PlatformError("INVALID_TOKEN", ErrorKind.UNAUTHENTICATED, f"This token is not valid here: {reason}.")

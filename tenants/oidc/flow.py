"""OpenID Connect's authorization code flow with PKCE, as a client: where to send the browser, and what comes back."""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

import msgspec
from authlib.oauth2.auth import ClientAuth
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge

from core.errors import ErrorKind, PlatformError
from core.sealing import NONCE_BYTES, seal, unseal
from tenants.oidc.clients import Clients
from tenants.oidc.discovery import Metadata
from tenants.oidc.errors import GrantRefusedError, provider_invalid, sign_in_refused
from tenants.oidc.tokens import check_id_token, glance, open_signed

ATTEMPT_S = 600
_ATTEMPT_CONTEXT = b"oidc sign-in"
_SAID = frozenset(
    {"invalid_request", "invalid_client", "unauthorized_client", "unsupported_grant_type", "invalid_scope"}
)


@dataclass(frozen=True, slots=True)
class Registration:
    """Us, as a provider knows us. Without a secret we are a public client."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    scopes: str = "openid email profile"


class Attempt(msgspec.Struct, frozen=True):
    """One sign-in under way, kept sealed in the browser's cookie."""

    provider: str  # the provider's id, in hex
    state: str
    nonce: str
    verifier: str
    return_to: str
    started_s: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Whom the provider vouches for. `claims` are of userinfo and ID token, which wins."""

    subject: str
    claims: dict[str, Any] = field(repr=False)
    refresh_token: str = field(repr=False)
    id_token: str = field(repr=False)


def seal_attempt(key: bytes, attempt: Attempt, random: bytes) -> str:
    """Return the cookie's text; `random` is 12 fresh bytes."""
    sealed = seal(key, msgspec.json.encode(attempt), context=_ATTEMPT_CONTEXT, nonce=random[:NONCE_BYTES])
    return base64.urlsafe_b64encode(sealed).decode().rstrip("=")


def open_attempt(key: bytes, text: str, now_s: int) -> Attempt:
    """Return the attempt in a cookie.

    Raises:
        PlatformError: SIGN_IN_REFUSED when it is not one of ours, or older than ten minutes.
    """
    try:
        sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        attempt = msgspec.json.decode(unseal(key, sealed, context=_ATTEMPT_CONTEXT), type=Attempt)
    except (binascii.Error, ValueError, msgspec.MsgspecError, PlatformError) as error:
        raise sign_in_refused("this browser did not start it") from error
    if not 0 <= now_s - attempt.started_s <= ATTEMPT_S:
        raise sign_in_refused("it took longer than ten minutes")
    return attempt


def authorization_url(metadata: Metadata, registration: Registration, attempt: Attempt, redirect_uri: str) -> str:
    """Return where to send the browser: code flow, PKCE S256, state and nonce."""
    url: str = prepare_grant_uri(
        metadata.authorization_endpoint,
        client_id=registration.client_id,
        response_type="code",
        redirect_uri=redirect_uri,
        scope=registration.scopes,
        state=attempt.state,
        nonce=attempt.nonce,
        code_challenge=create_s256_code_challenge(attempt.verifier),
        code_challenge_method="S256",
    )
    return url


def had_second_factor(profile: Profile) -> bool:
    """Say whether the provider vouches for more than one factor (RFC 8176)."""
    methods = profile.claims.get("amr")
    return isinstance(methods, list) and "mfa" in methods


async def redeem(
    clients: Clients, registration: Registration, attempt: Attempt, *, code: str, redirect_uri: str
) -> Profile:
    """Exchange the code for tokens, check them, and read who it is.

    Raises:
        PlatformError: SIGN_IN_REFUSED when the code or the ID token is not valid; IDENTITY_PROVIDER_… otherwise.
    """
    form = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": redirect_uri,
        "code_verifier": attempt.verifier,
    }
    try:
        answer = await _ask_tokens(clients, registration, form)
    except GrantRefusedError as error:
        raise sign_in_refused("the provider does not accept the code") from error
    id_token = _text(answer, "id_token")
    if not id_token:
        raise provider_invalid("it gives no ID token; is the scope openid among the scopes?")
    access_token = _text(answer, "access_token")
    claims = await _identity(clients, registration, id_token, access_token=access_token, nonce=attempt.nonce)
    subject: str = claims["sub"]
    told = await _userinfo(clients, registration, access_token, subject)
    return Profile(subject, {**told, **claims}, _text(answer, "refresh_token"), id_token)


async def renew(clients: Clients, registration: Registration, *, refresh_token: str, subject: str) -> Profile:
    """Use a refresh token, and read anew who it is. The profile's refresh token is the one to use next.

    Raises:
        GrantRefusedError: the provider ends it.
        PlatformError: IDENTITY_PROVIDER_…; SIGN_IN_REFUSED when it now speaks of somebody else.
    """
    answer = await _ask_tokens(clients, registration, {"grant_type": "refresh_token", "refresh_token": refresh_token})
    access_token, id_token = _text(answer, "access_token"), _text(answer, "id_token")
    claims: dict[str, Any] = {}
    if id_token:
        claims = await _identity(clients, registration, id_token, access_token=access_token, nonce=None)
    told = await _userinfo(clients, registration, access_token, subject)
    found = {**told, **claims}
    if not found:
        raise provider_invalid("at a refresh it tells neither an ID token nor userinfo")
    if found.get("sub") != subject:
        raise sign_in_refused("the provider speaks of somebody else")
    return Profile(subject, found, _text(answer, "refresh_token") or refresh_token, id_token)


async def _ask_tokens(clients: Clients, registration: Registration, form: dict[str, str]) -> dict[str, Any]:
    metadata = await clients.metadata(registration.issuer)
    headers: dict[str, str] = {}
    if not registration.client_secret:
        form["client_id"] = registration.client_id
    elif metadata.auth_method == "client_secret_post":
        form |= {"client_id": registration.client_id, "client_secret": registration.client_secret}
    else:
        auth = ClientAuth(registration.client_id, registration.client_secret, metadata.auth_method)
        _, headers, _ = auth.prepare("POST", metadata.token_endpoint, {}, "")
    status, answer = await clients.fetcher.post_form(metadata.token_endpoint, form, headers)
    if status == 200 and "error" not in answer:
        return answer
    said = answer.get("error")
    if said == "invalid_grant":
        raise GrantRefusedError
    raise provider_invalid(f"its token endpoint says {said}" if said in _SAID else f"its token endpoint says {status}")


async def _identity(
    clients: Clients, registration: Registration, id_token: str, *, access_token: str, nonce: str | None
) -> dict[str, Any]:
    """Return the checked claims of an ID token."""
    try:
        seen = glance(id_token)
        key = await clients.keys(registration.issuer).find(seen.kid, seen.algorithm)
        claims = open_signed(id_token, key, seen.algorithm)
    except PlatformError as error:
        if error.kind is not ErrorKind.UNAUTHENTICATED:
            raise
        raise sign_in_refused(
            "the ID token fails its check: " + error.message.partition(": ")[2].rstrip(".")
        ) from error
    check_id_token(
        claims,
        issuer=registration.issuer,
        client_id=registration.client_id,
        nonce=nonce,
        algorithm=seen.algorithm,
        access_token=access_token,
        now_s=clients.clock.now_us() // 1_000_000,
        leeway_s=clients.settings.leeway_s,
    )
    return claims


async def _userinfo(clients: Clients, registration: Registration, access_token: str, subject: str) -> dict[str, Any]:
    """Return what the userinfo endpoint says of the subject; nothing when there is no such endpoint."""
    metadata = await clients.metadata(registration.issuer)
    if not metadata.userinfo_endpoint or not access_token:
        return {}
    told = await clients.fetcher.get_json(metadata.userinfo_endpoint, {"Authorization": f"Bearer {access_token}"})
    if told.get("sub") != subject:
        raise sign_in_refused("userinfo speaks of somebody else")
    return told


def _text(answer: dict[str, Any], name: str) -> str:
    value = answer.get(name)
    return value if isinstance(value, str) else ""

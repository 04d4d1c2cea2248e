"""Signed tokens: what may be looked at before the signature is checked, the check, and what must hold afterwards."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from authlib.oidc.core import CodeIDToken
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import Key
from joserfc.jwt import JWTClaimsRegistry

from tenants.oidc.errors import sign_in_refused, token_refused

TOKEN_MAX = 24 * 1024
SUBJECT_MAX = 255
# Signatures by a private key only: `none` and those by a shared secret are not among them.
ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"}
)


class _Registry(jws.JWSRegistry):
    max_header_length = 4096


_REGISTRY = _Registry(algorithms=sorted(ALGORITHMS), strict_check_header=False)


class Unverified(msgspec.Struct, frozen=True):
    """What an unchecked token says of who could check it. Good for choosing a key, and for nothing else."""

    issuer: str
    audiences: tuple[str, ...]
    algorithm: str
    kid: str | None


def looks_signed(text: str) -> bool:
    """Say whether `text` has the shape of a signed token: three parts, of bounded length."""
    return len(text) <= TOKEN_MAX and text.count(".") == 2 and text.startswith("ey")


def glance(token: str) -> Unverified:
    """Read header and issuer of a token whose signature is not checked yet.

    Raises:
        PlatformError: INVALID_TOKEN, also for an algorithm that is not allowed.
    """
    if not looks_signed(token):
        raise token_refused("it is no signed token")
    header_text, payload_text, _ = token.split(".")
    header, payload = _object(header_text), _object(payload_text)
    algorithm, kid, issuer = header.get("alg"), header.get("kid"), payload.get("iss")
    if algorithm not in ALGORITHMS:
        raise token_refused("its algorithm is not allowed")
    if not isinstance(issuer, str) or not (kid is None or isinstance(kid, str)):
        raise token_refused("it names no issuer")
    return Unverified(issuer, _audiences(payload), algorithm, kid)


def open_signed(token: str, key: Key, algorithm: str) -> dict[str, Any]:
    """Check the signature with a key chosen by the caller, for exactly this algorithm, and return the claims.

    Raises:
        PlatformError: INVALID_TOKEN.
    """
    try:
        opened = jws.deserialize_compact(token, key, registry=_REGISTRY)
        claims = orjson.loads(opened.payload or b"")
    except (JoseError, ValueError) as error:
        raise token_refused("its signature does not match") from error
    if opened.headers().get("alg") != algorithm or not isinstance(claims, dict):
        raise token_refused("its signature does not match")
    return claims


def check_bearer(claims: Mapping[str, Any], *, issuer: str, audience: str, now_s: int, leeway_s: int) -> None:
    """Check that an opened bearer token is of this issuer, for this audience, and in force.

    Raises:
        PlatformError: INVALID_TOKEN with the claim that fails.
    """
    registry = JWTClaimsRegistry(
        now=now_s,
        leeway=leeway_s,
        iss={"essential": True, "value": issuer},
        aud={"essential": True, "value": audience},
        exp={"essential": True},
        sub={"essential": True},
    )
    try:
        registry.validate(dict(claims))
    except JoseError as error:
        raise token_refused(f"{error.description or error.error}"[:120]) from error
    if len(claims["sub"]) > SUBJECT_MAX:
        raise token_refused("its subject is too long")


def check_id_token(
    claims: Mapping[str, Any],
    *,
    issuer: str,
    client_id: str,
    nonce: str | None,
    algorithm: str,
    access_token: str,
    now_s: int,
    leeway_s: int,
) -> None:
    """Check an opened ID token as OpenID Connect Core §3.1.3.7 says; a renewed one need not have a nonce (§12.2).

    Raises:
        PlatformError: SIGN_IN_REFUSED with the claim that fails.
    """
    options = {
        "iss": {"essential": True, "value": issuer},
        "aud": {"essential": True, "value": client_id},
        "sub": {"essential": True},
    }
    params = {"nonce": nonce, "client_id": client_id, "access_token": access_token}
    try:
        CodeIDToken(dict(claims), {"alg": algorithm}, options, params).validate(now_s, leeway_s)
    except (JoseError, TypeError, ValueError) as error:
        said = getattr(error, "description", "") or type(error).__name__
        raise sign_in_refused(f"the ID token fails its check ({said[:120]})") from error
    if not 0 < len(claims["sub"]) <= SUBJECT_MAX:
        raise sign_in_refused("the ID token's subject is too long")


def _audiences(payload: Mapping[str, Any]) -> tuple[str, ...]:
    found = payload.get("aud")
    listed = found if isinstance(found, list) else [found]
    return tuple(item for item in listed if isinstance(item, str))


def _object(part: str) -> dict[str, Any]:
    try:
        value = orjson.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError):
        raise token_refused("it is no signed token") from None
    if not isinstance(value, dict):
        raise token_refused("it is no signed token")
    return value

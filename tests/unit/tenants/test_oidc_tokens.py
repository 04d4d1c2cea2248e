"""Signed tokens: only what an issuer signed with a private key, for us, in time, passes."""

import base64
import hmac
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey

from core.errors import PlatformError
from tenants.oidc import tokens

ISSUER, AUDIENCE, NOW = "https://id.example", "gateway", 1_800_000_000
KEY = RSAKey.generate_key(2048, {"kid": "k1"})
OTHER = RSAKey.generate_key(2048, {"kid": "k1"})
CLAIMS: dict[str, Any] = {"iss": ISSUER, "sub": "ada", "aud": AUDIENCE, "exp": NOW + 300, "iat": NOW}

# RFC 7515, appendix A.2: a token signed with RS256, and the public key to it.
RFC_TOKEN = (
    "eyJhbGciOiJSUzI1NiJ9"
    ".eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
    ".cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7"
    "t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12"
    "jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUP"
    "QGe77Rw"
)
RFC_KEY: Any = {
    "kty": "RSA",
    "n": "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZ"
    "S-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2Ca"
    "pHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h"
    "4FRWyuXpoQ",
    "e": "AQAB",
}


def signed(key: Key = KEY, alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    found = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode({"alg": alg, "kid": key.kid, **(header or {})}, found, key, algorithms=[alg])


def part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def check(token: str, key: Key = KEY, now_s: int = NOW) -> dict[str, Any]:
    seen = tokens.glance(token)
    claims = tokens.open_signed(token, key, seen.algorithm)
    tokens.check_bearer(claims, issuer=ISSUER, audience=AUDIENCE, now_s=now_s, leeway_s=60)
    return claims


def refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(PlatformError, match=reason) as caught:
        call()
    assert caught.value.kind.value == "unauthenticated"


def test_the_token_of_the_rfc_opens_with_its_key() -> None:
    claims = tokens.open_signed(RFC_TOKEN, RSAKey.import_key(RFC_KEY), "RS256")
    assert claims == {"iss": "joe", "exp": 1300819380, "http://example.com/is_root": True}
    broken = RFC_TOKEN[:40] + ("A" if RFC_TOKEN[40] != "A" else "B") + RFC_TOKEN[41:]
    refused(lambda: tokens.open_signed(broken, RSAKey.import_key(RFC_KEY), "RS256"), "signature")


@pytest.mark.parametrize(
    ("key", "alg"),
    [
        (KEY, "RS256"),
        (KEY, "PS384"),
        (ECKey.generate_key("P-256", {"kid": "k2"}), "ES256"),
        (OKPKey.generate_key("Ed25519", {"kid": "k3"}), "Ed25519"),
    ],
)
def test_what_a_private_key_signed_passes(key: Key, alg: str) -> None:
    assert check(signed(key, alg), key)["sub"] == "ada"


def test_a_token_without_signature_is_refused_in_every_spelling() -> None:
    for name in ("none", "None", "NONE", "nOnE", "", None):
        forged = f"{part({'alg': name})}.{part(CLAIMS)}."
        refused(partial(tokens.glance, forged), "algorithm")


def test_a_public_key_is_no_shared_secret() -> None:
    """CVE-2015-9235: HS256 with the text of the public key as its secret."""
    signing_input = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{part(CLAIMS)}"
    mac = hmac.digest(KEY.as_pem(private=False), signing_input.encode(), "sha256")
    forged = f"{signing_input}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
    refused(lambda: check(forged), "algorithm")
    refused(lambda: tokens.open_signed(forged, KEY, "HS256"), "signature")


def test_the_algorithm_chosen_for_the_key_is_the_one_checked() -> None:
    refused(lambda: tokens.open_signed(signed(alg="RS512"), KEY, "RS256"), "signature")


def test_another_key_of_the_same_id_is_refused() -> None:
    refused(lambda: check(signed(OTHER)), "signature")


def test_a_key_in_the_header_is_not_looked_at() -> None:
    forged = signed(OTHER, header={"jwk": OTHER.as_dict(private=False), "jku": "https://evil.example/jwks"})
    refused(lambda: check(forged), "signature")


def test_a_critical_header_that_is_not_understood_is_refused() -> None:
    token = signed(header={"b64": True, "crit": ["b64"]})
    parts = token.split(".")
    header = json.loads(base64.urlsafe_b64decode(parts[0] + "=="))
    header["crit"] = ["exp-policy"]
    refused(lambda: check(".".join([part(header), *parts[1:]])), "signature")


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://id.example/"}, "iss"),
        ({"iss": "https://evil.example"}, "iss"),
        ({"aud": "other"}, "aud"),
        ({"aud": ["other", "another"]}, "aud"),
        ({"aud": None}, "aud"),
        ({"exp": None}, "exp"),
        ({"exp": NOW - 61}, "expired"),
        ({"exp": "soon"}, "exp"),
        ({"nbf": NOW + 61}, "not yet valid"),
        ({"iat": NOW + 61}, "future"),
        ({"sub": None}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "s" * 256}, "subject"),
    ],
)
def test_a_claim_that_does_not_hold_is_refused(claims: dict[str, Any], reason: str) -> None:
    refused(lambda: check(signed(**claims)), reason)


def test_clocks_may_differ_by_a_minute_and_no_more() -> None:
    assert check(signed(exp=NOW - 59))
    assert check(signed(nbf=NOW + 59))
    assert check(signed(aud=["other", AUDIENCE]))
    refused(lambda: check(signed(), now_s=NOW + 360), "expired")


@pytest.mark.parametrize(
    "text", ["", "tg_x", "ey.a", "eyJ.eyJ.x", "ey..", "e" * 30_000, "ey\x00.ey.a", "eyJhbGciOiJSUzI1NiJ9.W10.a"]
)
def test_what_is_no_token_is_refused_unread(text: str) -> None:
    refused(lambda: tokens.glance(text), "signed token|issuer|algorithm")


def id_claims(**claims: Any) -> dict[str, Any]:
    found = {"iss": ISSUER, "sub": "ada", "aud": "client", "exp": NOW + 60, "iat": NOW, "nonce": "n1", **claims}
    return {name: value for name, value in found.items() if value is not None}


def check_id(claims: dict[str, Any], nonce: str | None = "n1") -> None:
    tokens.check_id_token(
        claims,
        issuer=ISSUER,
        client_id="client",
        nonce=nonce,
        algorithm="RS256",
        access_token="jHkWEdUXMU1BwAsC4vtUsZwnNvTIxEl0z9K3vx5KF0Y",
        now_s=NOW,
        leeway_s=60,
    )


def test_a_good_id_token_passes() -> None:
    check_id(id_claims())
    check_id(id_claims(aud=["client"], azp="client"))
    check_id(id_claims(aud=["client", "other"], azp="client"))
    check_id(id_claims(at_hash="77QmUPtjPfzWtF2AnpK9RQ"))  # OpenID Connect Core, appendix A.3
    check_id(id_claims(nonce=None), nonce=None)


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "n2"},
        {"nonce": None},
        {"aud": "other"},
        {"aud": ["client", "other"]},  # several audiences, and no authorised party
        {"aud": ["client", "other"], "azp": "other"},
        {"azp": "other"},
        {"iss": "https://evil.example"},
        {"exp": NOW - 61},
        {"exp": None},
        {"iat": None},
        {"iat": NOW + 61},
        {"sub": None},
        {"sub": ""},
        {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"},
    ],
)
def test_an_id_token_that_is_not_for_this_sign_in_is_refused(claims: dict[str, Any]) -> None:
    refused(lambda: check_id(id_claims(**claims)), "ID token")

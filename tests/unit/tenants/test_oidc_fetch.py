"""Where a provider's word may send us: to https, and never to this machine or a cloud's credentials."""

import pytest

from core.errors import PlatformError
from tenants.oidc.discovery import parse
from tenants.oidc.fetch import address_allowed, check_url

ISSUER = "https://id.example"
DOCUMENT = {
    "issuer": ISSUER,
    "authorization_endpoint": f"{ISSUER}/authorize",
    "token_endpoint": f"{ISSUER}/token",
    "jwks_uri": "https://keys.example/jwks",
}


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example/jwks",
        "ftp://id.example/x",
        "file:///etc/passwd",
        "https:///x",
        "https://127.0.0.1/x",
        "https://localhost/x",
        "https://[::1]/x",
        "https://[::ffff:127.0.0.1]/x",
        "https://169.254.169.254/latest/meta-data",
        "https://[fd00:ec2::254]/latest",
        "https://[fe80::1]/x",
        "https://0.0.0.0/x",
        "https://user:password@id.example/x",
        "https://id.example/x#fragment",
        "https://id.example:port/x",
        "https://id.example/" + "x" * 2048,
        "javascript:alert(1)",
        "//id.example/x",
        "",
    ],
)
def test_an_address_that_is_no_providers_is_refused(url: str) -> None:
    with pytest.raises(PlatformError) as caught:
        check_url(url, loopback=False)
    assert caught.value.code == "IDENTITY_PROVIDER_INVALID"


def test_https_passes_and_loopback_only_where_settings_say_so() -> None:
    check_url("https://id.example:8443/realms/x?y=z", loopback=False)
    check_url("https://10.1.2.3/realms/x", loopback=False)  # in a company's own network
    check_url("http://127.0.0.1:9400/jwks", loopback=True)
    check_url("http://localhost:9400/jwks", loopback=True)
    for url in ("http://127.0.0.1.evil.example/", "http://10.0.0.1/", "https://169.254.169.254/"):
        with pytest.raises(PlatformError):
            check_url(url, loopback=True)


def test_addresses_behind_a_name_are_judged_alike() -> None:
    for text in ("127.0.0.53", "::1", "169.254.169.254", "fe80::1%eth0", "::ffff:169.254.169.254", "224.0.0.1", "::"):
        assert not address_allowed(text, loopback=False), text
    for text in ("93.184.215.14", "10.0.0.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"):
        assert address_allowed(text, loopback=False), text


def test_a_discovery_document_speaks_for_its_own_issuer_only() -> None:
    found = parse(ISSUER, DOCUMENT, loopback=False)
    assert (found.token_endpoint, found.userinfo_endpoint) == (f"{ISSUER}/token", "")
    for lie in (
        {"issuer": f"{ISSUER}/"},
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://169.254.169.254/token"},
        {"jwks_uri": None},
        {"end_session_endpoint": "http://id.example/logout"},
    ):
        with pytest.raises(PlatformError):
            parse(ISSUER, {**DOCUMENT, **lie}, loopback=False)


def test_a_token_endpoint_that_takes_the_secret_in_the_form_only_gets_it_there() -> None:
    methods = {"token_endpoint_auth_methods_supported": ["private_key_jwt", "client_secret_post"]}
    assert parse(ISSUER, {**DOCUMENT, **methods}, loopback=False).auth_method == "client_secret_post"
    assert parse(ISSUER, DOCUMENT, loopback=False).auth_method == "client_secret_basic"

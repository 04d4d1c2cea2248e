"""What a provider says of itself: its endpoints, read from its discovery document and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from authlib.oidc.discovery import get_well_known_url

from tenants.oidc.errors import provider_invalid
from tenants.oidc.fetch import Fetcher, check_url

_REQUIRED = ("authorization_endpoint", "token_endpoint", "jwks_uri")
_OPTIONAL = ("userinfo_endpoint", "end_session_endpoint")


@dataclass(frozen=True, slots=True)
class Metadata:
    """A provider's endpoints. An empty one is not offered. `auth_method` is how its token endpoint knows a client."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str = ""
    end_session_endpoint: str = ""
    auth_method: str = "client_secret_basic"


def parse(issuer: str, document: Mapping[str, Any], *, loopback: bool) -> Metadata:
    """Return what the discovery document of `issuer` says.

    Raises:
        PlatformError: IDENTITY_PROVIDER_INVALID when it speaks for another issuer, or lacks an endpoint.
    """
    if document.get("issuer") != issuer:
        raise provider_invalid("its discovery document names another issuer")
    found = {}
    for name in (*_REQUIRED, *_OPTIONAL):
        value = document.get(name)
        if isinstance(value, str) and value:
            check_url(value, loopback=loopback)
            found[name] = value
        elif name in _REQUIRED:
            raise provider_invalid(f"its discovery document has no {name}")
    methods = document.get("token_endpoint_auth_methods_supported")
    only_post = isinstance(methods, list) and "client_secret_basic" not in methods and "client_secret_post" in methods
    return Metadata(issuer=issuer, auth_method="client_secret_post" if only_post else "client_secret_basic", **found)


async def discover(fetcher: Fetcher, issuer: str) -> Metadata:
    """Fetch and check the discovery document of `issuer`, and nothing else.

    Raises:
        PlatformError: IDENTITY_PROVIDER_UNAVAILABLE or IDENTITY_PROVIDER_INVALID.
    """
    document = await fetcher.get_json(get_well_known_url(issuer, external=True))
    return parse(issuer, document, loopback=fetcher.settings.allow_loopback)

"""A browser that signs in by an identity provider, through the control plane."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx

from core.clock import SystemClock
from tests.factories.identity_provider import CLIENT_ID, CLIENT_SECRET, IdentityProvider
from tests.factories.mock_provider import MockProvider
from tests.integration.control.conftest import Client

Provider = MockProvider | IdentityProvider


class ShiftedClock(SystemClock):
    """The machine's wall clock, put forward by a test."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def now_us(self) -> int:
        return super().now_us() + int(self.shift_s * 1_000_000)

    def now(self) -> Any:
        from datetime import timedelta

        return super().now() + timedelta(seconds=self.shift_s)


@dataclass
class Registered:
    """A provider that operators have added, and its id."""

    provider: Provider
    id: str
    admin: Client

    @property
    def path(self) -> str:
        return f"/api/v1/admin/identity-providers/{self.id}"

    async def map(self, *items: dict[str, Any]) -> None:
        answer = await self.admin.call("PUT", f"{self.path}/mappings", json={"items": list(items)})
        assert answer.status_code == 200, answer.text

    async def change(self, **changes: Any) -> httpx.Response:
        return await self.admin.patch(self.path, json=changes)


async def register(admin: Client, provider: Provider, name: str, **settings: Any) -> Registered:
    answer = await admin.post(
        "/api/v1/admin/identity-providers",
        json={
            "name": name,
            "issuer": provider.issuer,
            "client_id": CLIENT_ID,
            "client_secret": CLIENT_SECRET,
            "groups_claim": "groups",
            **settings,
        },
    )
    assert answer.status_code == 201, answer.text
    return Registered(provider, answer.json()["id"], admin)


@dataclass
class Browser:
    """Keeps its own cookies, as one browser does."""

    app: httpx.AsyncClient
    cookies: dict[str, str] = field(default_factory=dict)

    async def get(self, path: str) -> httpx.Response:
        return await self._keep("GET", path)

    async def post(self, path: str, **options: Any) -> httpx.Response:
        return await self._keep("POST", path, **options)

    async def _keep(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        answer = await self.app.request(method, path, headers={**headers, **options.pop("headers", {})}, **options)
        self.app.cookies.clear()
        for line in answer.headers.get_list("set-cookie"):
            name, _, rest = line.partition("=")
            value = rest.partition(";")[0].strip('"')
            if value:
                self.cookies[name] = value
            else:
                self.cookies.pop(name, None)
        return answer

    async def start(self, at: Registered, return_to: str = "/") -> str:
        """Return where the provider's page is."""
        answer = await self.get(f"/api/v1/auth/oidc/{at.id}/start?{urlencode({'return_to': return_to})}")
        assert answer.status_code == 302, answer.text
        return str(answer.headers["location"])

    async def sign_in(self, at: Registered, subject: str, return_to: str = "/") -> httpx.Response:
        """All of it; the answer is the callback's."""
        back = await at_provider(at.provider, await self.start(at, return_to), subject)
        return await self.get(back)


async def at_provider(provider: Provider, url: str, subject: str) -> str:
    """Say at the provider who one is; returns path and query of ours to come back to."""
    if isinstance(provider, MockProvider):
        back = await provider.sign_in(url, subject)
    else:
        async with httpx.AsyncClient() as http:
            answer = await http.get(url, params={**parse_qs(urlsplit(url).query), "login_hint": subject})
        back = answer.headers["location"]
    parts = urlsplit(back)
    return f"{parts.path}?{parts.query}"

"""A small identity provider whose keys, users and lies a test decides, beside the foreign one of `mock_provider`."""

import base64
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from joserfc import jwt
from joserfc.jwk import ECKey, Key, RSAKey

from core.clock import SystemClock

CLIENT_ID, CLIENT_SECRET = "tidegate", "s3cret/of=the+client"


def rsa_key(kid: str) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": kid, "use": "sig"})


def ec_key(kid: str) -> ECKey:
    return ECKey.generate_key("P-256", {"kid": kid, "use": "sig"})


@dataclass
class IdentityProvider:
    """Authorization code with PKCE, refresh, userinfo, logout. Users are claims by subject; it asks no password."""

    issuer: str = ""
    keys: list[Key] = field(default_factory=lambda: [rsa_key("one")])
    published: list[Key] | None = None  # else `keys`
    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    lies: dict[str, Any] = field(default_factory=dict)  # claims that replace those of ID tokens; None: left out
    discovery_lies: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "RS256"
    refuse_refresh: bool = False
    down: bool = False
    jwks_calls: int = 0
    refreshes: int = 0
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)  # access and refresh tokens → subject

    @property
    def now_s(self) -> int:
        return int(SystemClock().now().timestamp())

    def rotate(self, kid: str) -> None:
        """Sign with a new key from now on, and publish it alone."""
        self.keys = [rsa_key(kid)]

    def mint(self, subject: str, audience: Any, *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a signed token; a claim given as None is left out."""
        key = self.keys[0]
        found = {
            "iss": self.issuer,
            "sub": subject,
            "aud": audience,
            "iat": self.now_s,
            "exp": self.now_s + 600,
            **claims,
        }
        heads = {"alg": self.algorithm, "kid": key.kid, **(header or {})}
        return jwt.encode(
            {name: value for name, value in heads.items() if value is not None},
            {name: value for name, value in found.items() if value is not None},
            key,
            algorithms=[self.algorithm],
        )

    # ---- the endpoints

    async def discovery(self, _: web.Request) -> web.Response:
        document = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "end_session_endpoint": f"{self.issuer}/logout",
            "jwks_uri": f"{self.issuer}/jwks",
        }
        return web.json_response({**document, **self.discovery_lies})

    async def jwks(self, _: web.Request) -> web.Response:
        self.jwks_calls += 1
        keys = self.keys if self.published is None else self.published
        return web.json_response({"keys": [key.as_dict(private=False) for key in keys]})

    async def authorize(self, request: web.Request) -> web.Response:
        """Whoever names a subject is it."""
        query = request.query
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(16)
        self.codes[code] = {**query, "subject": query["login_hint"]}
        raise web.HTTPFound(f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}")

    async def token(self, request: web.Request) -> web.Response:
        form = await request.post()
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if request.headers.get("authorization") != f"Basic {basic}":
            return web.json_response({"error": "invalid_client"}, status=401)
        if form["grant_type"] == "refresh_token":
            return self._refreshed(str(form["refresh_token"]))
        granted = self.codes.pop(str(form["code"]), None)
        challenge = hashlib.sha256(str(form.get("code_verifier", "")).encode()).digest()
        if granted is None or granted["redirect_uri"] != form["redirect_uri"]:
            return web.json_response({"error": "invalid_grant"}, status=400)
        if base64.urlsafe_b64encode(challenge).rstrip(b"=").decode() != granted["code_challenge"]:
            return web.json_response({"error": "invalid_grant", "error_description": "PKCE"}, status=400)
        return self._tokens(granted["subject"], nonce=granted["nonce"])

    def _refreshed(self, token: str) -> web.Response:
        self.refreshes += 1
        subject = self.tokens.pop(token, None)  # each is used once, as RFC 9700 asks
        if subject is None or self.refuse_refresh:
            return web.json_response({"error": "invalid_grant"}, status=400)
        return self._tokens(subject)

    def _tokens(self, subject: str, **claims: Any) -> web.Response:
        access, refresh = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.tokens |= {access: subject, refresh: subject}
        identity = self.mint(subject, CLIENT_ID, **{**self.users.get(subject, {}), **claims, **self.lies})
        return web.json_response(
            {
                "access_token": access,
                "token_type": "Bearer",
                "expires_in": 600,
                "refresh_token": refresh,
                "id_token": identity,
            }
        )

    async def userinfo(self, request: web.Request) -> web.Response:
        subject = self.tokens.get(request.headers["authorization"].removeprefix("Bearer "))
        if subject is None:
            return web.json_response({"error": "invalid_token"}, status=401)
        return web.json_response({"sub": subject, **self.users.get(subject, {})})

    @web.middleware
    async def _maybe_down(self, request: web.Request, handler: Any) -> Any:
        if self.down:
            return web.json_response({}, status=503)
        return await handler(request)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._maybe_down])
        app.router.add_get("/.well-known/openid-configuration", self.discovery)
        app.router.add_get("/jwks", self.jwks)
        app.router.add_get("/authorize", self.authorize)
        app.router.add_post("/token", self.token)
        app.router.add_get("/userinfo", self.userinfo)
        return app


@asynccontextmanager
async def identity_provider(**values: Any) -> AsyncIterator[IdentityProvider]:
    """Serve one on a free port of this machine."""
    found = IdentityProvider(**values)
    runner = web.AppRunner(found.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    found.issuer = f"http://{host}:{port}"
    try:
        yield found
    finally:
        await runner.cleanup()

"""`oidc-provider-mock` as its own process: an identity provider that we did not write."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.factories.gateway_process import free_port
from tests.waiting import until


@dataclass(frozen=True)
class MockProvider:
    """It takes any client and any redirect address, and asks for no password."""

    issuer: str
    http: httpx.AsyncClient

    async def put_user(self, subject: str, **claims: Any) -> None:
        """Set what it says of somebody from now on."""
        answer = await self.http.put(f"{self.issuer}/users/{subject}", json=claims)
        answer.raise_for_status()

    async def revoke_tokens(self, subject: str) -> None:
        answer = await self.http.post(f"{self.issuer}/users/{subject}/revoke-tokens")
        answer.raise_for_status()

    async def sign_in(self, authorization_url: str, subject: str) -> str:
        """Be the browser at the provider: say who one is, and return where one is sent back to."""
        page = await self.http.get(authorization_url)
        page.raise_for_status()
        answer = await self.http.post(authorization_url, data={"sub": subject})
        assert answer.status_code in {302, 303}, answer.text
        return answer.headers["location"]


@asynccontextmanager
async def mock_provider() -> AsyncIterator[MockProvider]:
    """Start one, and wait until it answers."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port), "--host", "127.0.0.1"),
        env={**os.environ, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    issuer = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(timeout=10) as http:

            async def answers() -> bool:
                assert process.returncode is None, "the provider ended by itself"
                try:
                    return (await http.get(f"{issuer}/.well-known/openid-configuration")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(answers)
            yield MockProvider(issuer, http)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()

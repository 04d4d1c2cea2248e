"""A browser's call: who it proves to be, and the cookie that it keeps.

No script reads the cookie, no other site's form sends it, and over https nothing else carries it.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from api.deps import Act, get_act, get_caller
from api.guard import COOKIE, Caller, check_origin
from api.services import Services, services_of
from core.db import transaction
from core.logging import get_logger
from tenants import devices, sessions, sign_in
from tenants.sign_in import Candidate
from tenants.types import SignInMethod

DEVICE_COOKIE = "tidegate_device"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Visit:
    """What came, what leaves, and what it is served with."""

    request: Request
    response: Response
    services: Services
    caller: Caller
    act: Act
    now: datetime

    @property
    def address(self) -> str:
        """Where it comes from, as the gateway in front of us says."""
        return self.request.client.host if self.request.client is not None else ""

    def check_origin(self) -> None:
        """Refuse a page of another site, on routes that nobody is signed in on; the door does it on the others."""
        check_origin(self.request, self.services)

    async def prove(self, email: str, password: str) -> Candidate:
        """Return whose address and password these are. The try is counted, the hash compared outside of transactions.

        Raises:
            PlatformError: unauthenticated for a wrong one and for an unknown address; rate_limited when locked.
        """
        async with transaction(self.services.sessions) as session:
            candidate = await sign_in.begin(
                session,
                pepper=self.services.pepper,
                email=email,
                address=self.address,
                now=self.now,
                device=self.device(email),
            )
        if not await self._matches(candidate, password):
            raise sign_in.wrong_password()
        return candidate

    async def prove_again(self, password: str) -> None:
        """The same for who is signed in, before what only they may do; who has no password has proved enough."""
        services, person_id = self.services, self.caller.person_id
        async with transaction(services.sessions) as session:
            candidate = await sign_in.begin_again(session, person_id, pepper=services.pepper, now=self.now)
        if candidate.password_hash and not await self._matches(candidate, password):
            raise sign_in.wrong_own_password()
        async with transaction(services.sessions) as session:
            await sign_in.pass_again(session, person_id, pepper=services.pepper)

    def device(self, email: str) -> str:
        """Return which known device of this address's the try comes from; empty for none."""
        services = self.services
        keys = (services.signing, *services.previous_signing)
        return devices.recognise(keys, email, self.request.cookies.get(DEVICE_COOKIE, ""), self.now)

    def know_device(self, email: str) -> None:
        """Have the browser keep that this address was signed in on it: wrong tries elsewhere do not lock it out."""
        text = devices.issue(self.services.signing, email, self.now)
        self._set(DEVICE_COOKIE, text, int(devices.KNOWN_FOR.total_seconds()))

    async def _matches(self, candidate: Candidate, password: str) -> bool:
        right = await self.services.passwords.matches(candidate.password_hash, password)
        if not right:
            log.info("sign_in.refused", person_id=candidate.person_id and candidate.person_id.hex)
        return right

    async def open(
        self,
        session: AsyncSession,
        person_id: UUID,
        *,
        method: SignInMethod = SignInMethod.PASSWORD,
        provider_id: UUID | None = None,
        second_factor: bool = False,
    ) -> str:
        """Open a session under a fresh token, which the browser keeps; the one it had ends. Return its X-CSRF-Token."""
        services = self.services
        await sessions.end_token(session, self.request.cookies.get(COOKIE, ""), pepper=services.pepper, now=self.now)
        token = await sessions.open_session(
            session,
            person_id,
            pepper=services.pepper,
            now=self.now,
            absolute_s=services.settings.control.session_absolute_s,
            method=method,
            provider_id=provider_id,
            second_factor=second_factor,
            ip=self.address,
            user_agent=self.request.headers.get("user-agent", ""),
        )
        return self.keep(token)

    async def renew(self, session: AsyncSession, *, second_factor: bool) -> str:
        """Go on under a fresh token, after a change of what the session has proved. Return its X-CSRF-Token."""
        token = await sessions.renew(
            session, self.caller.own, pepper=self.services.pepper, now=self.now, second_factor=second_factor
        )
        return self.keep(token)

    def forget(self) -> None:
        """Have the browser forget the token."""
        self.response.delete_cookie(COOKIE, path="/", secure=self.secure, httponly=True, samesite="lax")

    def keep(self, token: str) -> str:
        """Have the browser keep the token. Return its X-CSRF-Token."""
        self._set(COOKIE, token, self.services.settings.control.session_absolute_s)
        return sessions.csrf_token(self.services.signing, token)

    def _set(self, name: str, value: str, max_age_s: int) -> None:
        self.response.set_cookie(
            name, value, max_age=max_age_s, path="/", secure=self.secure, httponly=True, samesite="lax"
        )

    @property
    def secure(self) -> bool:
        """Whether cookies are for https alone."""
        return self.request.url.scheme == "https" or self.services.settings.base_url.startswith("https://")


def get_visit(request: Request, response: Response) -> Visit:
    services = services_of(request)
    return Visit(request, response, services, get_caller(request), get_act(request), services.clock.now())


CurrentVisit = Annotated[Visit, Depends(get_visit)]

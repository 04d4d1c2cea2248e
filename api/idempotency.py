"""`Idempotency-Key` on changes: at the one place where requests come in and transactions are opened, for every route.

A repeat gets the answer of the first request, with `Idempotency-Replayed: true`. A request that was refused or failed
leaves nothing behind, because its transaction was rolled back: the key is free again.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from api.permissions import AUTH, ME, CallerKind, Rule
from api.services import Services
from core import idempotency
from core.idempotency import HEADER, Asked, Kept
from core.logging import get_logger
from core.sealing import NONCE_BYTES
from tenants.types import Actor

REPLAYED = "idempotency-replayed"
REPLAYED_YES = {REPLAYED: "true"}
# What these prove or give is for one request alone: tries are counted, cookies set. Nothing of them is ever kept.
EXEMPT = frozenset(
    {
        *(f"{ME}/{path}" for path in ("password", "totp", "totp/confirm", "totp/remove", "recovery-codes", "delete")),
        *(f"{AUTH}/{path}" for path in ("sign-out", "sign-out-everywhere", "oidc/sign-out")),
    }
)
_HEADERS = ("content-type", "location", "etag", "retry-after", "content-disposition")

log = get_logger(__name__)


class Replay(Exception):  # noqa: N818 - no error: what ends a request that was answered before
    """Raised instead of serving a repeat."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept


@dataclass(slots=True)
class Once:
    """A request with a key: what it asks for, and the answer, once the route has made it."""

    asked: Asked
    services: Services
    response: Response | None = None

    async def claim(self, session: AsyncSession) -> None:
        """Hold the key until the transaction ends.

        Raises:
            Replay: it was answered before.
            PlatformError: conflict, see `core.idempotency.claim`.
        """
        services = self.services
        kept = await idempotency.claim(session, self.asked, now=services.clock.now(), sealing_key=services.sealing_key)
        if kept is not None:
            raise Replay(kept)

    async def keep(self, session: AsyncSession) -> None:
        """Keep the answer in the transaction of its effect; of a refusal nothing."""
        response, services = self.response, self.services
        if response is not None and response.status_code >= 400:
            return
        if response is None or not isinstance(response.body, bytes) or "set-cookie" in response.headers:
            raise LookupError("this route's answer cannot be kept: name it in api/idempotency.py:EXEMPT")
        headers = {name: response.headers[name] for name in _HEADERS if name in response.headers}
        await idempotency.keep(
            session,
            self.asked,
            Kept(response.status_code, headers, response.body),
            now=services.clock.now(),
            sealing_key=services.sealing_key,
            nonce=os.urandom(NONCE_BYTES),
        )


def takes_key(path: str, rule: Rule) -> bool:
    """Whether a route takes the header: what changes something for a caller we know, but for what is exempt."""
    return bool(rule.action) and rule.caller is not CallerKind.PUBLIC and path not in EXEMPT


def once_of(request: Request) -> Once | None:
    """Return what the door found; None for a request without a key."""
    return getattr(request.state, "once", None)


async def serve(
    request: Request, services: Services, actor: Actor, handle: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Serve a request that has the header, once.

    Raises:
        PlatformError: INVALID_REQUEST for a key of another form; what the route raises.
    """
    key, *more = request.headers.getlist(HEADER)
    scope = (actor.kind.value, actor.id.hex if actor.id else "", request.method, request.url.path)
    content = request.scope["query_string"] + b"\n" + await request.body()
    peppers = (services.peppers.current, *services.peppers.previous)
    asked = idempotency.asked(scope, key if not more else "", content, peppers)  # two keys are none
    once = request.state.once = Once(asked, services)
    try:
        once.response = await handle(request)
    except Replay as replay:
        log.info("request.replayed", status=replay.kept.status)
        kept = replay.kept
        return Response(kept.body, kept.status, {**kept.headers, **REPLAYED_YES})
    return once.response


def parameter() -> dict[str, Any]:
    """Return the header as OpenAPI describes it."""
    return {
        "name": HEADER,
        "in": "header",
        "required": False,
        "description": (
            "Chosen by the caller, one per change. A repeat within 24 hours gets the first answer again, with "
            "`Idempotency-Replayed: true`, and changes nothing. A request that was refused leaves its key free."
        ),
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": idempotency.KEY_MAX_CHARS,
            "pattern": "^[ -~]+$",
        },
    }

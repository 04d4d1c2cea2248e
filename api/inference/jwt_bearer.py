"""Credentials that no map has: OIDC tokens, the other kind beside API keys, and keys made a moment ago."""

from typing import Protocol

import structlog

from api.inference import errors, wire
from api.inference.access import new_digest
from api.inference.bearers import Bearers
from api.inference.gateway import Gateway
from api.inference.job import Client, Request
from api.inference.pipeline import serve
from core.errors import PlatformError
from tenants.oidc.tokens import looks_signed

__all__ = ["PROJECT", "begin", "find_caller_then_serve", "looks_signed"]

PROJECT = b"openai-project"

_log = structlog.get_logger("gateway")


class Caller(Client, Protocol):
    """A connection that can be told of a refusal before `serve` has its request."""

    def refuse_cold(self, error: PlatformError) -> None: ...


def begin(bearers: Bearers, request: Request, token: str, body_max: int) -> Request:
    """Give the request its digest when the token is known; without one, it is for `find_caller_then_serve`.

    Raises:
        PlatformError: the token is refused; 503 when a body of more than `body_max` bytes, or one that is only sent on
            our word, would have to wait for its look-up.
    """
    head = request.head
    project = head.noted.get(PROJECT, b"")
    digest = bearers.known(token, project)
    if digest is not None:
        request.digest = digest
    elif not 0 <= head.length <= body_max or head.expects:
        bearers.look_up(token, project)
        raise errors.unavailable("Your token is being looked up. Send the request again.")
    return request


async def find_caller_then_serve(gateway: Gateway, request: Request, client: Caller) -> None:
    """Find who calls with a token or an API key that is new here, then `serve`; or tell the caller why not."""
    bearers = gateway.bearers
    try:
        token = wire.bearer(request.head).decode("latin-1")
        if bearers is not None and looks_signed(token):
            request.digest = await bearers.find(token, request.head.noted.get(PROJECT, b""))
        else:
            request.digest = await new_digest(gateway, token)
    except PlatformError as error:
        client.refuse_cold(error)
        return
    except Exception as bug:  # noqa: BLE001 - the caller must hear that no answer comes
        _log.error("bearer.failed", error=type(bug).__name__, exc_info=bug)
        client.abandon()
        return
    await serve(gateway, request, client)

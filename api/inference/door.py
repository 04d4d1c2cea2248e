"""From a head to a `Request`: the key is looked at before a byte of the body is asked for.

A head like one that was let in before, all but its Content-Length and its key, needs neither parser nor checks: they
would say the same again. What it was found to be is kept in `Gateway.heads`, by its shape, without the key.
"""

import hashlib

from api.inference import errors, wire
from api.inference.access import authenticate, missing_key, older_digest
from api.inference.gateway import Gateway
from api.inference.job import Request
from api.inference.jwt_bearer import begin, looks_signed
from api.inference.wire import Head
from core.heads import remember

DISCARD_MAX = 64 * 1024  # a refused request's body up to this size is read and dropped, and the connection lives


def request_of(gateway: Gateway, head: Head, endpoint: str, peer: str) -> Request:
    """Return the request that this checked head begins.

    Raises:
        PlatformError: 405, 415, or 401 for a key that is none of ours.
    """
    if head.method != b"POST":
        raise errors.method_not_allowed("POST")
    if head.noted.get(b"content-encoding", b"identity").lower() != b"identity":
        raise errors.unsupported_encoding()
    key = wire.bearer(head)
    if not key:
        raise missing_key("")
    digest = _digest(gateway, key)
    client_ip = wire.client_address(head, peer, gateway.settings.trusted_proxies)
    if digest not in gateway.directory.principals and gateway.directory.loaded:
        text = key.decode("latin-1")
        if gateway.bearers is not None and looks_signed(text):
            return begin(gateway.bearers, Request(head, endpoint, b"", client_ip), text, DISCARD_MAX)
        digest = older_digest(gateway, text, digest)
        if not digest and 0 <= head.length <= DISCARD_MAX and not head.expects:
            return Request(head, endpoint, b"", client_ip)  # for `jwt_bearer.find_caller_then_serve`
    if not 0 <= head.length <= DISCARD_MAX or head.expects:  # `serve` looks at it once more
        authenticate(gateway.directory, digest, gateway.clock.now_us(), client_ip)
    return Request(head, endpoint, digest, client_ip)


def recall(gateway: Gateway, data: bytes, peer: str) -> tuple[Request, bool] | None:
    """Return the request, with its body, that `data` wholly is, and whether the connection is kept; None: parse it."""
    shape, key, begin = wire.shape(data)
    known = gateway.heads.get(shape)
    if known is None or len(data) - begin > gateway.settings.body_max_bytes:
        return None
    digest = hashlib.blake2b(key, digest_size=32, key=gateway.pepper).digest()  # as `_digest`
    if digest not in gateway.directory.principals:
        return None
    head, endpoint, keep_alive = known
    if proxies := gateway.settings.trusted_proxies:
        peer = wire.client_address(head, peer, proxies)
    return Request(head, endpoint, digest, peer, data[begin:]), keep_alive


def learn(gateway: Gateway, data: bytes, request: Request, *, keep_alive: bool) -> None:
    """Remember the head of a request that was let in and came as `data`, in one piece."""
    if wire.IDEMPOTENCY_KEY in request.head.noted:
        return  # no other head is like it
    shape, _, begin = wire.shape(data)
    if begin and not request.head.expects:
        remember(gateway.heads, shape, (request.head, request.endpoint, keep_alive))


def _digest(gateway: Gateway, key: bytes) -> bytes:
    """As `tenants.credentials.digest`; of bytes, since a key of ours is ASCII."""
    return hashlib.blake2b(key, digest_size=32, key=gateway.pepper).digest()

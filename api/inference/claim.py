"""Between stages two and four: of requests with one idempotency key, one runs; its repeats hear what became of it.

A key is its API key's own, and an endpoint's: two callers never meet. The body must be the same.
"""

import hashlib
from datetime import UTC, datetime, timedelta

from api.inference import claims, errors
from api.inference.claims import Answer, Claim, Holder, KeysExhausted
from api.inference.cold_start import COMMENT
from api.inference.gateway import Gateway
from api.inference.job import Client, Job, Request
from api.inference.pass_through import PassThrough
from core import idempotency
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind
from core.resp import RespError, RespUnavailable

AWAY_RETRY_S = 5
RUNNING_RETRY_S = 2
USED = "IDEMPOTENCY_KEY_USED"
FINAL = frozenset({USED, "IDEMPOTENCY_KEY_REUSED"})  # 409 for good
COST = b"X-Tidegate-Cost: "


class Replay(PlatformError):  # noqa: N818 - an answer
    """Raised instead of serving a repeat, with the answer and the generation that it was: no error to its caller."""

    def __init__(self, answer: Answer, request_id: str) -> None:
        super().__init__("IDEMPOTENCY_REPLAYED", ErrorKind.CONFLICT, "The first answer was sent again.")
        self.answer = answer
        self.public_id = _public(request_id)


async def claim(gateway: Gateway, job: Job, request: Request, client: Client, key: bytes) -> Client:
    """Hold the request's idempotency key in `job.claim`, and return to whom the answer goes.

    Raises:
        Replay: it was answered, and the answer is kept.
        PlatformError: 409 while another request with the key runs, when it is done, or had another body; 429 for too
            many keys in a day; 503 when Valkey is away: without it nobody knows.
    """
    principal = job.offer.principal
    if job.call.endpoint == "tokenize":  # which costs nothing
        return client
    idempotency.check(key.decode("latin-1"))
    now_us = gateway.clock.now_us()
    mine = Claim(
        _digest(principal.key_id.bytes + job.call.endpoint.encode() + b"\n" + key),
        job.id.hex,
        _fingerprint(request.body, gateway.pepper),
        principal.tenant_id,
        principal.project_id,
        claims.day_of(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=now_us)),
    )
    mine.bill = _bill(mine.digest, request.body, gateway)
    known, answer = gateway.claims, None
    if known is None:
        raise _away()
    try:
        holder = await known.take(mine)
        if holder is None:
            job.claim = mine
            return Recorder(gateway, mine, client) if principal.keep_answers else client
        if not holder.running and principal.keep_answers and _same(holder, request, gateway):
            answer = await known.kept(mine, holder)
    except KeysExhausted:
        raise _exhausted(now_us) from None
    except (RespUnavailable, RespError):
        raise _away() from None
    if answer is not None:
        gateway.metrics.add("idempotency_replayed_total")
        raise Replay(answer, holder.request_id)
    gateway.metrics.add("idempotency_refused_total")
    raise _refusal(holder, same=_same(holder, request, gateway))


def finish(gateway: Gateway, mine: Claim, *, ended: bool, billed: bool) -> None:
    """Say how the request ended: a key whose request was billed or answered is used, any other is free again."""
    mine.answered = ended
    if gateway.claims is not None:
        gateway.claims.finish(mine, done=ended or billed)


def show(client: Client, found: Replay) -> None:
    """Send a kept answer, a stream as a stream again."""
    answer = found.answer
    extra = b"X-Request-Id: %b\r\nIdempotency-Replayed: true\r\n%b" % (found.public_id.encode(), answer.cost)
    if answer.stream:
        client.begin_stream(extra)
        client.end_stream(answer.body)
    else:
        client.respond(200, answer.body, extra)


class Recorder(PassThrough):
    """The caller's connection, as the stages see it; what goes through is kept for repeats when it ends well."""

    __slots__ = ("_claim", "_gateway", "_parts", "_size")

    def __init__(self, gateway: Gateway, mine: Claim, client: Client) -> None:
        super().__init__(client)
        self._gateway = gateway
        self._claim = mine
        self._parts: list[bytes] = []
        self._size = 0

    def stream(self, data: bytes) -> None:
        if not data.startswith(COMMENT):  # what was said while it was held is no part of the answer
            self._add(data)
        self._client.stream(data)

    def end_stream(self, data: bytes) -> None:
        self._add(data)
        self._keep(stream=True)
        self._client.end_stream(data)

    def respond(self, status: int, body: bytes, extra: bytes) -> None:
        self._add(body)
        lines = (line + b"\r\n" for line in extra.split(b"\r\n"))
        self._keep(stream=False, cost=next((line for line in lines if line.startswith(COST)), b""))
        self._client.respond(status, body, extra)

    def _add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= claims.ANSWER_MAX_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    def _keep(self, *, stream: bool, cost: bytes = b"") -> None:
        known = self._gateway.claims
        if known is not None and self._claim.answered and self._size <= claims.ANSWER_MAX_BYTES:
            known.keep(self._claim, Answer(stream, b"".join(self._parts), cost))


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, person=b"tg-idempotency").digest()


def _fingerprint(body: bytes, pepper: bytes) -> str:
    """Keyed, so that what is kept of a short prompt does not give it away."""
    return hashlib.blake2b(body, digest_size=16, key=pepper).hexdigest()


def _bill(digest: bytes, body: bytes, gateway: Gateway) -> bytes:
    """What the poster bills once: this body under this key. Another body is another request, also when Valkey forgot.

    Under the oldest pepper, which gateways share while they are restarted one by one with a new one.
    """
    oldest = (gateway.pepper, *gateway.previous_peppers)[-1]
    return hashlib.blake2b(digest + body, digest_size=16, key=oldest, person=b"tg-bill-once").digest()


def _same(holder: Holder, request: Request, gateway: Gateway) -> bool:
    peppers = (gateway.pepper, *gateway.previous_peppers)
    return any(holder.fingerprint == _fingerprint(request.body, pepper) for pepper in peppers)


def _public(request_id: str) -> str:
    return f"{IdKind.GENERATION.value}_{request_id}"


def _refusal(holder: Holder, *, same: bool) -> PlatformError:
    if not same:
        return idempotency.key_reused()
    name = _public(holder.request_id)
    if holder.running:
        return idempotency.in_progress(RUNNING_RETRY_S, {"generation": name})
    receipt = f"/v1/generations/{name}"
    return PlatformError(
        USED,
        ErrorKind.CONFLICT,
        f"This {idempotency.HEADER} was used: the request was answered and is billed once. Its receipt: {receipt}",
        param=idempotency.HEADER,
        fields={"generation": name, "receipt": receipt},
    )


def _away() -> PlatformError:
    message = "Idempotency keys cannot be checked now. Try again shortly, or send the request without one."
    return errors.unavailable(message, AWAY_RETRY_S)


def _exhausted(now_us: int) -> PlatformError:
    return PlatformError(
        "IDEMPOTENCY_KEYS_EXHAUSTED",
        ErrorKind.RATE_LIMITED,
        f"This project has used {claims.KEYS_PER_DAY_MAX:,} idempotency keys today (UTC), which is the most.",
        param=idempotency.HEADER,
        retry_after_s=claims.DAY_S - now_us // 1_000_000 % claims.DAY_S,
    )

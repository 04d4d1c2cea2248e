"""What receives an engine's answer: chunks go on to the client by a direct call, `serve` awaits only `done`."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from api.inference import errors
from api.inference.directory import Offer
from api.inference.sse import EventFilter
from core.errors import ErrorKind, PlatformError
from engine.client import Call, Failure, Target
from engine.refusals import blames_caller, explain
from scheduler.router.replica import Outcome

BUFFERED_MAX = 64 * 1024 * 1024
ERROR_BODY_MAX = 64 * 1024
SICK = frozenset({500, 502, 504})  # what an engine says that is not well; 429 and 503: it has too much to do


class StreamClient(Protocol):
    """The client's side of a stream."""

    def stream(self, data: bytes) -> None: ...


class Relay:
    """What both kinds of answer have in common. One object per attempt; `done` is set once, whatever happened."""

    __slots__ = (
        "body",
        "call",
        "content_type",
        "cut",
        "deadline",
        "done",
        "failure",
        "first_at",
        "hung",
        "monotonic",
        "offer",
        "preempted",
        "retry_after",
        "revoked_by",
        "size",
        "status",
        "target",
        "unmoved",
    )

    def __init__(self, done: asyncio.Future[None], monotonic: Callable[[], float]) -> None:
        self.done = done
        self.monotonic = monotonic
        self.call: Call | None = None
        self.status = 0
        self.content_type = b""
        self.retry_after = b""
        self.failure: Failure | None = None
        self.cut: PlatformError | None = None  # why we ended it ourselves
        self.offer: Offer | None = None  # whose answer it is, and of which model
        self.target: Target | None = None  # where it comes from
        self.unmoved = False  # it may be sent to another replica when this one hangs
        self.hung = False  # ended for that
        self.revoked_by: PlatformError | None = None
        self.preempted = False  # ended to give its place to a higher tier
        self.body: list[bytes] = []
        self.size = 0
        self.first_at = 0.0
        self.deadline = 0.0  # monotonic; the sweeper ends it then

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self.status = status
        self.content_type = content_type
        self.retry_after = retry_after

    def on_data(self, block: bytes) -> None:
        """Keep it."""
        if not self.first_at:
            self.first_at = self.monotonic()
        self.size += len(block)
        if self.size > ERROR_BODY_MAX and self.size > self.size_max:
            self.break_off(Failure.PROTOCOL if self.status == 200 else None)  # a refusal's status says enough
            return
        self.body.append(block)

    def on_end(self, failure: Failure | None) -> None:
        self.failure = failure
        self.call = None  # it knows this sink: without the loop of two the collector has nothing to do
        if not self.done.done():
            self.done.set_result(None)

    @property
    def size_max(self) -> int:
        return BUFFERED_MAX if self.status == 200 else ERROR_BODY_MAX

    def break_off(self, failure: Failure | None) -> None:
        """Close the engine's connection and end with this failure, or with what has come."""
        self.abort()
        self.on_end(failure)

    def time_out(self) -> None:
        """Called by the sweeper."""
        self.cut = errors.upstream_timeout()
        self.break_off(Failure.LOST)

    def interrupt(self) -> None:
        """The process must end before this answer does."""
        self.cut = errors.unavailable("This gateway had to stop. Nothing was charged; try again.")
        self.break_off(Failure.LOST)

    def revoke(self, error: PlatformError) -> None:
        """The caller's rights ended, and what runs ends with them; what was generated until now is charged."""
        self.revoked_by = self.cut = error
        self.break_off(Failure.LOST)

    @property
    def begun(self) -> bool:
        """Whether the caller has had a part of the answer, or is about to get the whole."""
        return bool(self.status)

    def give_place(self) -> bool:
        """Called when a higher tier needs the place: end the engine's call, unless the answer has begun."""
        if self.begun or self.done.done():
            return False
        self.preempted = True
        self.break_off(Failure.LOST)
        return True

    @property
    def movable(self) -> bool:
        """Whether another replica may still be asked, as this one has given its caller nothing."""
        return self.unmoved and not self.begun and not self.done.done()

    def move(self) -> None:
        """Its engine hangs: end the call there, so that another is asked."""
        self.hung = True
        self.break_off(Failure.LOST)

    def abort(self) -> None:
        if self.call is not None:
            self.call.abort()

    @property
    def error(self) -> PlatformError | None:
        """Why this answer is none, or None when it is one."""
        if self.cut is not None:
            return self.cut
        if self.failure is not None:
            return _failure_error(self.failure)
        if self.status != 200:
            return _status_error(self.status, b"".join(self.body), self.retry_after)
        return None

    @property
    def says(self) -> Outcome:
        """What the attempt says of the replica."""
        if self.failure is Failure.CONNECT:
            return Outcome.REFUSED
        if self.cut is not None:
            return Outcome.FAILED if self.cut.code == "UPSTREAM_TIMEOUT" else Outcome.NOTHING
        if self.preempted or self.failure is Failure.QUEUE_FULL or not self.done.done():
            return Outcome.NOTHING  # we ended it, or never began
        if self.failure is not None or self.status in SICK:
            return Outcome.FAILED
        return Outcome.WELL if self.status == 200 else Outcome.NOTHING

    @property
    def retryable(self) -> bool:
        """Another replica may be asked: this one never answered a byte, or none that its caller has had."""
        if self.hung:
            return True
        return self.failure is not None and not self.status and self.cut is None and not self.preempted


class StreamRelay(Relay):
    """Passes whole events on as they come. Nothing passes `[DONE]` or the usage."""

    __slots__ = ("client", "events", "gap_seen", "last_at", "relaying")

    def __init__(
        self,
        done: asyncio.Future[None],
        monotonic: Callable[[], float],
        client: StreamClient,
        events: EventFilter,
        gap_seen: Callable[[float], None],
    ) -> None:
        super().__init__(done, monotonic)
        self.client = client
        self.events = events
        self.gap_seen = gap_seen
        self.relaying = False
        self.last_at = 0.0

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        super().on_head(status, content_type, retry_after)
        self.relaying = status == 200 and content_type.lower().startswith(b"text/event-stream")

    @property
    def begun(self) -> bool:
        return bool(self.last_at) or self.status not in {0, 200}

    @property
    def size_max(self) -> int:
        return ERROR_BODY_MAX  # no stream: nothing to be relayed

    def on_data(self, block: bytes) -> None:
        if not self.relaying:
            super().on_data(block)
            return
        events = self.events
        shown = events.feed(block)
        if shown:
            now = self.monotonic()
            if self.last_at:
                self.gap_seen(now - self.last_at)
            else:
                self.first_at = now
            self.last_at = now
            self.client.stream(shown)
        if events.failed or events.overflow:
            self.break_off(Failure.PROTOCOL)

    def on_end(self, failure: Failure | None) -> None:
        if self.relaying and not self.done.done():
            shown = self.events.finish()
            if shown:
                self.client.stream(shown)
            if self.events.failed:
                failure = Failure.PROTOCOL
            elif self.events.done:
                failure = None  # the engine said all of it; how its connection ended does not matter
        super().on_end(failure)

    @property
    def error(self) -> PlatformError | None:
        found = super().error
        if found is None and not self.relaying:
            return errors.upstream_error()  # 200, but no stream
        return found


class AnswerFacts(msgspec.Struct):
    """The members of a buffered answer that we look at; the rest is passed on unread."""

    id: Any = None
    usage: Any = None
    timings: Any = None


class _Tokenized(msgspec.Struct):
    """The member of an answer to /tokenize that we look at."""

    count: int = -1


_tokenized = msgspec.json.Decoder(_Tokenized).decode
_facts = msgspec.json.Decoder(AnswerFacts).decode
_decode = msgspec.json.Decoder().decode


def read_answer(body: bytes) -> AnswerFacts | None:
    """Return what a buffered answer says of itself; None when it is not a JSON object."""
    try:
        return _facts(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_count(body: bytes) -> int:
    """Return how many tokens an answer to /tokenize counted; -1 when it does not say."""
    try:
        return max(-1, _tokenized(body).count)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return -1


def _failure_error(failure: Failure) -> PlatformError:
    if failure is Failure.QUEUE_FULL:
        return errors.model_busy()
    if failure is Failure.CONNECT:
        return errors.upstream_error("The engine cannot be reached. Nothing was charged.")
    return errors.upstream_error()


def _status_error(status: int, body: bytes, retry_after: bytes) -> PlatformError:
    """The engine's own refusals: what the caller did wrong is told to the caller, the rest is ours."""
    said = _engine_error(body)
    if blames_caller(status, said):
        message, param = explain(said)
        if status == 404 and not message:
            return errors.upstream_error("The engine does not know this endpoint or model. Nothing was charged.")
        return PlatformError(
            "INVALID_REQUEST",
            ErrorKind.INVALID,
            message[:1000] or "The engine refused the request.",
            param=param and param[:64],
        )
    if status in {429, 503}:
        seconds = int(retry_after) if retry_after.isdigit() and len(retry_after) < 5 else 1
        return errors.model_busy(max(1, seconds))
    if status in {408, 504}:
        return errors.upstream_timeout()
    return errors.upstream_error()


def _engine_error(body: bytes) -> dict[str, Any]:
    """The error object of an engine's refusal; empty when there is none."""
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    if type(found) is not dict:
        return {}
    inner = found.get("error")
    return inner if type(inner) is dict else found

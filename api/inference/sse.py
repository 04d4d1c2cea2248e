"""Whole events of an engine's stream, made into what the caller asked for. Pure, but for what `EventFilter` remembers.

In JSON text an unescaped quote never stands inside a string, so ``"usage"`` or ``"model":"x"`` found as bytes is a
member, whatever the model wrote. Decoding happens only for events that carry usage.
"""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
TAIL_MAX = 4 * 1024 * 1024  # an event larger than this is no event of ours

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class EventFilter:
    """Reads usage, strips what only we asked for, renames the model, counts output deltas.

    Blocks may be cut anywhere; what comes out is always whole events. `[DONE]` and usage never come out: the caller
    of this class writes them at the end, when the bill is safe.
    """

    __slots__ = (
        "closing_facts",
        "deltas",
        "done",
        "failed",
        "keep_null_usage",
        "overflow",
        "patterns",
        "rename",
        "report",
        "tail",
        "upstream_id",
    )

    def __init__(self, upstream_model: str, public_model: str, *, include_usage: bool, chat: bool) -> None:
        self.tail = b""
        self.done = False
        self.failed = False  # the engine reported an error inside its stream
        self.overflow = False
        self.report: dict[str, Any] | None = None  # the last ``usage``, with llama.cpp's ``timings`` beside it
        self.closing_facts: dict[str, Any] = {}  # id, object, created of the stream, for a usage chunk of ours
        self.upstream_id = ""
        self.deltas = 0
        self.keep_null_usage = include_usage
        self.rename = () if upstream_model == public_model else _rename_pairs(upstream_model, public_model)
        self.patterns = _CHAT if chat else _TEXT

    def feed(self, block: bytes) -> bytes:
        """Return the whole events now complete, as the caller shall see them (maybe none)."""
        if self.tail:
            block = self.tail + block
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if block.endswith(b"\n\n"):
            self.tail = b""
            return self._filter(block)
        last = block.rfind(b"\n\n")
        self.tail = block[last + 2 :] if last >= 0 else block
        if len(self.tail) > TAIL_MAX:
            self.overflow = True
            self.tail = b""
        return self._filter(block[: last + 2]) if last >= 0 else b""

    def finish(self) -> bytes:
        """Return what an engine left without its final blank line."""
        tail, self.tail = self.tail.strip(), b""
        return self._filter(tail + b"\n\n") if tail.startswith(b"data:") or b"\ndata:" in tail else b""

    def _filter(self, events: bytes) -> bytes:
        if not self.closing_facts:
            self._learn(events)
        if b'"usage"' in events:
            events = self._take_usage(events)
        if b"[DONE]" in events:
            events = self._take_done(events)
        if b'"error"' in events and _reports_error(events):
            self.failed = True
            return b""
        for old, new in self.rename:
            if old in events:
                events = events.replace(old, new)
        deltas = 0
        for counted, empty in self.patterns:
            found = events.count(counted)
            if found:
                deltas += found - events.count(empty)
        self.deltas += deltas
        if deltas and len(self.patterns) > 2:  # one engine writes one way: stop looking for the other
            self.patterns = tuple(pair for pair in self.patterns if pair[0].endswith(b': "') == (b'": "' in events))
        return events

    def _learn(self, events: bytes) -> None:
        """Read id, object and created from the first event that is a JSON object."""
        for event in events.split(b"\n\n"):
            document = _object(event)
            if document is not None and "error" not in document:
                self.upstream_id = str(document.get("id") or "")[:200]
                self.closing_facts = {key: document.get(key) for key in ("id", "object", "created")}
                return

    def _take_usage(self, events: bytes) -> bytes:
        kept: list[bytes] = []
        for event in events.split(b"\n\n"):
            shown = self._without_usage(event) if b'"usage"' in event else event
            if shown is not None:
                kept.append(shown)
        return b"\n\n".join(kept)

    def _without_usage(self, event: bytes) -> bytes | None:
        """The event without usage, None when nothing is left of it."""
        if b'"usage":null' in event and event.count(b'"usage"') == 1:
            return event if self.keep_null_usage else event.replace(b',"usage":null', b"")
        document = _object(event)
        if document is None or "usage" not in document:
            return event
        usage = document.pop("usage")
        if type(usage) is dict:
            self.report = {"usage": usage, "timings": document.get("timings")}
        elif usage is None and self.keep_null_usage:
            return event
        if not document.get("choices") and "error" not in document:
            return None
        return _other_lines(event) + b"data: " + _encode(document)

    def _take_done(self, events: bytes) -> bytes:
        start = 0 if events.startswith((DONE, b"data:[DONE]\n\n")) else max(events.find(b"\ndata: [DONE]\n\n"), 0)
        if start == 0 and not events.startswith((DONE, b"data:[DONE]\n\n")):
            start = events.find(b"\ndata:[DONE]\n\n")
            if start < 0:
                return events
        self.done = True
        return events[: start + 1] if start else b""


def usage_chunk(facts: dict[str, Any], model: str, usage: dict[str, Any]) -> bytes:
    """The last event before [DONE] of a caller who asked for usage."""
    return b"data: " + _encode({**facts, "model": model, "choices": [], "usage": usage}) + b"\n\n"


def _object(event: bytes) -> dict[str, Any] | None:
    """The event's data as a JSON object; other lines (``event:``, ``id:``, comments) may stand around it."""
    if event.startswith(b"data:") and b"\n" not in event:
        data = event[5:]
    else:
        data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data:
        return None
    try:
        document = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return document if type(document) is dict else None


def _other_lines(event: bytes) -> bytes:
    if event.startswith(b"data:") and b"\n" not in event:
        return b""
    return b"".join(line + b"\n" for line in event.split(b"\n") if line and not line.startswith(b"data:"))


def _reports_error(events: bytes) -> bool:
    for event in events.split(b"\n\n"):
        if b'"error"' in event:
            if event.startswith((b"error:", b"event: error", b"event:error")):
                return True
            document = _object(event)
            if document is not None and document.get("error"):
                return True
    return False


def _rename_pairs(old: str, new: str) -> tuple[tuple[bytes, bytes], ...]:
    was, now = _encode(old), _encode(new)
    return ((b'"model":' + was, b'"model":' + now), (b'"model": ' + was, b'"model": ' + now))


def _spellings(member: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((member + b'":"', member + b'":""'), (member + b'": "', member + b'": ""'))


# A delta is one token: the engines run with one token per chunk. ``content`` also ends ``reasoning_content``.
_CHAT = (*_spellings(b"content"), *_spellings(b'"arguments'))
_TEXT = _spellings(b'"text')

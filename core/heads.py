"""Heads of HTTP/1.1 messages that are alike: peers send the same one again and again, but for the length of the body.

What a parser has accepted once need not be parsed again: whoever keeps what came of it by the head without its
Content-Length line can answer for the next one like it, to the byte, with a look at a dict.
"""

from typing import TypeVar

KNOWN_MAX = 512
HEAD_MAX = 2048  # bytes; a longer one is parsed every time

What = TypeVar("What")


def without_length(data: bytes) -> tuple[bytes, int]:
    """Return the head without its Content-Length line, and where the body begins.

    Two nothings unless `data` is one whole message: the line names just the bytes that follow the head. Cut out is a
    whole line, so that two heads which are alike without it differ in nothing else.
    """
    begin = data.find(b"\r\n\r\n") + 4
    head, length = data[:begin], len(data) - begin
    before, line, after = head.partition(b"\r\nContent-Length: %d\r\n" % length)
    if not line:
        before, line, after = head.partition(b"\r\ncontent-length: %d\r\n" % length)
        if not line:
            return b"", 0
    return before + b"\r\n" + after, begin


def remember(known: dict[bytes, What], head: bytes, what: What) -> None:
    """Keep what came of a head, for a bounded number of bounded heads."""
    if len(head) <= HEAD_MAX:
        if len(known) >= KNOWN_MAX:
            known.clear()
        known[head] = what

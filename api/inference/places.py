"""Where a body is not the JSON it should be, in words for its sender. Runs for bodies known to be bad. Pure."""

import json
import re
from typing import Any

_BYTE = re.compile(r" \(byte (\d+)\)$")
NAME_MAX = 64


def malformed(raw: bytes, reason: str) -> str:
    """What is wrong and where, given the decoder's reason."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"The body is not UTF-8 {_place(raw, error.start)}."
    found = _BYTE.search(reason)
    if found is None:  # it ended too early
        return f"The body is not valid JSON: {reason} {_place(raw, len(raw))}."
    offset = int(found[1]) - ("trailing characters" in reason)  # of these the decoder names the place behind
    return f"The body is not valid JSON: {reason[: found.start()]} {_place(raw, offset)}."


def _place(raw: bytes, offset: int) -> str:
    """Lines and columns count from 1, columns in bytes."""
    before = raw[:offset]
    line, column = before.count(b"\n") + 1, offset - before.rfind(b"\n")
    return f"at line {line}, column {column} (byte {offset})"


class _TwiceError(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise _TwiceError(name)
        seen.add(name)


def twice(raw: bytes) -> str:
    """Which member stands twice in its object."""
    try:
        json.loads(raw, object_pairs_hook=_once)
    except _TwiceError as found:
        return f"The member {found.args[0][:NAME_MAX]!r} stands twice in its object. Every name may stand there once."
    except (ValueError, RecursionError):
        pass
    return "The body names a member twice. Every name may stand once in its object."

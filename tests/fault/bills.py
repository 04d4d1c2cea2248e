"""Compares what was billed with what the engine simulator generated and what callers saw."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from tests.fault.traffic import Answer

EVENTS = """
    SELECT id, outcome, input_uncached, input_cached, output, reasoning, amount_pico FROM usage_event
"""


@dataclass(frozen=True, slots=True)
class Bill:
    """One usage event of the books."""

    event_id: UUID
    outcome: str
    input_uncached: int
    input_cached: int
    output: int
    reasoning: int
    amount_pico: int

    @property
    def generation_id(self) -> str:
        return f"gen_{self.event_id.hex}"


def read_bills(database_url: str) -> list[Bill]:
    """Return every usage event in the books."""
    with psycopg.connect(database_url) as connection:
        return [Bill(*row) for row in connection.execute(EVENTS)]


def read_engine_log(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the simulator's lines by request id; a request may have been tried on it more than once."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        lines.setdefault(str(entry["request_id"]), []).append(entry)
    return lines


def check(
    answers: Iterable[Answer], bills: list[Bill], log: dict[str, list[dict[str, Any]]], rate: Callable[[Bill], int]
) -> None:
    """Each whole answer is billed once; each bill is what the engine generated; nothing else is billed.

    Raises:
        AssertionError: the first difference.
    """
    by_id = {bill.generation_id: bill for bill in bills}
    assert len(by_id) == len(bills), "an event stands twice in the books"
    lost = [answer.generation_id for answer in answers if answer.whole and answer.generation_id not in by_id]
    assert lost == [], f"answered and not billed: {lost[:3]} and {len(lost)} in all"
    for bill in bills:
        assert bill.generation_id in log or bill.amount_pico == 0, f"billed, and the engine never saw it: {bill}"
        _check_one(bill, log.get(bill.generation_id, []), rate)


def _check_one(bill: Bill, entries: list[dict[str, Any]], rate: Callable[[Bill], int]) -> None:
    if bill.outcome == "completed":
        finished = [entry for entry in entries if entry["ended"] == "completed"]
        assert finished, f"billed as completed; the engine says {entries}: {bill}"
        entry = finished[-1]
        billed = (bill.input_uncached + bill.input_cached, bill.input_cached, bill.output + bill.reasoning)
        assert billed == (entry["prompt_tokens"], entry["cached_tokens"], entry["generated"]), f"{bill}: {entry}"
        assert bill.amount_pico == rate(bill), f"{bill}"
    elif bill.outcome == "client_abort":
        generated = max((entry["generated"] for entry in entries), default=0)
        assert bill.output + bill.reasoning <= generated, f"{bill}: {entries}"
        assert bill.amount_pico <= rate(bill), f"{bill}"
    else:
        assert bill.amount_pico == 0, f"{bill}"

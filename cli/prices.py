"""`tidegate prices impact`: what a draft of prices would have done to recorded usage, however much there is."""

import asyncio
import sys
from datetime import date
from pathlib import Path
from typing import TextIO

import msgspec

from billing import price_preview
from billing.price_impact_text import csv_lines, document
from billing.price_preview import Impact
from cli import screen
from cli.books import database
from core.db import create_engine, create_sessions
from core.errors import PlatformError
from core.ids import IdKind, format_id, parse_id
from core.money import format_pico

SHOWN_MAX = 50  # tenants, of what is for people


def impact(home: Path, version: str, days: tuple[date, date], *, kind: str, output: Path | None) -> int:
    """Rate usage at a version's prices and write the answer to `output` or standard output; progress goes to stderr."""
    with database(home) as settings:

        async def main() -> Impact:
            engine = create_engine(settings.database)
            try:
                wanted = parse_id(IdKind.PRICE_VERSION, version)
                return await price_preview.preview(create_sessions(engine), wanted, *days, on_day=_progress)
            finally:
                await engine.dispose()

        try:
            found = asyncio.run(main())
        except PlatformError as error:
            screen.say(error.message)
            return 1
    if output is None:
        _write(found, kind, sys.stdout)
        return 0
    partial = output.with_name(f".{output.name}.part")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            _write(found, kind, file)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return 0


def _progress(done: int, of: int) -> None:
    sys.stderr.write(f"{done} of {of} days\n")
    sys.stderr.flush()


def _write(found: Impact, kind: str, out: TextIO) -> None:
    if kind == "csv":
        out.writelines(csv_lines(found))
    elif kind == "json":
        out.write(msgspec.json.encode(document(found)).decode() + "\n")
    else:
        out.writelines(line + "\n" for line in _table(found))


def _table(found: Impact) -> list[str]:
    total = found.total
    summary = (
        f"{total.requests:,} requests from {found.start} to {found.end}, {found.currency.value}: "
        f"{total.by_event:,} rated one by one, {total.by_minute:,} by the minute, {total.left_out:,} left out "
        f"(paid {format_pico(total.left_out_paid_pico)}), {total.unpriced:,} without a price "
        f"(paid {format_pico(total.unpriced_paid_pico)})"
    )
    lines = [summary, f"{'tenant':<36} {'paid':>24} {'would pay':>24} {'difference':>24}"]
    named = [("total", total)]
    named += [(format_id(IdKind.TENANT, one.tenant_id), one.total) for one in found.tenants[:SHOWN_MAX]]
    lines += [
        f"{name:<36} {format_pico(sums.paid_pico):>24} {format_pico(sums.would_pico):>24} "
        f"{format_pico(sums.difference_pico):>24}"
        for name, sums in named
    ]
    if len(found.tenants) > SHOWN_MAX:
        lines.append(f"and {len(found.tenants) - SHOWN_MAX:,} more tenants: --format csv has all")
    return lines

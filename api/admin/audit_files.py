"""An export of the audit trail as CSV or JSONL: streamed, the same bytes for the same question, a manifest at its end.

What stands in a record is what its hash covers, so a file can be verified without us (docs/adr: the audit chain).
"""

import csv
import io
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson

from tenants.audit import AuditRecord, Export
from tenants.audit_chain import instant_text

COLUMNS = (
    *("seq", "prev_hash", "id", "recorded_at", "actor_kind", "actor_id", "client_ip"),
    *("tenant_id", "action", "target_id", "request_id", "details", "hash"),
)


class Format(StrEnum):
    """Of a file."""

    CSV = "csv"
    JSONL = "jsonl"


MEDIA_TYPES = {Format.CSV: "text/csv; charset=utf-8", Format.JSONL: "application/x-ndjson"}


def _plain(value: UUID | None) -> str | None:
    return None if value is None else str(value)


def _fields(record: AuditRecord) -> list[Any]:
    actor = record.actor
    return [
        record.seq,
        record.prev_hash.hex(),
        str(record.id),
        instant_text(record.recorded_at),
        actor.kind.value,
        _plain(actor.id),
        actor.client_ip,
        _plain(record.tenant_id),
        record.action,
        _plain(record.target_id),
        actor.request_id,
        record.details_text,
        record.hash.hex(),
    ]


def _csv(records: Sequence[AuditRecord]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_fields(record) for record in records)
    return text.getvalue().encode()


def _jsonl(records: Sequence[AuditRecord]) -> bytes:
    return b"".join(
        orjson.dumps(
            dict(zip(COLUMNS, _fields(record), strict=True)) | {"details": orjson.Fragment(record.details_text)},
            option=orjson.OPT_APPEND_NEWLINE,
        )
        for record in records
    )


def _manifest(export: Export) -> dict[str, Any]:
    """What a reader checks: how many, up to which, its hash, and whether there is more after `last_seq`."""
    return {
        "records": export.records,
        "last_seq": export.last.seq,
        "last_hash": export.last.hash.hex(),
        "complete": export.complete,
    }


async def lines(export: Export, kind: Format) -> AsyncIterator[bytes]:
    """Yield the file in pieces of at most a page of records. Without its last line, the manifest, it was cut off."""
    if kind is Format.CSV:
        yield ",".join(COLUMNS).encode() + b"\n"
    async for page in export.pages():
        yield _csv(page) if kind is Format.CSV else _jsonl(page)
    if kind is Format.CSV:
        yield ("# " + " ".join(f"{name}={value}" for name, value in _manifest(export).items()) + "\n").encode()
    else:
        yield orjson.dumps({"manifest": _manifest(export)}, option=orjson.OPT_APPEND_NEWLINE)

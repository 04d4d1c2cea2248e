"""A price preview as CSV and JSON lines of plain data: what the route and the command both write. Pure."""

import csv
import io
from collections.abc import Iterator

from billing.price_preview import Impact, Sums, rows
from core.ids import IdKind, format_id
from core.money import format_pico

COLUMNS = (
    "tenant_id",
    "model_id",
    "tier",
    "currency",
    "requests",
    "paid",
    "would_pay",
    "difference",
    "by_event",
    "by_minute",
    "left_out",
    "left_out_paid",
    "unpriced",
    "unpriced_paid",
)


def figures(sums: Sums) -> dict[str, int | str]:
    """Return the columns of some usage, money as decimal strings."""
    return {
        "requests": sums.requests,
        "paid": format_pico(sums.paid_pico),
        "would_pay": format_pico(sums.would_pico),
        "difference": format_pico(sums.difference_pico),
        "by_event": sums.by_event,
        "by_minute": sums.by_minute,
        "left_out": sums.left_out,
        "left_out_paid": format_pico(sums.left_out_paid_pico),
        "unpriced": sums.unpriced,
        "unpriced_paid": format_pico(sums.unpriced_paid_pico),
    }


def csv_lines(impact: Impact) -> Iterator[str]:
    """Yield a head and a line per tenant, model and tier (RFC 4180, LF)."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for tenant_id, model_id, tier, sums in rows(impact):
        writer.writerow(
            {
                "tenant_id": format_id(IdKind.TENANT, tenant_id),
                "model_id": format_id(IdKind.MODEL, model_id),
                "tier": tier.label,
                "currency": impact.currency.value,
                **figures(sums),
            }
        )
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def document(impact: Impact, offset: int = 0, limit: int | None = None) -> dict[str, object]:
    """Return the answer as plain data, with the tenants from the `offset`-th on."""
    end = len(impact.tenants) if limit is None else offset + limit
    return {
        "price_version_id": format_id(IdKind.PRICE_VERSION, impact.version_id),
        "currency": impact.currency.value,
        "start": impact.start.isoformat(),
        "end": impact.end.isoformat(),
        "total": figures(impact.total),
        "by_model": [
            {"model_id": format_id(IdKind.MODEL, model_id), **figures(sums)}
            for model_id, sums in impact.by_model.items()
        ],
        "by_tier": [{"tier": tier.label, **figures(sums)} for tier, sums in impact.by_tier.items()],
        "tenants": [
            {
                "tenant_id": format_id(IdKind.TENANT, tenant.tenant_id),
                **figures(tenant.total),
                "lines": [
                    {"model_id": format_id(IdKind.MODEL, model_id), "tier": tier.label, **figures(sums)}
                    for model_id, tier, sums in tenant.lines
                ],
            }
            for tenant in impact.tenants[offset:end]
        ],
        "next_offset": end if end < len(impact.tenants) else None,
    }

"""Queries of price books."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from billing.tables import PriceBookRow, PriceVersionRow
from billing.types import Meter, PriceDiscount, PriceItem
from core.money import Currency
from core.tiers import Tier
from core.unreadable import Report

UNIQUE_VIOLATION = "23505"
PAGE_MAX = 500


def is_unique_violation(error: IntegrityError) -> bool:
    return getattr(error.orig, "sqlstate", None) == UNIQUE_VIOLATION


async def insert_book(
    session: AsyncSession, book_id: UUID, name: str, currency: Currency, *, for_plan: bool = False
) -> bool:
    """Insert the book; False when it is to be the list of a currency that has one."""
    statement = """
        INSERT INTO price_book (id, name, currency, for_plan) VALUES (:id, :name, :currency, :for_plan)
        ON CONFLICT (currency) WHERE NOT for_plan DO NOTHING RETURNING id
    """
    values = {"id": book_id, "name": name, "currency": currency.value, "for_plan": for_plan}
    row = await session.execute(text(statement), values)
    return row.first() is not None


async def book(session: AsyncSession, book_id: UUID) -> PriceBookRow | None:
    return await session.get(PriceBookRow, book_id)


async def books(session: AsyncSession) -> Sequence[PriceBookRow]:
    return (await session.scalars(select(PriceBookRow).order_by(PriceBookRow.currency))).all()


async def insert_version(session: AsyncSession, version_id: UUID, book_id: UUID, note: str) -> None:
    statement = "INSERT INTO price_version (id, book_id, note) VALUES (:id, :book, :note)"
    await session.execute(text(statement), {"id": version_id, "book": book_id, "note": note})


async def version(session: AsyncSession, version_id: UUID) -> PriceVersionRow | None:
    return await session.get(PriceVersionRow, version_id, populate_existing=True)


async def lock_version(session: AsyncSession, version_id: UUID) -> PriceVersionRow | None:
    statement = select(PriceVersionRow).where(PriceVersionRow.id == version_id).with_for_update()
    return (await session.scalars(statement.execution_options(populate_existing=True))).one_or_none()


async def versions(session: AsyncSession, book_id: UUID) -> Sequence[PriceVersionRow]:
    """Return the newest versions of a book, at most a page."""
    statement = select(PriceVersionRow).where(PriceVersionRow.book_id == book_id)
    return (await session.scalars(statement.order_by(PriceVersionRow.id.desc()).limit(PAGE_MAX))).all()


async def last_published(session: AsyncSession, book_id: UUID) -> UUID | None:
    """Return the published version with the latest effective instant, be it to come."""
    statement = (
        select(PriceVersionRow.id)
        .where(PriceVersionRow.book_id == book_id, PriceVersionRow.state == "published")
        .order_by(PriceVersionRow.effective_at.desc())
        .limit(1)
    )
    return (await session.scalars(statement)).one_or_none()


async def in_force_before(session: AsyncSession, book_id: UUID, at: datetime, other_than: UUID) -> UUID | None:
    """Return the version of the book in force at that instant, as if `other_than` were not published."""
    statement = (
        select(PriceVersionRow.id)
        .where(PriceVersionRow.book_id == book_id, PriceVersionRow.state == "published")
        .where(PriceVersionRow.effective_at <= at, PriceVersionRow.id != other_than)
        .order_by(PriceVersionRow.effective_at.desc())
        .limit(1)
    )
    return (await session.scalars(statement)).one_or_none()


async def published_between(
    session: AsyncSession, book_id: UUID, begun_at: datetime, published_at: datetime
) -> UUID | None:
    """Return the last version of the book published after the one instant and before the other."""
    statement = (
        select(PriceVersionRow.id)
        .where(PriceVersionRow.book_id == book_id)
        .where(PriceVersionRow.published_at > begun_at, PriceVersionRow.published_at < published_at)
        .order_by(PriceVersionRow.published_at.desc())
        .limit(1)
    )
    return (await session.scalars(statement)).one_or_none()


async def next_in_force(session: AsyncSession, book_id: UUID, at: datetime) -> PriceVersionRow | None:
    """Return the first version of the book that takes effect after that instant."""
    statement = (
        select(PriceVersionRow)
        .where(PriceVersionRow.book_id == book_id, PriceVersionRow.effective_at > at)
        .order_by(PriceVersionRow.effective_at)
        .limit(1)
    )
    return (await session.scalars(statement)).one_or_none()


async def currencies(session: AsyncSession, tenant_ids: Collection[UUID]) -> dict[UUID, str]:
    """Return the currency each of the tenants is billed in; those without an account are left out."""
    statement = "SELECT tenant_id, currency FROM billing_profile WHERE tenant_id = ANY(:tenants)"
    rows = await session.execute(text(statement), {"tenants": list(tenant_ids)})
    return {row.tenant_id: row.currency for row in rows}


async def copy_items(session: AsyncSession, source: UUID, target: UUID) -> None:
    statement = """
        INSERT INTO price_item (version_id, model_id, tier, meter, tenant_id, above_tokens, unit_price_pico)
        SELECT :target, model_id, tier, meter, tenant_id, above_tokens, unit_price_pico
        FROM price_item WHERE version_id = :source
    """
    await session.execute(text(statement), {"source": source, "target": target})


async def put_items(session: AsyncSession, version_id: UUID, items: Sequence[PriceItem]) -> None:
    """Insert the items, each instead of one for the same model, tier, meter, tenant and step."""
    statement = """
        INSERT INTO price_item (version_id, model_id, tier, meter, tenant_id, above_tokens, unit_price_pico)
        VALUES (:version, :model, :tier, :meter, :tenant, :above, :price)
        ON CONFLICT (version_id, model_id, tier, meter, tenant_id, above_tokens)
        DO UPDATE SET unit_price_pico = excluded.unit_price_pico
    """
    rows = [_values(version_id, item) for item in items]
    if rows:
        await session.execute(text(statement), rows)


def _values(version_id: UUID, item: PriceItem) -> dict[str, object]:
    return {
        "version": version_id,
        "model": item.model_id,
        "tier": int(item.tier),
        "meter": item.meter.value,
        "tenant": item.tenant_id,
        "above": item.above_tokens,
        "price": item.unit_price_pico,
    }


async def items(session: AsyncSession, version_id: UUID) -> list[PriceItem]:
    statement = "SELECT * FROM price_item WHERE version_id = :version"
    rows = (await session.execute(text(statement), {"version": version_id})).all()
    return sorted(
        map(_item, rows),
        key=lambda item: (item.model_id, item.tier, str(item.tenant_id or ""), item.above_tokens, item.meter),
    )


def _item(row: Row[Any]) -> PriceItem:
    return PriceItem(
        row.model_id, Tier(row.tier), Meter(row.meter), row.unit_price_pico, row.tenant_id, row.above_tokens
    )


async def readable_items(
    session: AsyncSession, version_id: UUID, report: Report
) -> tuple[list[PriceItem], frozenset[UUID]]:
    """Return the items, and of which models some cannot be read: nothing of these is among them."""
    statement = "SELECT * FROM price_item WHERE version_id = :version"
    found, closed = [], set()
    for row in (await session.execute(text(statement), {"version": version_id})).all():
        try:
            found.append(_item(row))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is not the others' fault
            report("price_item", row.model_id, error)
            closed.add(row.model_id)
    return [item for item in found if item.model_id not in closed], frozenset(closed)


async def remove_items(session: AsyncSession, version_id: UUID, items: Sequence[PriceItem]) -> None:
    """Delete the items, whatever their price."""
    statement = """
        DELETE FROM price_item WHERE version_id = :version AND model_id = :model AND tier = :tier AND meter = :meter
            AND tenant_id IS NOT DISTINCT FROM CAST(:tenant AS uuid) AND above_tokens = :above
    """
    rows = [_values(version_id, item) for item in items]
    if rows:
        await session.execute(text(statement), rows)


async def put_discounts(session: AsyncSession, version_id: UUID, discounts: Sequence[PriceDiscount]) -> None:
    """Insert the discounts, each instead of the tenant's own prices for the same model and tier."""
    rows = [_discount_values(version_id, discount) for discount in discounts]
    scope = "version_id = :version AND tenant_id = :tenant AND model_id = :model AND tier = :tier"
    statement = """
        INSERT INTO price_discount (version_id, tenant_id, model_id, tier, off_ppm)
        VALUES (:version, :tenant, :model, :tier, :off)
        ON CONFLICT (version_id, tenant_id, model_id, tier) DO UPDATE SET off_ppm = excluded.off_ppm
    """
    if rows:
        await session.execute(text(f"DELETE FROM price_item WHERE {scope}"), rows)  # noqa: S608 - a constant
        await session.execute(text(statement), rows)


async def remove_discounts(session: AsyncSession, version_id: UUID, discounts: Sequence[PriceDiscount]) -> None:
    statement = """
        DELETE FROM price_discount
        WHERE version_id = :version AND tenant_id = :tenant AND model_id = :model AND tier = :tier
    """
    rows = [_discount_values(version_id, discount) for discount in discounts]
    if rows:
        await session.execute(text(statement), rows)


def _discount_values(version_id: UUID, discount: PriceDiscount) -> dict[str, object]:
    return {
        "version": version_id,
        "tenant": discount.tenant_id,
        "model": discount.model_id,
        "tier": int(discount.tier),
        "off": discount.off_ppm,
    }


async def discounts(session: AsyncSession, version_id: UUID) -> list[PriceDiscount]:
    statement = "SELECT * FROM price_discount WHERE version_id = :version"
    rows = (await session.execute(text(statement), {"version": version_id})).all()
    return sorted(PriceDiscount(row.tenant_id, row.model_id, Tier(row.tier), row.off_ppm) for row in rows)


async def delete_version(session: AsyncSession, version_id: UUID) -> None:
    """Delete a draft with its prices."""
    await session.execute(text("DELETE FROM price_version WHERE id = :version"), {"version": version_id})


async def publish_version(
    session: AsyncSession, version_id: UUID, effective_at: datetime, published_at: datetime, sha256: bytes
) -> None:
    await session.execute(
        update(PriceVersionRow)
        .where(PriceVersionRow.id == version_id)
        .values(state="published", effective_at=effective_at, published_at=published_at, content_sha256=sha256)
    )


async def versions_in_force(session: AsyncSession, now: datetime) -> Sequence[Row[Any]]:
    """Return id, currency, plan's book and effective instant of each book's version in force and of those to come."""
    statement = """
        SELECT v.id, b.currency, v.effective_at, CASE WHEN b.for_plan THEN b.id END AS plan_book
        FROM price_version v JOIN price_book b ON b.id = v.book_id
        WHERE v.state = 'published' AND v.effective_at >= coalesce(
            (SELECT max(w.effective_at) FROM price_version w
             WHERE w.book_id = v.book_id AND w.state = 'published' AND w.effective_at <= :now), v.effective_at)
    """
    return (await session.execute(text(statement), {"now": now})).all()

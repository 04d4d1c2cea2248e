"""Operators: the whole ledger as text for a foreign auditor."""

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse

from api.deps import CurrentServices
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import problems
from billing import books_export
from billing.books_text import BooksFormat

router = APIRouter(route_class=GuardedRoute, tags=["ledger"])
MEDIA_TYPE = "text/plain; charset=utf-8"


@router.get(
    f"{ADMIN}/ledger/export",
    summary="Export the whole ledger for hledger or beancount",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {}}}, **problems(400)},
)
async def export_ledger(
    services: CurrentServices,
    kind: Annotated[BooksFormat, Query(alias="format", description="`hledger` or `beancount`.")],
    until: Annotated[date | None, Query(description="Only what was booked before this day (UTC).")] = None,
) -> StreamingResponse:
    """Stream all accounts and transactions as plain-text accounting, in the order they were booked.

    The same books give the same bytes. The last line says how many entries there are; a file without it was cut off.
    """
    headers = {"content-disposition": f'attachment; filename="ledger.{kind.value}"'}
    lines = books_export.export(services.sessions, kind, until)
    return StreamingResponse(lines, media_type=MEDIA_TYPE, headers=headers)

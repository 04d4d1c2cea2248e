"""Operators: weights on their way into the registry. Uploads in parts, imports, their progress as it happens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Header, Path, Query
from starlette.requests import Request
from starlette.responses import StreamingResponse

from api.admin.registry_shapes import (
    ImportIn,
    IntakeDetailOut,
    IntakeFileOut,
    IntakeOut,
    IntakePage,
    Sha256,
    UploadIn,
    detail_out,
    file_out,
    intake_out,
)
from api.deps import CurrentPaging, CurrentServices, CurrentWork, IntakeId, ReadSession, Work
from api.guard import BytesRoute, GuardedRoute
from api.permissions import ADMIN, INTAKE, INTAKE_PART
from api.schemas import problems
from api.services import Services
from catalog.registry import intakes, origins, store
from catalog.registry.types import OPEN, Source, SourceKind, WeightFile
from core.db import transaction
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_in_memory

router = APIRouter(route_class=GuardedRoute, tags=["registry"])
parts = APIRouter(route_class=BytesRoute, tags=["registry"])

WATCH_S = 50.0  # of one stream of events; a client opens the next one by itself
LOOK_EVERY_S = 0.5
RETRY_MS = 1000
_BINARY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def _by(work: Work) -> str:
    operator = work.caller.operator
    return "" if operator is None else format_id(IdKind.OPERATOR, operator.id)


@router.post(f"{ADMIN}/registry/uploads", status_code=201, summary="Open an upload", responses=problems(404, 409, 429))
async def create_upload(body: UploadIn, work: CurrentWork) -> IntakeDetailOut:
    """Say which files come. Then send each in parts, in order, and complete the upload."""
    files = [WeightFile(file.path, file.size_bytes, file.sha256) for file in body.files]
    intake_id = await intakes.create_upload(
        work.session,
        parse_id(IdKind.MODEL, body.model_id),
        files,
        body.asked(_by(work)),
        number=body.number,
        limits=work.services.settings.registry,
        now=work.services.clock.now(),
    )
    return await _made(work, intake_id, body.model_id)


@router.post(f"{ADMIN}/registry/imports", status_code=202, summary="Import weights", responses=problems(404, 409, 429))
async def create_import(body: ImportIn, work: CurrentWork) -> IntakeDetailOut:
    """Fetch weights from a folder of the host, a prefix in S3, or the hub; the worker does it."""
    source = Source(SourceKind(body.kind), body.location, body.revision, tuple(body.include))
    settings = work.services.settings
    origins.check_source(source, settings, settings.registry.import_folders)
    intake_id = await intakes.create_import(
        work.session,
        parse_id(IdKind.MODEL, body.model_id),
        source,
        body.asked(_by(work)),
        number=body.number,
        limits=settings.registry,
        now=work.services.clock.now(),
    )
    return await _made(work, intake_id, body.model_id)


async def _made(work: Work, intake_id: UUID, model_id: str) -> IntakeDetailOut:
    intake, files = await intakes.get(work.session, intake_id)
    work.act.on(intake_id, model_id=model_id, number=intake.number, sha256=intake.sha256, size_bytes=intake.size_bytes)
    return detail_out(intake, files)


@router.get(f"{ADMIN}/registry/intakes", summary="List uploads, imports and checks")
async def list_intakes(session: ReadSession, paging: CurrentPaging) -> IntakePage:
    page = page_in_memory(await intakes.list_all(session), paging.after, paging.limit, lambda found: found.id)
    return IntakePage(
        items=[intake_out(found) for found in page.items],
        next_after=page.next_after and format_id(IdKind.MODEL_INTAKE, page.next_after),
    )


@router.get(INTAKE, summary="Say how far an upload, import or check is")
async def get_intake(intake_id: IntakeId, session: ReadSession) -> IntakeDetailOut:
    """Read where each file ends now: what a cut upload goes on from."""
    return detail_out(*await intakes.get(session, intake_id))


@parts.put(
    INTAKE_PART, summary="Send the next part of a file", responses=problems(404, 409, 413), openapi_extra=_BINARY
)
async def receive_part(
    *,
    request: Request,
    intake_id: IntakeId,
    file_no: Annotated[int, Path(ge=0, le=10_000)],
    services: CurrentServices,
    offset: Annotated[int, Query(ge=0, le=1 << 43, description="Where the part begins: the file's `received_bytes`.")],
    x_part_sha256: Annotated[Sha256 | None, Header(description="Of the part: refused at once when altered.")] = None,
) -> IntakeFileOut:
    """Send `part_bytes` bytes, or what is left of the file. 409 OFFSET_WRONG says where the file ends."""
    file = await intakes.receive(
        services.sessions,
        store.open_store(services.settings),
        intake_id,
        file_no,
        start=offset,
        content=await request.body(),
        sha256=x_part_sha256 or "",
        now=services.clock.now(),
    )
    return file_out(file)


@router.post(f"{INTAKE}/complete", status_code=202, summary="Say that all parts are sent", responses=problems(404, 409))
async def complete_upload(intake_id: IntakeId, work: CurrentWork) -> IntakeDetailOut:
    """The worker then verifies every file and makes the version; the state says how far it is."""
    await intakes.complete(work.session, intake_id, now=work.services.clock.now())
    work.act.on(intake_id)
    return detail_out(*await intakes.get(work.session, intake_id))


@router.post(f"{INTAKE}/cancel", summary="Give an upload, import or check up", responses=problems(404))
async def cancel_intake(intake_id: IntakeId, work: CurrentWork) -> IntakeDetailOut:
    """What came of it is deleted. One that is over stays as it is."""
    await intakes.cancel(work.session, intake_id, now=work.services.clock.now())
    work.act.on(intake_id)
    return detail_out(*await intakes.get(work.session, intake_id))


@router.get(
    f"{INTAKE}/events",
    summary="Follow an upload, import or check",
    response_class=StreamingResponse,
    responses={**_EVENTS, **problems(404, 503)},
)
async def follow_intake(intake_id: IntakeId, services: CurrentServices) -> StreamingResponse:
    """Server-sent events, one for each change, until it is over; after 50 s the stream ends, and is opened again."""
    if services.watchers.locked():
        raise PlatformError("TOO_MANY_WATCHERS", ErrorKind.UNAVAILABLE, "Too many follow already. Ask for the state.")
    first = await _look(services, intake_id)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(services, intake_id, first), media_type="text/event-stream", headers=headers)


async def _look(services: Services, intake_id: UUID) -> IntakeOut:
    async with transaction(services.sessions) as session:
        return intake_out((await intakes.get(session, intake_id))[0])


async def _events(services: Services, intake_id: UUID, now: IntakeOut) -> AsyncIterator[bytes]:
    until = services.clock.monotonic() + WATCH_S
    yield f"retry: {RETRY_MS}\n\n".encode()
    async with services.watchers:
        yield _event(now)
        while now.state in OPEN and services.clock.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY_S)
            seen, now = now, await _look(services, intake_id)
            yield _event(now) if now != seen else b": still at it\n\n"


def _event(intake: IntakeOut) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (intake.state.encode(), orjson.dumps(intake.model_dump(mode="json")))

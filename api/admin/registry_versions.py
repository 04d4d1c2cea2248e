"""Operators: versions in the registry: found, shown with their signed manifests, checked, deprecated."""

import base64
from typing import Annotated

from fastapi import APIRouter, Query

from api.admin.registry_shapes import (
    DeprecationIn,
    IntakeDetailOut,
    ManifestOut,
    ModelVersionOut,
    ModelVersionPage,
    detail_out,
    version_out,
)
from api.deps import CurrentPaging, CurrentServices, CurrentWork, ReadSession, VersionId
from api.guard import GuardedRoute
from api.permissions import ADMIN, MODEL_VERSION
from api.schemas import problems
from catalog.registry import intakes, manifest, versions
from core.ids import IdKind, format_id
from core.pagination import page_in_memory

router = APIRouter(route_class=GuardedRoute, tags=["registry"])


@router.get(f"{ADMIN}/model-versions", summary="List versions of all models", responses=problems(400, 404, 409))
async def list_all_versions(
    session: ReadSession,
    paging: CurrentPaging,
    services: CurrentServices,
    model: Annotated[str | None, Query(max_length=128, description="Only of the model of this own name.")] = None,
    reference: Annotated[
        str | None, Query(max_length=220, description="Only the one that is pinned so; 409 when its hash is another.")
    ] = None,
) -> ModelVersionPage:
    if reference is not None:
        found = [await versions.get(session, await versions.pinned(session, reference))]
    else:
        found = await versions.list_all(session, model)
    page = page_in_memory(found, paging.after, paging.limit, lambda version: version.id)
    return ModelVersionPage(
        items=[version_out(version, services.clock.now()) for version in page.items],
        next_after=page.next_after and format_id(IdKind.MODEL_VERSION, page.next_after),
    )


@router.get(MODEL_VERSION, summary="Read a version")
async def get_version(version_id: VersionId, session: ReadSession, services: CurrentServices) -> ModelVersionOut:
    return version_out(await versions.get(session, version_id), services.clock.now())


@router.get(f"{MODEL_VERSION}/manifest", summary="Read a version's signed manifest")
async def get_manifest(version_id: VersionId, session: ReadSession, services: CurrentServices) -> ManifestOut:
    """Its files with their hashes, what they say of themselves, and where they came from."""
    version, files = await versions.get(session, version_id), await versions.files_of(session, version_id)
    keys = manifest.keys_of(services.settings.secrets)
    return ManifestOut(
        manifest=version.manifest,
        signature=base64.b64encode(version.signature).decode(),
        signed_by=version.signed_by,
        public_key=base64.b64encode(keys[0].public_key().public_bytes_raw()).decode(),
        authentic=versions.is_authentic(version, files, keys),
    )


@router.post(f"{MODEL_VERSION}/verify", status_code=202, summary="Check stored weights", responses=problems(404, 409))
async def verify_version(version_id: VersionId, work: CurrentWork) -> IntakeDetailOut:
    """Read every stored file again and compare it with its hash; the worker does it. Damaged ones are not deployed."""
    operator = work.caller.operator
    intake_id = await intakes.create_check(
        work.session,
        version_id,
        by="" if operator is None else format_id(IdKind.OPERATOR, operator.id),
        limits=work.services.settings.registry,
        now=work.services.clock.now(),
    )
    work.act.on(version_id, intake_id=format_id(IdKind.MODEL_INTAKE, intake_id))
    return detail_out(*await intakes.get(work.session, intake_id))


@router.post(f"{MODEL_VERSION}/deprecate", summary="Announce the end of a version", responses=problems(400, 404))
async def deprecate_version(version_id: VersionId, body: DeprecationIn, work: CurrentWork) -> ModelVersionOut:
    """Shown to callers in `/v1/models`. It is served before and after the date all the same."""
    made = await versions.deprecate(work.session, version_id, at=body.at, note=body.note)
    work.act.on(version_id, at=body.at and body.at.isoformat(), note=body.note)
    return version_out(made, work.services.clock.now())

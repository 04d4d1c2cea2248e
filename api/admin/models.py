"""Operators: models, their versions, and the names callers use."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from api.admin.registry_shapes import ModelVersionOut, ModelVersionPage, version_out
from api.deps import CurrentAct, CurrentPaging, CurrentServices, ModelId, ReadSession, Session
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Input, Output, problems
from catalog import models
from catalog.registry import versions
from catalog.types import Model, NewVersion
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_in_memory

router = APIRouter(route_class=GuardedRoute, tags=["models"])

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Text = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[^\x00]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]


class ModelIn(Input):
    """A new model, by the name that callers write."""

    name: ModelName
    owned_by: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00]*$")] = "tidegate"
    description: Text = ""


class ModelOut(Output):
    """A model."""

    id: str
    name: str
    owned_by: str
    description: str
    retired: bool
    created_at: datetime


class ModelPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[ModelOut]
    next_after: str | None


class VersionIn(Input):
    """A new version. `source` says where the weights are; measured figures make estimates tighter."""

    context_max: int = Field(ge=1, le=100_000_000, description="Tokens of prompt and answer together.")
    source: Text = ""
    sha256: Sha256 = ""
    licence: Text = ""
    template_tokens: int = Field(0, ge=0, le=100_000, description="Tokens that the chat template adds.")
    bytes_per_token_milli: int = Field(1000, ge=1000, le=100_000, description="Fewest bytes a token has, in 1/1000.")
    make_current: bool = Field(True, description="Let the model's own name lead to it.")


class AliasIn(Input):
    """A public name and the version it leads to from now on."""

    name: ModelName
    version_id: Annotated[str, Field(max_length=64)]


class AliasOut(Output):
    """A public name and the version it leads to."""

    name: str
    version_id: str


def _model(model: Model) -> ModelOut:
    return ModelOut(
        id=format_id(IdKind.MODEL, model.id),
        name=model.name,
        owned_by=model.owned_by,
        description=model.description,
        retired=model.retired,
        created_at=model.created_at,
    )


@router.post(f"{ADMIN}/models", status_code=201, summary="Create a model", responses=problems(409))
async def create_model(body: ModelIn, session: Session, act: CurrentAct, services: CurrentServices) -> ModelOut:
    """Make a model; it is served once a version has a deployment and a published price."""
    now = services.clock.now()
    model_id = await models.create_model(
        session, name=body.name, now=now, owned_by=body.owned_by, description=body.description
    )
    act.on(model_id, name=body.name)
    return _model(Model(model_id, body.name, body.owned_by, body.description, now, retired=False))


@router.get(f"{ADMIN}/models", summary="List models")
async def list_models(session: ReadSession, paging: CurrentPaging) -> ModelPage:
    page = page_in_memory(await models.list_models(session), paging.after, paging.limit, lambda model: model.id)
    return ModelPage(
        items=[_model(model) for model in page.items],
        next_after=page.next_after and format_id(IdKind.MODEL, page.next_after),
    )


@router.post(f"{ADMIN}/models/{{model_id}}/versions", status_code=201, summary="Add a version to a model")
async def add_version(
    model_id: ModelId, body: VersionIn, session: Session, act: CurrentAct, services: CurrentServices
) -> ModelVersionOut:
    new = NewVersion(**body.model_dump(exclude={"make_current"}))
    version_id = await models.add_version(
        session, model_id, new, now=services.clock.now(), make_current=body.make_current
    )
    act.on(version_id, model_id=format_id(IdKind.MODEL, model_id), current=body.make_current)
    return version_out(await versions.get(session, version_id), services.clock.now())


@router.get(f"{ADMIN}/models/{{model_id}}/versions", summary="List a model's versions")
async def list_versions(
    model_id: ModelId, session: ReadSession, paging: CurrentPaging, services: CurrentServices
) -> ModelVersionPage:
    found = await versions.list_all(session, await models.name_of(session, model_id))
    page = page_in_memory(found, paging.after, paging.limit, lambda version: version.id)
    return ModelVersionPage(
        items=[version_out(version, services.clock.now()) for version in page.items],
        next_after=page.next_after and format_id(IdKind.MODEL_VERSION, page.next_after),
    )


@router.post(f"{ADMIN}/models/{{model_id}}/retire", summary="Stop serving a model", status_code=204)
async def retire_model(model_id: ModelId, session: Session, act: CurrentAct, services: CurrentServices) -> None:
    """Take a model away under all its names. Its history stays."""
    await models.retire_model(session, model_id, now=services.clock.now())
    act.on(model_id)


@router.post(f"{ADMIN}/aliases", summary="Let a name lead to a version", responses=problems(404, 409))
async def set_alias(body: AliasIn, session: Session, act: CurrentAct, services: CurrentServices) -> AliasOut:
    """Publish a new name, switch one to another version, or roll back. Gateways follow within a second."""
    try:
        version_id = parse_id(IdKind.MODEL_VERSION, body.version_id)
    except PlatformError as error:
        raise PlatformError(error.code, ErrorKind.NOT_FOUND, error.message, param="version_id") from error
    await models.set_alias(session, body.name, version_id, now=services.clock.now())
    act.on(version_id, name=body.name)
    return AliasOut(name=body.name, version_id=body.version_id)

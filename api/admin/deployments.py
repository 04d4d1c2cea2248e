"""Operators: deployments, with what is desired of them and what the controller last saw."""

import re
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from fastapi import APIRouter
from pydantic import Field, SecretStr, StringConstraints, field_validator
from sqlalchemy.ext.asyncio import AsyncSession

from api.deps import CurrentAct, CurrentPaging, CurrentServices, DeploymentId, ReadSession, Session, changed
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Input, Output, problems
from api.services import Services
from catalog import deployments, models
from catalog.hardware import batch_bound_mb
from catalog.registry import versions
from catalog.types import Deployment, DeploymentChange, DeploymentKind, EngineKind, NewDeployment
from core import keyspace
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_in_memory
from core.resp import RespError, RespUnavailable
from knative.types import DeploymentState
from tenants import entitlements

router = APIRouter(route_class=GuardedRoute, tags=["deployments"])

ARGUMENTS_MAX = 64
CREDENTIAL_MAX = 4096
_PRINTABLE = re.compile(r"[\x21-\x7e]*")
_decode_state = msgspec.json.Decoder(DeploymentState).decode

KindName = Annotated[DeploymentKind, Field(strict=False)]
EngineName = Annotated[EngineKind, Field(strict=False)]
Url = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[\x21-\x7e]*$")]
Caps = Annotated[int, Field(ge=0, le=1_000_000)]
Scale = Annotated[int, Field(ge=0, le=10_000)]
WaitSeconds = Annotated[int, Field(ge=0, le=600)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
FallbackName = Annotated[
    str,
    Field(
        max_length=128,
        description="Public name of the model that serves what this one has no capacity for, to callers that agree to "
        "it (`X-Tidegate-Fallback: allow`), at its own price. Empty: none.",
    ),
]
KeepAlive = Annotated[
    int,
    Field(ge=0, le=604_800, description="A cold one without work for so long sleeps. 0: the controller's setting."),
]
LoadTimeout = Annotated[
    int,
    Field(
        ge=0,
        le=604_800,
        description="An engine not ready after so long is ended and started again. 0: the controller's setting.",
    ),
]
GpuMemory = Annotated[
    int,
    Field(
        ge=0,
        le=10_000_000,
        description="Memory of one engine's accelerators in MB (80 GB: 80000). With `kv_request_mb` it gives the batch "
        "bound; 0: unknown. State both or none.",
    ),
]
RequestMemory = Annotated[
    int,
    Field(ge=0, le=10_000_000, description="KV memory of one request as it begins, in MB (1.2 GB: 1200). 0: unknown."),
]
Arguments = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], str | int | float | bool | None],
    Field(max_length=ARGUMENTS_MAX, description="The engine's own arguments."),
]


class _WithCredential(Input):
    credential: SecretStr | None = Field(
        None, max_length=CREDENTIAL_MAX, description="Of an external server. Sealed at once, never shown again."
    )

    @field_validator("credential")
    @classmethod
    def _printable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not _PRINTABLE.fullmatch(value.get_secret_value()):
            raise ValueError("a credential is printable ASCII without spaces")
        return value


class DeploymentIn(_WithCredential):
    """A new deployment of a version: local (a process on the controller's host) or external (a URL)."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    version_id: Annotated[str, Field(max_length=64, description="The version, mver_…; or `version`.")] = ""
    version: Annotated[str, Field(max_length=220, description="The version pinned as `name@number:sha256`.")] = ""
    kind: KindName
    engine: EngineName
    upstream_model: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]*$")]
    endpoints: Annotated[list[str], Field(min_length=1, max_length=8)] = Field(default_factory=lambda: ["chat"])
    default_max_tokens: Tokens = 512
    engine_args: Arguments = Field(default_factory=dict)
    base_url: Url = ""
    inflight_max: Caps = 0
    waiting_max: Caps = 256
    max_wait_s: WaitSeconds = 30
    fallback_model: FallbackName = ""
    gpu_memory_mb: GpuMemory = 0
    kv_request_mb: RequestMemory = 0
    min_scale: Scale = 0
    max_scale: Scale = 1
    keep_alive_s: KeepAlive = 0
    load_timeout_s: LoadTimeout = 0


class DeploymentPatch(_WithCredential):
    """What is left out stays. An empty credential takes it away."""

    default_max_tokens: Tokens | None = None
    engine_args: Arguments | None = None
    base_url: Url | None = None
    inflight_max: Caps | None = None
    waiting_max: Caps | None = None
    max_wait_s: WaitSeconds | None = None
    fallback_model: FallbackName | None = None
    gpu_memory_mb: GpuMemory | None = None
    kv_request_mb: RequestMemory | None = None
    min_scale: Scale | None = None
    max_scale: Scale | None = None
    keep_alive_s: KeepAlive | None = None
    load_timeout_s: LoadTimeout | None = None


class DeploymentOut(Output):
    """A deployment. `state` is what the controller last published; ``unknown`` when there is no word of it."""

    id: str
    name: str
    model_id: str
    version_id: str
    sha256: str = Field(
        description="Of the weights that it serves; empty for an external one whose weights nobody knows."
    )
    kind: KindName
    engine: EngineName
    upstream_model: str
    endpoints: list[str]
    default_max_tokens: int
    engine_args: dict[str, Any]
    base_url: str
    has_credential: bool
    inflight_max: int
    waiting_max: int
    max_wait_s: int
    fallback_model: str
    gpu_memory_mb: int
    kv_request_mb: int
    batch_bound: int = Field(
        description="Requests one engine is given at most, by its memory: GPU x 0.8 / (request x 2). 0: unknown, its "
        "seats rule."
    )
    temperature: str
    min_scale: int
    max_scale: int
    keep_alive_s: int
    load_timeout_s: int
    created_at: datetime
    state: str
    state_reason: str
    eta_s: int = Field(description="Seconds to ready that load history promises.")


class DeploymentPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[DeploymentOut]
    next_after: str | None


async def _states(services: Services, ids: list[UUID]) -> dict[UUID, DeploymentState]:
    """Return what the controller published; nothing while Valkey is away, because the rest is still true."""
    if not ids:
        return {}
    try:
        found = await services.valkey.call("HMGET", keyspace.STATE, *(value.hex for value in ids))
    except (RespError, RespUnavailable):
        return {}
    return {value: _decode_state(raw) for value, raw in zip(ids, found, strict=True) if raw is not None}


def _out(found: Deployment, state: DeploymentState | None) -> DeploymentOut:
    return DeploymentOut(
        id=format_id(IdKind.DEPLOYMENT, found.id),
        name=found.name,
        model_id=format_id(IdKind.MODEL, found.model_id),
        version_id=format_id(IdKind.MODEL_VERSION, found.version_id),
        sha256=found.sha256,
        kind=found.kind,
        engine=found.engine,
        upstream_model=found.upstream_model,
        endpoints=sorted(found.endpoints),
        default_max_tokens=found.default_max_tokens,
        engine_args=found.engine_args,
        base_url=found.base_url,
        has_credential=found.has_credential,
        inflight_max=found.inflight_max,
        waiting_max=found.waiting_max,
        max_wait_s=found.max_wait_s,
        fallback_model=found.fallback_model,
        gpu_memory_mb=found.gpu_memory_mb,
        kv_request_mb=found.kv_request_mb,
        batch_bound=batch_bound_mb(found.gpu_memory_mb, found.kv_request_mb),
        temperature=found.temperature.value,
        min_scale=found.min_scale,
        max_scale=found.max_scale,
        keep_alive_s=found.keep_alive_s,
        load_timeout_s=found.load_timeout_s,
        created_at=found.created_at,
        state="unknown" if state is None else state.state.value,
        state_reason="" if state is None else state.reason,
        eta_s=0 if state is None else state.eta_s,
    )


async def _version(session: AsyncSession, body: DeploymentIn) -> UUID:
    """Return the version that is asked for, by its id or by its reference."""
    if bool(body.version_id) == bool(body.version):
        message = "Say which version: either version_id, or version as name@number:sha256."
        raise PlatformError("INVALID_DEPLOYMENT", ErrorKind.INVALID, message, param="version_id")
    if body.version:
        return await versions.pinned(session, body.version)
    return parse_id(IdKind.MODEL_VERSION, body.version_id)


def _new(body: DeploymentIn, version_id: UUID) -> NewDeployment:
    return NewDeployment(
        name=body.name,
        version_id=version_id,
        kind=body.kind,
        engine=body.engine,
        upstream_model=body.upstream_model,
        endpoints=frozenset(body.endpoints),
        default_max_tokens=body.default_max_tokens,
        engine_args=dict(body.engine_args),
        base_url=body.base_url,
        credential="" if body.credential is None else body.credential.get_secret_value(),
        inflight_max=body.inflight_max,
        waiting_max=body.waiting_max,
        max_wait_s=body.max_wait_s,
        fallback_model=body.fallback_model,
        gpu_memory_mb=body.gpu_memory_mb,
        kv_request_mb=body.kv_request_mb,
        min_scale=body.min_scale,
        max_scale=body.max_scale,
        keep_alive_s=body.keep_alive_s,
        load_timeout_s=body.load_timeout_s,
    )


async def _check_promises(session: AsyncSession, deployment_id: UUID) -> None:
    """What is guaranteed of the model fits in the deployment's cap, as it stands now in the transaction.

    Its promises are locked before the cap is changed, as by a change of a promise: the other order would deadlock.
    """
    found = await deployments.get(session, deployment_id)
    model = await models.name_of(session, found.model_id)
    await entitlements.check_deployment(session, model, found.name, found.inflight_max)


@router.post(f"{ADMIN}/deployments", status_code=201, summary="Create a deployment", responses=problems(404, 409))
async def create_deployment(
    body: DeploymentIn, session: Session, act: CurrentAct, services: CurrentServices
) -> DeploymentOut:
    """Serve a version. Gateways see it within a second; a cold one is woken by its first call."""
    version_id = await _version(session, body)
    await entitlements.lock(session, await models.name_of_version(session, version_id))
    deployment_id = await deployments.create(
        session, _new(body, version_id), sealing_key=services.sealing_key, now=services.clock.now()
    )
    await _check_promises(session, deployment_id)
    act.on(deployment_id, name=body.name, kind=body.kind.value)
    return _out(await deployments.get(session, deployment_id), None)


@router.get(f"{ADMIN}/deployments", summary="List deployments")
async def list_deployments(session: ReadSession, paging: CurrentPaging, services: CurrentServices) -> DeploymentPage:
    page = page_in_memory(await deployments.list_all(session), paging.after, paging.limit, lambda found: found.id)
    states = await _states(services, [found.id for found in page.items])
    return DeploymentPage(
        items=[_out(found, states.get(found.id)) for found in page.items],
        next_after=page.next_after and format_id(IdKind.DEPLOYMENT, page.next_after),
    )


@router.get(f"{ADMIN}/deployments/{{deployment_id}}", summary="Read a deployment")
async def get_deployment(deployment_id: DeploymentId, session: ReadSession, services: CurrentServices) -> DeploymentOut:
    found = await deployments.get(session, deployment_id)
    return _out(found, (await _states(services, [found.id])).get(found.id))


@router.patch(f"{ADMIN}/deployments/{{deployment_id}}", summary="Change a deployment", responses=problems(400))
async def update_deployment(
    *,
    deployment_id: DeploymentId,
    body: DeploymentPatch,
    session: Session,
    act: CurrentAct,
    services: CurrentServices,
) -> DeploymentOut:
    """Change limits, scale, address or credential."""
    values = body.model_dump(exclude={"credential"}, exclude_none=True)
    credential = None if body.credential is None else body.credential.get_secret_value()
    if body.inflight_max is not None:
        model_id = (await deployments.get(session, deployment_id)).model_id
        await entitlements.lock(session, await models.name_of(session, model_id))
    before = _out(await deployments.get(session, deployment_id), None)
    after = await deployments.update(
        session,
        deployment_id,
        DeploymentChange(**values, credential=credential),
        sealing_key=services.sealing_key,
        now=services.clock.now(),
    )
    if body.inflight_max is not None:
        await _check_promises(session, deployment_id)
    act.on(deployment_id, **changed(before, _out(after, None)))
    if credential is not None:
        act.on(deployment_id, credential_replaced=True)
    return _out(after, (await _states(services, [deployment_id])).get(deployment_id))


@router.post(f"{ADMIN}/deployments/{{deployment_id}}/retire", status_code=204, summary="Take a deployment away")
async def retire_deployment(
    deployment_id: DeploymentId, session: Session, act: CurrentAct, services: CurrentServices
) -> None:
    """Drain and stop it; its name becomes free."""
    await deployments.retire(session, deployment_id, now=services.clock.now())
    act.on(deployment_id)

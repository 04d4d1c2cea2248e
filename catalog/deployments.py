"""Deployments: a version with an engine, and what is desired of it."""

import secrets
from collections.abc import Callable
from datetime import datetime
from urllib.parse import urlsplit
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import queries, rollout_guard
from catalog.models import check_weights
from catalog.tables import DeploymentRow, DesiredRow, ModelVersionRow
from catalog.types import Deployment, DeploymentChange, DeploymentKind, EngineKind, NewDeployment, Temperature
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, new_uuid
from core.sealing import NONCE_BYTES, seal, unseal

ENDPOINTS = frozenset({"chat", "completions", "embeddings", "tokenize"})
LOCAL_ENGINES = frozenset({EngineKind.LLAMA_CPP, EngineKind.SIMULATOR})
SECONDS_MAX = 7 * 86_400
LOCAL_SCALE_MAX = 16  # engine processes of one local deployment
SETTABLE = (  # members of a change that are taken as they are
    *("engine_args", "default_max_tokens", "inflight_max", "waiting_max", "max_wait_s"),
    *("fallback_model", "gpu_memory_mb", "kv_request_mb"),
)

DESIRED = ("min_scale", "max_scale", "keep_alive_s", "load_timeout_s")


async def create(
    session: AsyncSession,
    new: NewDeployment,
    *,
    sealing_key: bytes,
    now: datetime,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> UUID:
    """Create a deployment; gateways see it at commit.

    Raises:
        PlatformError: kind invalid, naming the field; not_found for the version; conflict for a taken name.
    """
    base_url = check_deployment(new)
    version = await queries.version_by_id(session, new.version_id, keep=True)
    if version is None:
        known = format_id(IdKind.MODEL_VERSION, new.version_id)
        raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no model version {known}.")
    if new.kind is not DeploymentKind.EXTERNAL:
        check_weights(version)
    await _check_fallback(session, new.fallback_model, new.version_id)
    if await queries.deployment_named(session, new.name) is not None:
        raise PlatformError("NAME_TAKEN", ErrorKind.CONFLICT, f"The name {new.name!r} is taken.", param="name")
    deployment_id = new_uuid()
    row = DeploymentRow(
        id=deployment_id,
        version_id=new.version_id,
        name=new.name,
        kind=new.kind,
        engine=new.engine,
        engine_args=new.engine_args,
        endpoints=sorted(new.endpoints),
        base_url=base_url,
        sealed_credential=_sealed(new.credential, deployment_id, sealing_key, random_bytes),
        upstream_model=new.upstream_model,
        default_max_tokens=new.default_max_tokens,
        inflight_max=new.inflight_max,
        waiting_max=new.waiting_max,
        max_wait_s=new.max_wait_s,
        fallback_model=new.fallback_model,
        gpu_memory_mb=new.gpu_memory_mb,
        kv_request_mb=new.kv_request_mb,
        created_at=now,
        retired_at=None,
    )
    session.add(row)
    await session.flush()
    session.add(
        DesiredRow(
            deployment_id=deployment_id,
            temperature=_temperature(new.min_scale),
            min_scale=new.min_scale,
            max_scale=new.max_scale,
            keep_alive_s=new.keep_alive_s,
            load_timeout_s=new.load_timeout_s,
            epoch=1,
            updated_at=now,
        )
    )
    await session.flush()
    await record_config_change(session, "catalog", None)
    return deployment_id


async def update(
    session: AsyncSession,
    deployment_id: UUID,
    change: DeploymentChange,
    *,
    sealing_key: bytes,
    now: datetime,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> Deployment:
    """Change what the members of `change` name; desired scale gets a new epoch.

    Raises:
        PlatformError: kind not_found, or invalid naming the field.
    """
    row, desired, version = await _locked(session, deployment_id)
    base_url = check_deployment(_changed(row, desired, change))
    if change.fallback_model is not None:
        await _check_fallback(session, change.fallback_model, version.id)
    for name in SETTABLE:
        if (value := getattr(change, name)) is not None:
            setattr(row, name, value)
    row.base_url = base_url
    if change.credential is not None:
        row.sealed_credential = _sealed(change.credential, deployment_id, sealing_key, random_bytes)
    if change.engine_args is not None or any(getattr(change, name) is not None for name in DESIRED):
        for name in DESIRED:
            if (value := getattr(change, name)) is not None:
                setattr(desired, name, value)
        desired.temperature = _temperature(desired.min_scale)
        desired.epoch += 1
        desired.updated_at = now
    await session.flush()
    await record_config_change(session, "catalog", None)
    return _deployment(row, desired, version)


async def retire(session: AsyncSession, deployment_id: UUID, *, now: datetime) -> None:
    """Take a deployment away: the controller drains and stops it. Its name becomes free."""
    row, desired, _ = await _locked(session, deployment_id)
    await rollout_guard.check_deployment(session, deployment_id)
    row.retired_at = now
    row.name = f"r-{deployment_id.hex}"
    row.sealed_credential = b""
    desired.min_scale, desired.max_scale, desired.temperature = 0, 0, Temperature.COLD
    desired.epoch += 1
    desired.updated_at = now
    await session.flush()
    await record_config_change(session, "catalog", None)


async def caps_of(session: AsyncSession, model: str) -> list[tuple[str, int]]:
    """Return name and `inflight_max` of each live deployment of a model, by its own name."""
    return [(row.name, row.inflight_max) for row in await queries.deployments_of(session, model)]


async def get(session: AsyncSession, deployment_id: UUID) -> Deployment:
    """Return one; kind not_found when there is none."""
    found = await queries.deployment_by_id(session, deployment_id)
    if found is None:
        raise _missing(deployment_id)
    row, desired, version = found
    return _deployment(row, desired, version)


async def find(session: AsyncSession, name: str) -> UUID:
    """Return the live deployment of this name; kind not_found when there is none."""
    found = await queries.deployment_named(session, name)
    if found is None:
        raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no deployment named {name[:100]!r}.")
    return found


async def list_all(session: AsyncSession) -> list[Deployment]:
    """Return every live deployment, oldest first."""
    found = await queries.deployments(session)
    return [_deployment(row, desired, version) for row, desired, version in found]


def check_deployment(new: NewDeployment) -> str:
    """Refuse a deployment that could not work; returns its base URL without a trailing ``/v1``. Pure."""
    label = new.name
    if not (0 < len(label) <= 63 and label.strip("-") == label and label.replace("-", "").isascii()):
        raise _invalid("name", "A deployment's name has 1 to 63 lower-case letters, digits and inner hyphens.")
    if not label.replace("-", "").isalnum() or label != label.lower():
        raise _invalid("name", "A deployment's name has 1 to 63 lower-case letters, digits and inner hyphens.")
    if not new.endpoints or not new.endpoints <= ENDPOINTS:
        raise _invalid("endpoints", f"Name at least one of {', '.join(sorted(ENDPOINTS))}.")
    if not new.upstream_model:
        raise _invalid("upstream_model", "Say which model the engine is to be asked for.")
    _check_limits(new)
    if new.kind is DeploymentKind.EXTERNAL:
        return _external_url(new)
    if new.base_url or new.credential:
        raise _invalid("base_url", "Only an external deployment has a base_url and a credential.")
    if new.kind is DeploymentKind.KNATIVE:
        raise _invalid("kind", "No cluster is connected to this installation. Use local or external.")
    if new.engine not in LOCAL_ENGINES:
        raise _invalid("engine", f"A local deployment runs one of {', '.join(sorted(LOCAL_ENGINES))}.")
    if new.max_scale > LOCAL_SCALE_MAX:
        raise _invalid("max_scale", f"A local deployment has at most {LOCAL_SCALE_MAX} engines.")
    return ""


async def _check_fallback(session: AsyncSession, name: str, version_id: UUID) -> None:
    """A fallback is another model that callers could name. What it can serve is looked at for each request."""
    if not name:
        return
    leads_to = await queries.alias_version(session, name)
    if leads_to is None:
        raise _invalid("fallback_model", f"No model is served by the name {name[:100]!r}.")
    if leads_to == version_id:
        raise _invalid("fallback_model", "A model cannot be its own fallback: name another one.")


def _check_limits(new: NewDeployment) -> None:
    if new.default_max_tokens < 1:
        raise _invalid("default_max_tokens", "It must be at least 1.")
    if new.inflight_max < 0 or new.waiting_max < 0:
        raise _invalid("inflight_max", "Caps are whole numbers; 0 means no cap in flight and nobody waiting.")
    if not 0 <= new.max_wait_s <= 600:
        raise _invalid("max_wait_s", "It must be between 0 and 600 seconds.")
    for name, value in (("keep_alive_s", new.keep_alive_s), ("load_timeout_s", new.load_timeout_s)):
        if not 0 <= value <= SECONDS_MAX:
            raise _invalid(name, "It must be between 1 second and 7 days, or 0 for the controller's setting.")
    if not 0 <= new.min_scale <= new.max_scale:
        raise _invalid("min_scale", "It must be between 0 and max_scale.")
    _check_memory(new.gpu_memory_mb, new.kv_request_mb)


def _check_memory(gpu_mb: int, kv_mb: int) -> None:
    if gpu_mb < 0 or kv_mb < 0:
        raise _invalid("gpu_memory_mb", "Memory is a whole number of MB; 0 means that it is not known.")
    if bool(gpu_mb) != bool(kv_mb):
        missing = "kv_request_mb" if gpu_mb else "gpu_memory_mb"
        raise _invalid(missing, "State both gpu_memory_mb and kv_request_mb, or set both to 0: one alone says nothing.")
    if kv_mb > gpu_mb:
        raise _invalid(
            "kv_request_mb", f"A request of {kv_mb:,} MB does not fit in {gpu_mb:,} MB. Are the two exchanged?"
        )


def _external_url(new: NewDeployment) -> str:
    try:
        parts = urlsplit(new.base_url)
        whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an address in brackets that is none, a port beyond 65535
        whole = False
    if not whole or parts.query or parts.fragment or parts.username:
        raise _invalid("base_url", "Write http(s)://host[:port][/path] of an OpenAI-compatible server, nothing more.")
    return new.base_url.rstrip("/").removesuffix("/v1")


def _changed(row: DeploymentRow, desired: DesiredRow, change: DeploymentChange) -> NewDeployment:
    """Return the deployment as it would be asked for after the change."""
    current = NewDeployment(
        name=row.name,
        version_id=row.version_id,
        kind=DeploymentKind(row.kind),
        engine=EngineKind(row.engine),
        upstream_model=row.upstream_model,
        endpoints=frozenset(row.endpoints),
        default_max_tokens=row.default_max_tokens,
        engine_args=row.engine_args,
        base_url=row.base_url,
        inflight_max=row.inflight_max,
        waiting_max=row.waiting_max,
        max_wait_s=row.max_wait_s,
        fallback_model=row.fallback_model,
        gpu_memory_mb=row.gpu_memory_mb,
        kv_request_mb=row.kv_request_mb,
        min_scale=desired.min_scale,
        max_scale=desired.max_scale,
        keep_alive_s=desired.keep_alive_s,
        load_timeout_s=desired.load_timeout_s,
    )
    changes = {name: value for name in change.__struct_fields__ if (value := getattr(change, name)) is not None}
    return msgspec.structs.replace(current, **changes)


def _sealed(credential: str, deployment_id: UUID, key: bytes, random_bytes: Callable[[int], bytes]) -> bytes:
    if not credential:
        return b""
    return seal(key, credential.encode(), context=deployment_id.bytes, nonce=random_bytes(NONCE_BYTES))


def _temperature(min_scale: int) -> Temperature:
    return Temperature.HOT if min_scale else Temperature.COLD


async def _locked(session: AsyncSession, deployment_id: UUID) -> tuple[DeploymentRow, DesiredRow, ModelVersionRow]:
    found = await queries.deployment_by_id(session, deployment_id, lock=True)
    if found is None:
        raise _missing(deployment_id)
    row, desired, version = found
    return row, desired, version


def _deployment(row: DeploymentRow, desired: DesiredRow, version: ModelVersionRow) -> Deployment:
    return Deployment(
        id=row.id,
        version_id=row.version_id,
        model_id=version.model_id,
        name=row.name,
        kind=DeploymentKind(row.kind),
        engine=EngineKind(row.engine),
        engine_args=row.engine_args,
        endpoints=frozenset(row.endpoints),
        source=version.source,
        context_max=version.context_max,
        base_url=row.base_url,
        has_credential=bool(row.sealed_credential),
        upstream_model=row.upstream_model,
        default_max_tokens=row.default_max_tokens,
        inflight_max=row.inflight_max,
        waiting_max=row.waiting_max,
        max_wait_s=row.max_wait_s,
        fallback_model=row.fallback_model,
        gpu_memory_mb=row.gpu_memory_mb,
        kv_request_mb=row.kv_request_mb,
        temperature=Temperature(desired.temperature),
        min_scale=desired.min_scale,
        max_scale=desired.max_scale,
        keep_alive_s=desired.keep_alive_s,
        load_timeout_s=desired.load_timeout_s,
        epoch=desired.epoch,
        created_at=row.created_at,
        sha256=version.sha256,
    )


def _invalid(param: str, message: str) -> PlatformError:
    return PlatformError("INVALID_DEPLOYMENT", ErrorKind.INVALID, message, param=param)


def _missing(deployment_id: UUID) -> PlatformError:
    known = format_id(IdKind.DEPLOYMENT, deployment_id)
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no deployment {known}.")


async def load_credentials(session: AsyncSession, sealing_key: bytes) -> dict[UUID, str]:
    """Return the upstream credential of every live deployment that has one that opens; for the health probes."""
    found = {}
    for row, _, _ in await queries.deployments(session):
        if row.sealed_credential:
            try:
                found[row.id] = unseal_credential(sealing_key, row.id, row.sealed_credential)
            except PlatformError:
                continue  # the probe will then say that the server refuses it
    return found


def unseal_credential(key: bytes, deployment_id: UUID, sealed: bytes) -> str:
    """Return a deployment's upstream credential, the text after ``Bearer``; empty when it has none."""
    return unseal(key, sealed, context=deployment_id.bytes).decode() if sealed else ""

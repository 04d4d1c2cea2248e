"""Models, their versions, and the public names that lead to them."""

import re
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from catalog import queries, rollout_guard
from catalog.tables import DeploymentRow, ModelRow, ModelVersionRow
from catalog.types import DeploymentKind, EngineKind, Model, ModelVersion, NewVersion, ServedModel
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, new_uuid
from core.unreadable import Report, log_unreadable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")


def check_name(name: str) -> None:
    """Refuse a public name that a URL path or a shell pattern could not carry."""
    if not _NAME.fullmatch(name):
        raise PlatformError(
            "INVALID_NAME",
            ErrorKind.INVALID,
            "A model's name has 1 to 128 letters, digits and . _ / : @ -, and starts with a letter or digit.",
            param="name",
        )


async def create_model(
    session: AsyncSession, *, name: str, now: datetime, owned_by: str = "tidegate", description: str = ""
) -> UUID:
    """Create a model; it is served once a version has a deployment.

    Raises:
        PlatformError: kind invalid for a bad name, conflict when it is taken.
    """
    check_name(name)
    if await queries.model_named(session, name) is not None or await queries.alias_model(session, name) is not None:
        raise PlatformError("NAME_TAKEN", ErrorKind.CONFLICT, f"The name {name!r} is taken.", param="name")
    row = ModelRow(
        id=new_uuid(), name=name, owned_by=owned_by, description=description, created_at=now, retired_at=None
    )
    session.add(row)
    await session.flush()
    return row.id


async def add_version(
    session: AsyncSession, model_id: UUID, version: NewVersion, *, now: datetime, make_current: bool = True
) -> UUID:
    """Add the next version of a model; when made current, the model's own name leads to it.

    Raises:
        PlatformError: kind not_found for the model, invalid for weights on a disk without a hash.
    """
    _check_source(version)
    model = await _model(session, model_id)
    row = ModelVersionRow(
        id=new_uuid(),
        model_id=model_id,
        number=await queries.last_version_number(session, model_id) + 1,
        source=version.source,
        sha256=version.sha256,
        licence=version.licence,
        context_max=version.context_max,
        template_tokens=version.template_tokens,
        bytes_per_token_milli=version.bytes_per_token_milli,
        created_at=now,
        size_bytes=0,
        facts={},
        provenance={},
        manifest="",
        signature=b"",
        signed_by="",
        deprecated_at=None,
        deprecation_note="",
        verified_at=None,
        damage="",
        removed_at=None,
    )
    session.add(row)
    await session.flush()
    if make_current:
        await set_alias(session, model.name, row.id, now=now)
    return row.id


def check_weights(version: ModelVersionRow) -> None:
    """Refuse to serve from weights that were taken out of the store, or that a check found damaged.

    Raises:
        PlatformError: kind conflict.
    """
    if version.removed_at is not None:
        message = f"The weights of version {version.number} were taken out of the store. Import them as a new version."
        raise PlatformError("VERSION_REMOVED", ErrorKind.CONFLICT, message)
    if version.damage:
        message = f"The stored weights of version {version.number} are damaged: {version.damage}"
        raise PlatformError("VERSION_DAMAGED", ErrorKind.CONFLICT, message)


def _check_source(version: NewVersion) -> None:
    scheme = version.source.partition(":")[0]
    if scheme == "registry":
        message = "The registry itself names its sources. Bring the weights in by an upload or an import."
        raise PlatformError("INVALID_SOURCE", ErrorKind.INVALID, message, param="source")
    if scheme in {"wheel", "file"} and not version.sha256:
        message = "No engine starts from a file whose hash is not known. Give its SHA-256, or import it."
        raise PlatformError("INVALID_SOURCE", ErrorKind.INVALID, message, param="sha256")


async def set_alias(session: AsyncSession, name: str, version_id: UUID, *, now: datetime) -> None:
    """Let a public name lead to a version: a new name, another version, or a rollback.

    Raises:
        PlatformError: kind not_found for an unknown version, conflict when the name is another model's own, or a
            rollout switches it.
    """
    check_name(name)
    version = await queries.version_by_id(session, version_id, keep=True)
    if version is None:
        raise _missing(IdKind.MODEL_VERSION, version_id)
    check_weights(version)
    owner = await queries.model_named(session, name)
    if owner is not None and owner.id != version.model_id:
        raise PlatformError("NAME_TAKEN", ErrorKind.CONFLICT, f"{name!r} is another model's own name.", param="name")
    await rollout_guard.check_name(session, name)
    await queries.upsert_alias(session, name, version_id, now)
    await record_config_change(session, "catalog", None)


async def drop_alias(session: AsyncSession, name: str) -> None:
    """Take a public name away; calls to it answer 404 from now on."""
    await rollout_guard.check_name(session, name)
    await queries.delete_alias(session, name)
    await record_config_change(session, "catalog", None)


async def retire_model(session: AsyncSession, model_id: UUID, *, now: datetime) -> None:
    """Stop serving a model under all its names. Its history stays."""
    model = await _model(session, model_id)
    model.retired_at = now
    await session.flush()
    await record_config_change(session, "catalog", None)


async def unknown(session: AsyncSession, model_ids: Collection[UUID]) -> set[UUID]:
    """Return those ids that are no model's."""
    return set(model_ids) - await queries.known_models(session, model_ids)


async def list_models(session: AsyncSession) -> list[Model]:
    return [
        Model(row.id, row.name, row.owned_by, row.description, row.created_at, row.retired_at is not None)
        for row in await queries.models(session)
    ]


async def list_versions(session: AsyncSession, model_id: UUID) -> list[ModelVersion]:
    if await queries.model_by_id(session, model_id) is None:
        raise _missing(IdKind.MODEL, model_id)
    return [
        ModelVersion(
            id=row.id,
            model_id=row.model_id,
            number=row.number,
            source=row.source,
            sha256=row.sha256,
            licence=row.licence,
            context_max=row.context_max,
            template_tokens=row.template_tokens,
            bytes_per_token_milli=row.bytes_per_token_milli,
            created_at=row.created_at,
        )
        for row in await queries.versions(session, model_id)
    ]


async def load_served(session: AsyncSession, report: Report = log_unreadable) -> dict[str, ServedModel]:
    """Return every public name that somebody answers for: the oldest live deployment of its version.

    A name whose deployment cannot be read is not served.
    """
    found = {}
    for name, model, version, deployment in await queries.served(session):
        try:
            found[name] = as_served(name, model, version, deployment)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is not the others' fault
            report("deployment", deployment.id, error)
            found.pop(name, None)
    return found


def as_served(name: str, model: ModelRow, version: ModelVersionRow, deployment: DeploymentRow) -> ServedModel:
    """Return what a gateway must know of a public name that this deployment answers for."""
    return ServedModel(
        name=name,
        model_id=model.id,
        version_id=version.id,
        deployment_id=deployment.id,
        kind=DeploymentKind(deployment.kind),
        engine=EngineKind(deployment.engine),
        upstream_model=deployment.upstream_model,
        context_max=version.context_max,
        default_max_tokens=deployment.default_max_tokens,
        endpoints=frozenset(deployment.endpoints),
        template_tokens=version.template_tokens,
        bytes_per_token_milli=version.bytes_per_token_milli,
        inflight_max=deployment.inflight_max,
        waiting_max=deployment.waiting_max,
        max_wait_s=deployment.max_wait_s,
        base_url=deployment.base_url,
        sealed_credential=deployment.sealed_credential,
        created_at_s=int(model.created_at.timestamp()),
        owned_by=model.owned_by,
        model_name=model.name,
        fallback_model=deployment.fallback_model,
        deprecated_at_s=0 if version.deprecated_at is None else int(version.deprecated_at.timestamp()),
        deprecation_note=version.deprecation_note,
    )


async def own_name(session: AsyncSession, name: str) -> str:
    """Return the own name of the model that a public name leads to.

    Raises:
        PlatformError: kind not_found, there is no model of that name.
    """
    model_id = await queries.alias_model(session, name)
    found = (
        await queries.model_named(session, name) if model_id is None else await queries.model_by_id(session, model_id)
    )
    if found is None:
        raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no model {name[:100]!r}.", param="model")
    return found.name


async def name_of(session: AsyncSession, model_id: UUID) -> str:
    """Return a model's own name."""
    row = await queries.model_by_id(session, model_id)
    if row is None:
        raise _missing(IdKind.MODEL, model_id)
    return row.name


async def name_locked(session: AsyncSession, model_id: UUID) -> str:
    """The same, and hold the model: who adds a version to it does so alone."""
    return (await _model(session, model_id)).name


async def name_of_version(session: AsyncSession, version_id: UUID) -> str:
    """Return the own name of a version's model."""
    row = await queries.version_by_id(session, version_id)
    if row is None:
        raise _missing(IdKind.MODEL_VERSION, version_id)
    return await name_of(session, row.model_id)


async def _model(session: AsyncSession, model_id: UUID) -> ModelRow:
    """Return the model, locked: whoever adds to it does so one at a time."""
    row = await queries.model_by_id(session, model_id, lock=True)
    if row is None:
        raise _missing(IdKind.MODEL, model_id)
    return row


def _missing(kind: IdKind, value: UUID) -> PlatformError:
    noun = kind.name.lower().replace("_", " ")
    return PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no {noun} {format_id(kind, value)}.")

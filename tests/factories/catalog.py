"""Models and deployments for tests."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

from catalog import deployments, models
from catalog.tables import ModelRow
from catalog.types import DeploymentKind, EngineKind, NewDeployment, NewVersion
from core import db
from core.ids import new_uuid

NOW = datetime(2026, 11, 30, tzinfo=UTC)
SEALING_KEY = bytes(range(32))


async def know(sessions: db.Sessions, model_id: UUID, name: str = "demo") -> None:
    """Make a model with this id: enough to be priced. Doing it again changes nothing."""
    async with db.transaction(sessions) as session:
        if await session.get(ModelRow, model_id) is None:
            session.add(ModelRow(id=model_id, name=name, owned_by="", description="", created_at=NOW, retired_at=None))


async def deploy(sessions: db.Sessions, name: str = "", **members: Any) -> UUID:
    """Create a model with one version and one deployment of it, on the engine simulator unless told otherwise."""
    name = name or f"m-{new_uuid().hex}"
    new = NewDeployment(
        name=name.lower(),
        version_id=new_uuid(),
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        upstream_model="sim",
        endpoints=frozenset({"chat", "completions", "embeddings", "tokenize"}),
    )
    async with db.transaction(sessions) as session:
        model_id = await models.create_model(session, name=name, now=NOW)
        version_id = await models.add_version(session, model_id, NewVersion(context_max=2048), now=NOW)
        new = msgspec.structs.replace(new, version_id=version_id, **members)
        return await deployments.create(session, new, sealing_key=SEALING_KEY, now=NOW)

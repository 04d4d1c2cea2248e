"""Fills the directory from Postgres and keeps it true: LISTEN, and a look every 250 ms for the notice that was lost.

With Postgres away the directory stays as it is, and traffic goes on; how old it is can be seen in `/ready` and in the
metrics.
"""

import asyncio
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg
import structlog
from sqlalchemy.exc import SQLAlchemyError

from api.inference import queries
from api.inference.bearers import Bearers
from api.inference.directory import Directory
from api.inference.metrics import Metrics
from billing import price_book
from catalog import models, rollouts
from catalog.types import ServedModel
from core.clock import Clock
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.sealing import unseal
from core.unreadable import log_unreadable
from tenants import entitlements, principals

POLL_S = 0.25
QUIET_S = 5.0  # a look that takes longer means the connection is dead
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 1.0
SLICE = 500  # keys looked at before other work has its turn
ENTITLING = frozenset({entitlements.CHANGED, "tenant"})  # nothing is kept free for a tenant that may not call
END = ".end"  # kind of a change that also cuts what runs: ``tenant.end``

_log = structlog.get_logger("gateway")


def _nothing_on_disk() -> bool:
    return False


def _end_nothing(kind: str, entity_id: UUID) -> None:
    """For whoever has nothing that runs."""


class Follower:
    """One task and one connection of its own for the life of the process.

    `peppers` names those under which keys can be presented here; `end` is called, after the keys are up to date, for
    each change that cuts what runs. `on_disk` fills the directory from this replica's disk when Postgres is away at the
    start, and says whether it could.
    """

    def __init__(
        self,
        directory: Directory,
        sessions: Sessions,
        url: str,
        *,
        sealing: bytes,
        clock: Clock,
        metrics: Metrics,
        peppers: Collection[str] | None = None,
        end: Callable[[str, UUID], None] = _end_nothing,
        bearers: Bearers | None = None,
        on_disk: Callable[[], bool] = _nothing_on_disk,
    ) -> None:
        self._directory = directory
        self._sessions = sessions
        self._url = url
        self._sealing = sealing
        self._clock = clock
        self._metrics = metrics
        self._peppers = peppers
        self._end = end
        self._bearers = bearers
        self._on_disk = on_disk

    async def run(self, loaded: Callable[[], None]) -> None:
        """Follow for ever; `loaded` is called once the directory is whole for the first time."""
        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                connection: psycopg.AsyncConnection[Any] = await psycopg.AsyncConnection.connect(
                    self._url, autocommit=True, connect_timeout=3, application_name="tidegate-gateway"
                )
                async with connection:
                    await connection.execute(queries.LISTEN)
                    await self._catch_up(connection, loaded)
                    backoff_s = BACKOFF_MIN_S
                    while True:
                        await self._wait(connection)
                        await self._look(connection)
            except (psycopg.Error, SQLAlchemyError, OSError, TimeoutError) as error:
                self._metrics.add("config_failures_total")
                _log.warning("config.unreachable", error=type(error).__name__)
                if not self._directory.loaded and self._on_disk():
                    loaded()
            except Exception as bug:  # noqa: BLE001 - a row we cannot read must not end the following for ever
                self._metrics.add("config_failures_total")
                _log.error("config.unreadable", error=type(bug).__name__, exc_info=bug)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    async def load(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        """Read everything. The revision is read first: what changes meanwhile is read again.

        The keys come last: until then callers are told to come back, not that there is no such model or price.
        """
        revision = await queries.newest_revision(connection)
        async with transaction(self._sessions) as session:
            found = await principals.load_all(session, self._peppers, self._report)
        if self._bearers is not None:
            await self._bearers.load()
        await self._load_catalog()
        await self._load_prices()
        await self._load_entitlements()
        self._directory.principals = found
        self._directory.changed()
        self._directory.revision = revision
        self._directory.served.set()
        self._directory.loaded, self._directory.from_disk = True, False
        self._directory.fresh_at = self._clock.monotonic()
        self._metrics.add("config_reloads_total")
        gc.collect()
        gc.freeze()  # a full collection over all principals would stop the process for tenths of a second

    async def _catch_up(self, connection: "psycopg.AsyncConnection[Any]", loaded: Callable[[], None]) -> None:
        if self._directory.loaded and not self._directory.from_disk:
            await self._look(connection)
            return
        await self.load(connection)
        loaded()

    async def _wait(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        async with asyncio.timeout(QUIET_S):
            async for _ in connection.notifies(timeout=POLL_S, stop_after=1):
                return

    async def _look(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        """Apply what changed since the last look."""
        directory = self._directory
        async with asyncio.timeout(QUIET_S):
            changes = await queries.changes_after(connection, directory.revision)
        seen = self._clock.monotonic()
        if changes:
            directory.news += 1
            directory.settled.clear()
            try:
                await self._apply([change[:3] for change in changes])
            finally:
                directory.settled.set()
            took_s = self._clock.monotonic() - seen
            for *_, age_s in changes:
                self._metrics.obeyed(age_s + took_s)
        directory.fresh_at = seen

    async def _apply(self, changes: list[tuple[int, str, UUID | None]]) -> None:
        directory = self._directory
        touched: dict[str, set[UUID | None]] = {}
        for _, kind, entity in changes:
            touched.setdefault(kind, set()).add(entity)
        await self._load_keys({kind: entities for kind, entities in touched.items() if kind in principals.KEY_KINDS})
        limits = [
            (kind, entity) for kind in touched.keys() & principals.LIMIT_KINDS for entity in touched[kind] if entity
        ]
        if limits:
            async with transaction(self._sessions) as session:
                patches = [await principals.load_limits(session, kind, entity, self._report) for kind, entity in limits]
            unread = await change_limits(directory, patches)
            if unread:  # what could not be read may be readable now
                await self._patch("tenant", unread)
        if self._bearers is not None:
            await self._bearers.follow(touched)
        await self._load_wholes(touched.keys())
        directory.changed()
        directory.revision = changes[-1][0]
        directory.served.set()
        self._metrics.add("config_reloads_total")
        for kind, entities in touched.items():
            for entity in entities:
                if kind.endswith(END) and entity is not None:
                    self._end(kind.removesuffix(END), entity)

    async def _load_wholes(self, kinds: Collection[str]) -> None:
        """Take in anew what is read as a whole."""
        if "catalog" in kinds:
            await self._load_catalog()
        if "prices" in kinds:
            await self._load_prices()
        if not ENTITLING.isdisjoint(kinds):
            await self._load_entitlements()

    async def _load_keys(self, keys: Mapping[str, Collection[UUID | None]]) -> None:
        """Take in what changed of keys, by kind of change."""
        if any(None in entities for entities in keys.values()):
            async with transaction(self._sessions) as session:
                self._directory.principals = await principals.load_all(session, self._peppers, self._report)
        else:
            for kind, entities in keys.items():
                await self._patch(kind, [entity for entity in entities if entity is not None])

    async def _patch(self, kind: str, entities: Collection[UUID]) -> None:
        """Take in the keys that changed, in slices: ten thousand of a tenant at once would hold up every request."""
        known = self._directory.principals
        async with transaction(self._sessions) as session:
            async for patch in principals.load_changed(session, kind, entities, self._peppers, self._report):
                for digest, principal in patch.items():
                    if principal is None:
                        known.pop(digest, None)
                    else:
                        known[digest] = principal

    async def _load_catalog(self) -> None:
        async with transaction(self._sessions) as session:
            served = await models.load_served(session, self._report)
            arms = await rollouts.load_arms(session, self._report)
        self._directory.models, self._directory.rollouts = served, arms
        canaries = (both.canary for both in arms.values())
        self._directory.credentials = opened_credentials(self._sealing, (*served.values(), *canaries))

    async def _load_prices(self) -> None:
        async with transaction(self._sessions) as session:
            self._directory.prices = await price_book.load_table(session, self._clock.now(), self._report)

    async def _load_entitlements(self) -> None:
        async with transaction(self._sessions) as session:
            self._directory.entitle(await entitlements.load(session, self._report))

    def _report(self, kind: str, row_id: UUID, error: Exception) -> None:
        self._metrics.add("config_unreadable_total")
        log_unreadable(kind, row_id, error)


def opened_credentials(sealing: bytes, served: Iterable[ServedModel]) -> dict[UUID, str]:
    """Return the upstream credentials by deployment; one that does not open is told and left out."""
    credentials = {}
    for model in served:
        if model.sealed_credential:
            try:
                opened = unseal(sealing, model.sealed_credential, context=model.deployment_id.bytes)
            except PlatformError:
                _log.error("credential.unreadable", deployment=model.deployment_id.hex)
                continue
            credentials[model.deployment_id] = opened.decode("utf-8", "replace")
    return credentials


async def change_limits(directory: Directory, patches: Sequence[principals.LimitPatch]) -> set[UUID]:
    """Give the keys that are known their new limits, slice by slice: there may be a hundred thousand.

    Returns:
        The tenants of those keys among them that could not be read before.
    """
    known, unread = directory.principals, set()
    for place, digest in enumerate(list(known), 1):
        principal = known.get(digest)
        if principal is not None:
            for patch in patches:
                if principal.refusal == principals.UNREADABLE and patch.concerns(principal):
                    unread.add(principal.tenant_id)
                principal = patch.apply(principal)
            known[digest] = principal
        if place % SLICE == 0:
            await asyncio.sleep(0)
    return unread

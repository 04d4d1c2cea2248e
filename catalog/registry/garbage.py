"""What lies in the store and nobody needs: looked for, shown, and taken out when an operator says so.

Kept is what a live deployment, a name that callers use, a running intake, or an event of usage within the retention
needs, and what is younger than a few days. A version's row stays for ever: receipts name it.
"""

from collections.abc import Awaitable, Callable
from datetime import date, datetime, timedelta
from uuid import UUID

import msgspec
from obstore.store import ObjectStore
from sqlalchemy.ext.asyncio import AsyncSession

from catalog.registry import manifest, queries, store, versions
from catalog.registry.errors import conflict
from catalog.registry.types import RegisteredVersion
from core import db
from core.logging import get_logger

YOUNG = timedelta(days=7)
LOOSE_YOUNG = timedelta(days=1)  # files that are no version's, which somebody may be writing
LOOSE_MAX = 10_000

Used = Callable[[AsyncSession, UUID, date, date], Awaitable[bool]]
"""Says whether an event of usage between two days, both included, names a version."""

log = get_logger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """A version that stays, and why."""

    version: RegisteredVersion
    because: str


class Plan(msgspec.Struct, frozen=True):
    """What would go: versions whose weights nobody needs, and files in the store that are no version's."""

    remove: list[RegisteredVersion]
    keep: list[Kept]
    loose: list[str]
    loose_bytes: int

    @property
    def bytes(self) -> int:
        """Of all that would go."""
        return sum(version.size_bytes for version in self.remove) + self.loose_bytes


async def plan(
    sessions: db.Sessions,
    objects: ObjectStore,
    used: Used,
    *,
    now: datetime,
    weights_days: int,
    young: timedelta = YOUNG,
) -> Plan:
    """Look for what nobody needs; nothing is changed.

    Args:
        sessions: for a transaction a version.
        objects: the store.
        used: asks the books, see `Used`.
        now: wall time.
        weights_days: how long after its last use a version is kept; 0: as long as events of usage name it.
        young: a version that was made since then stays.
    """
    remove, keep = [], []
    async with db.transaction(sessions) as session:
        found = [one for one in await versions.list_all(session) if one.source.startswith("registry:")]
    for version in found:
        if version.removed_at is None:
            async with db.transaction(sessions) as session:
                because = await _needed(session, version, used, now=now, weights_days=weights_days, young=young)
            if because:
                keep.append(Kept(version, because))
            else:
                remove.append(version)
    loose, loose_bytes = await _loose(sessions, objects, found, now)
    return Plan(remove, keep, loose, loose_bytes)


async def collect(
    sessions: db.Sessions,
    objects: ObjectStore,
    used: Used,
    *,
    now: datetime,
    weights_days: int,
    young: timedelta = YOUNG,
    versions_max: int = queries.PAGE_MAX,
) -> Plan:
    """Take out what nobody needs, each version only when that is still so; returns what went.

    A version is marked first, under a lock that keeps deployments and names away from it, then its files are deleted:
    what is left when this is ended in between goes the next time, as files that are no version's.

    Raises:
        PlatformError: kind conflict, there are more than `versions_max` to take out; nothing was.
    """
    wanted = await plan(sessions, objects, used, now=now, weights_days=weights_days, young=young)
    if len(wanted.remove) > versions_max:
        raise conflict("MORE_THAN_SHOWN", f"{len(wanted.remove)} versions would go. Look at them in a dry run first.")
    removed = []
    for version in wanted.remove:
        async with db.transaction(sessions) as session:
            row = await queries.version(session, version.id, lock=True)
            because = await _needed(session, version, used, now=now, weights_days=weights_days, young=young)
            if row is None or because or row[0].removed_at is not None:
                continue
            row[0].removed_at = now
        await store.delete_below(objects, store.version_folder(version.model_id, version.number, version.sha256))
        removed.append(version)
        log.info("model_version.removed", version_id=version.id.hex, bytes=version.size_bytes)
    await store.delete(objects, wanted.loose)
    return Plan(removed, wanted.keep, wanted.loose, wanted.loose_bytes)


async def _needed(
    session: AsyncSession,
    version: RegisteredVersion,
    used: Used,
    *,
    now: datetime,
    weights_days: int,
    young: timedelta,
) -> str:
    """Return what needs a version; empty: nothing."""
    if version.created_at > now - young:
        return f"it is younger than {young.days} days"
    because = (await queries.needed_by_catalog(session)).get(version.id, "")
    if because:
        return because
    since = (now - timedelta(days=weights_days)).date() if weights_days else date.min
    for began, ended in await queries.lifetimes(session, version.id):
        first = max(began.date(), since)
        last = (ended or now).date() + timedelta(days=1)  # a stream may have ended after its deployment
        if first <= last and await used(session, version.id, first, last):
            return "usage that is kept names it"
    return ""


async def _loose(
    sessions: db.Sessions, objects: ObjectStore, found: list[RegisteredVersion], now: datetime
) -> tuple[list[str], int]:
    """Return the files that are no version's and no running intake's, and their bytes."""
    async with db.transaction(sessions) as session:
        folders = {store.version_folder(*folder) for folder in await queries.open_folders(session)}
        uploads = {store.upload_folder(intake_id) for intake_id in await queries.open_intakes(session)}
        for version in found:
            if version.removed_at is None:
                folder = store.version_folder(version.model_id, version.number, version.sha256)
                paths = [file.path for file in await versions.files_of(session, version.id)]
                folders |= {f"{folder}/{path}" for path in (*paths, manifest.MANIFEST_FILE)}
    loose: list[str] = []
    size = 0
    for prefix, depth, known in ((store.MODELS, 4, folders), (store.UPLOADS, 2, uploads)):
        async for one in store.listed(objects, prefix):
            path = one["path"]
            ours = path in known or "/".join(path.split("/")[:depth]) in known
            if not ours and one["last_modified"] < now - LOOSE_YOUNG and len(loose) < LOOSE_MAX:
                loose.append(path)
                size += one["size"]
    return loose, size

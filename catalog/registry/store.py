"""The object store, and where things lie in it.

``models/<model>/<number>/<sha256>/<path>``: the files of a version under their own names, beside them its manifest. A
file appears there whole and with the right hash, or not at all. ``uploads/<intake>/<file>/<offset>-<sha256>``: parts of
uploads, until they are moved.
"""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import obstore
from obstore.store import LocalStore, ObjectStore, S3Store

from catalog.registry.errors import invalid
from catalog.registry.types import WeightFile
from core.settings import Objects, Settings

if TYPE_CHECKING:
    from obstore.store import S3Config  # there at type checking alone

CHUNK_BYTES = 4 * 1024 * 1024
MODELS, UPLOADS = "models", "uploads"
DELETE_BATCH = 500
LISTED_MAX = 1_000_000


class Meter(Protocol):
    """Is told of every piece that was read."""

    def __call__(self, count: int, /) -> None: ...


def open_store(settings: Settings) -> ObjectStore:
    """Return the installation's store; nothing connects. A folder that is not there is made at the first write."""
    if settings.objects.url:
        return bucket(settings.objects, settings.objects.url)
    settings.objects_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return LocalStore(settings.objects_dir, automatic_cleanup=True, mkdir=True)


def bucket(objects: Objects, url: str) -> ObjectStore:
    """Return the store of ``s3://bucket[/prefix]``, at the server and with the keys of the settings."""
    name, _, prefix = url.removeprefix("s3://").partition("/")
    config: S3Config = {"region": objects.region, "virtual_hosted_style_request": not objects.endpoint}
    if objects.endpoint:
        config["endpoint"] = objects.endpoint
    if access := objects.access_key.get_secret_value():
        config["access_key_id"] = access
        config["secret_access_key"] = objects.secret_key.get_secret_value()
    plain = objects.endpoint.startswith("http://")
    return S3Store(name, prefix=prefix.strip("/") or None, config=config, client_options={"allow_http": plain})


def version_folder(model_id: UUID, number: int, sha256: str) -> str:
    return f"{MODELS}/{model_id.hex}/{number}/{sha256}"


def upload_folder(intake_id: UUID) -> str:
    return f"{UPLOADS}/{intake_id.hex}"


def part_key(intake_id: UUID, no: int, start: int, sha256: str) -> str:
    return f"{upload_folder(intake_id)}/{no}/{start}-{sha256}"


async def read(store: ObjectStore, key: str) -> AsyncIterator[bytes]:
    """Yield an object in pieces.

    Raises:
        FileNotFoundError: there is none.
    """
    found = await obstore.get_async(store, key)
    async for piece in found.stream(min_chunk_size=CHUNK_BYTES):
        yield bytes(piece)


async def read_start(store: ObjectStore, key: str, most: int) -> bytes:
    """Return the first bytes of an object: all of it, or `most`."""
    size = (await obstore.head_async(store, key))["size"]
    return bytes(await obstore.get_range_async(store, key, start=0, end=min(size, most))) if size else b""


async def read_range(store: ObjectStore, key: str, start: int, length: int) -> bytes:
    return bytes(await obstore.get_range_async(store, key, start=start, length=length))


async def size_of(store: ObjectStore, key: str) -> int | None:
    """Return how many bytes an object has; None when there is none."""
    try:
        return int((await obstore.head_async(store, key))["size"])
    except FileNotFoundError:
        return None


async def verified(pieces: AsyncIterator[bytes], file: WeightFile, meter: Meter) -> AsyncIterator[bytes]:
    """Pass a file's pieces on, and raise at its end when it is wrong, before whoever writes them makes it appear.

    Raises:
        PlatformError: kind invalid, it has other bytes than its hash and size say.
    """
    digest, seen = hashlib.sha256(), 0
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        async for piece in pieces:
            seen += len(piece)
            if seen > file.size_bytes:
                break
            digest.update(piece)
            meter(len(piece))
            yield piece
    if seen != file.size_bytes or digest.hexdigest() != file.sha256:
        what = f"{seen:,} bytes, not {file.size_bytes:,}" if seen != file.size_bytes else "another SHA-256"
        raise invalid(
            f"{file.path!r} has {what} than was said: it was altered, cut, or is another file.", code="HASH_WRONG"
        )


async def put_verified(
    store: ObjectStore, key: str, pieces: AsyncIterator[bytes], file: WeightFile, meter: Meter
) -> None:
    """Write a file, which appears when it is whole and right; raises as `verified`, and then nothing is there."""
    await obstore.put_async(store, key, verified(pieces, file, meter))


async def check(store: ObjectStore, key: str, file: WeightFile, meter: Meter) -> None:
    """Read a file again; raises as `verified`, and FileNotFoundError."""
    async for _ in verified(read(store, key), file, meter):
        pass


async def put(store: ObjectStore, key: str, content: bytes) -> None:
    await obstore.put_async(store, key, content)


async def delete(store: ObjectStore, keys: Iterable[str]) -> int:
    """Delete objects; those that are not there are no error. Returns how many were asked for."""
    count, batch = 0, []
    for key in keys:
        batch.append(key)
        count += 1
        if len(batch) == DELETE_BATCH:
            await _delete(store, batch)
            batch = []
    await _delete(store, batch)
    return count


async def _delete(store: ObjectStore, keys: list[str]) -> None:
    if isinstance(store, LocalStore):
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(store, key)
    elif keys:
        await obstore.delete_async(store, keys)


async def listed(store: ObjectStore, prefix: str) -> AsyncIterator[Any]:
    """Yield path, size and time of what lies below a prefix, empty for all: at most `LISTED_MAX`."""
    count = 0
    async for batch in obstore.list(store, f"{prefix}/" if prefix else None, chunk_size=1000):
        for found in batch:
            count += 1
            if count > LISTED_MAX:
                return
            yield found


async def delete_below(store: ObjectStore, prefix: str) -> int:
    """Delete all below a prefix."""
    return await delete(store, [found["path"] async for found in listed(store, prefix)])

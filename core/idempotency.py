"""Idempotency keys of changes: the answer is kept in the change's own transaction, and given again to a repeat.

Who asks first holds the key for as long as its transaction runs, by a lock that ends with it; so nothing has to be
tidied up when it is rolled back, or its process dies. Answers are sealed: some show a secret once.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core import idempotency_queries as queries
from core.db import transaction
from core.errors import ErrorKind, PlatformError
from core.sealing import seal, unseal
from core.tasks import Periodic, Task, TaskContext

HEADER = "Idempotency-Key"
KEY_MAX_CHARS = 255
KEPT_FOR = timedelta(hours=24)
BODY_MAX_BYTES = 1_000_000
FORGET_AT_ONCE = 1000
FORGET_ROUNDS_MAX = 20
_KEY = re.compile(r"[\x20-\x7e]{1,255}")


class Kept(msgspec.Struct, frozen=True):
    """An answer: its status, the headers that belong to it, its body."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """A change that is asked for under a key.

    `digest` is of caller, method, path and key, so that no two callers ever meet. `fingerprints` are of the rest of the
    request under each pepper, the current one first: a body may hold a password, which a plain hash would give away.
    """

    digest: bytes
    fingerprints: tuple[bytes, ...]


def asked(scope: Sequence[str], key: str, content: bytes, peppers: Sequence[bytes]) -> Asked:
    """Return what is asked for.

    Args:
        scope: who asks for what: kind and id of the caller, method, path.
        key: as the caller chose it.
        content: what must be the same in a repeat.
        peppers: the installation's, the current one first.

    Raises:
        PlatformError: INVALID_REQUEST, the key has another form.
    """
    check(key)
    digest = hashlib.blake2b("\n".join((*scope, key)).encode(), digest_size=32, person=b"tg-idempotency").digest()
    return Asked(digest, tuple(hashlib.blake2b(content, digest_size=32, key=one).digest() for one in peppers))


def check(key: str) -> None:
    """Raise INVALID_REQUEST unless the key is 1 to 255 printable ASCII characters."""
    if not _KEY.fullmatch(key):
        message = f"The header {HEADER} has 1 to {KEY_MAX_CHARS} printable ASCII characters."
        raise PlatformError("INVALID_REQUEST", ErrorKind.INVALID, message, param=HEADER)


async def claim(session: AsyncSession, what: Asked, *, now: datetime, sealing_key: bytes) -> Kept | None:
    """Hold the key until this transaction ends, or return the answer of the one that held it before.

    Raises:
        PlatformError: conflict: IDEMPOTENCY_IN_PROGRESS, IDEMPOTENCY_KEY_REUSED with another body, or
            IDEMPOTENCY_ANSWER_NOT_KEPT when the change was made and its answer cannot be shown again.
    """
    if not await queries.try_lock(session, int.from_bytes(what.digest[:8], "big", signed=True)):
        raise in_progress()
    row = await queries.find(session, what.digest, now)
    if row is None:
        return None
    if bytes(row.fingerprint) not in what.fingerprints:
        raise key_reused()
    if not row.sealed:
        raise _not_kept()
    try:
        plain = unseal(sealing_key, bytes(row.sealed), context=what.digest)
    except PlatformError:
        raise _not_kept() from None
    return msgspec.msgpack.decode(plain, type=Kept)


async def keep(
    session: AsyncSession, what: Asked, answer: Kept, *, now: datetime, sealing_key: bytes, nonce: bytes
) -> None:
    """Keep the answer for repeats, with the change itself. One that is too large is not kept: only that it was given.

    Raises:
        PlatformError: IDEMPOTENCY_IN_PROGRESS, another holds the key; the change must be rolled back.
    """
    sealed = b""
    if len(answer.body) <= BODY_MAX_BYTES:
        sealed = seal(sealing_key, msgspec.msgpack.encode(answer), context=what.digest, nonce=nonce)
    if not await queries.insert(session, what.digest, what.fingerprints[0], answer.status, sealed, now + KEPT_FOR, now):
        raise in_progress()


def in_progress(retry_after_s: int = 1, fields: Mapping[str, str] | None = None) -> PlatformError:
    """The first request with this key is still being answered."""
    return PlatformError(
        "IDEMPOTENCY_IN_PROGRESS",
        ErrorKind.CONFLICT,
        f"A request with this {HEADER} is being answered. Send this one again when it is done.",
        param=HEADER,
        retry_after_s=retry_after_s,
        fields=fields,
    )


def key_reused() -> PlatformError:
    """The key came with other values before."""
    return PlatformError(
        "IDEMPOTENCY_KEY_REUSED",
        ErrorKind.CONFLICT,
        f"This {HEADER} came with another request before. Send the same request, or a new key.",
        param=HEADER,
    )


def _not_kept() -> PlatformError:
    return PlatformError(
        "IDEMPOTENCY_ANSWER_NOT_KEPT",
        ErrorKind.CONFLICT,
        "What this asks for was done before; its answer cannot be shown again. Nothing was done now.",
        param=HEADER,
    )


async def forget(context: TaskContext) -> None:
    """Delete answers that expired, some at a time."""
    for _ in range(FORGET_ROUNDS_MAX):
        async with transaction(context.sessions) as session:
            count = await queries.forget(session, context.clock.now(), FORGET_AT_ONCE)
        if count < FORGET_AT_ONCE:
            return


TASKS: tuple[Task, ...] = (Periodic("idempotency.forget", forget, every_s=300),)

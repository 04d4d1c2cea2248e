"""Idempotency keys of inference in Valkey: who runs, who is done, and what was answered where a project keeps answers.

A key is held by one request at a time, over all replicas. It is free again when its request ended without a bill, and
taken to be lost when its replica does not list the request among those that run (`lease`): then a repeat with the same
body goes on, and the poster sees to it that one of the two is billed (`billing.idempotency`). Nothing here is needed
for that, so that Valkey may lose all of it.
"""

import hashlib
import os
from collections.abc import Callable
from datetime import datetime
from uuid import UUID

import msgspec

from core import keyspace
from core.errors import PlatformError
from core.resp import RespClient, script
from core.sealing import NONCE_BYTES, seal, unseal

DAY_S = 86_400
COUNTED_FOR_S = 2 * DAY_S
GRACE_MS = 5000  # from the claim until the admission lists it
KEYS_PER_DAY_MAX = 100_000  # done, of a project
ANSWER_MAX_BYTES = 256 * 1024
PROJECT_BYTES_PER_DAY_MAX = 64 * 1024 * 1024
ALL_BYTES_PER_DAY_MAX = 256 * 1024 * 1024
FULL = b"full"

# KEYS: once, onces. ARGV: request, fingerprint, replica, seconds, keys at most, grace ms. Answers '' when it is ours,
# 'full', or what is there.
TAKE = script("""
local time = redis.call('TIME')
local offset_us = tonumber(redis.call('GET', '{tg}:offset_us') or '0') -- only tests set it
local now = time[1] * 1000 + math.floor((time[2] + offset_us) / 1000)
local was = redis.call('GET', KEYS[1])
if was then
  local state, id, body, since, replica = string.match(was, '^(%a)|(%x+)|(%x+)|(%d+)|(.*)$')
  local lost = state == 'r' and body == ARGV[2] and now - tonumber(since) > tonumber(ARGV[6])
    and redis.call('HEXISTS', '{tg}:lease:' .. replica, id) == 0
  if not lost then return was end
elseif tonumber(redis.call('GET', KEYS[2]) or '0') >= tonumber(ARGV[5]) then
  return 'full'
end
local text = 'r|' .. ARGV[1] .. '|' .. ARGV[2] .. '|' .. string.format('%.0f', now) .. '|' .. ARGV[3]
redis.call('SET', KEYS[1], text, 'EX', ARGV[4])
return ''
""")

# KEYS: once, onces. ARGV: request, fingerprint, seconds, seconds of the count, '1' when it is done, else it is freed.
FINISH = script("""
local was = redis.call('GET', KEYS[1])
if was and string.sub(was, 3, 34) ~= ARGV[1] then return 0 end
if ARGV[5] ~= '1' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], 'd|' .. ARGV[1] .. '|' .. ARGV[2] .. '|0|', 'EX', ARGV[3])
redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
""")

# KEYS: once. ARGV: request, its id from now on.
RENAME = script("""
local was = redis.call('GET', KEYS[1])
if not was or string.sub(was, 3, 34) ~= ARGV[1] then return 0 end
local time = redis.call('TIME')
local offset_us = tonumber(redis.call('GET', '{tg}:offset_us') or '0')
local now = time[1] * 1000 + math.floor((time[2] + offset_us) / 1000)
local body, replica = string.match(was, '^r|%x+|(%x+)|%d+|(.*)$')
if not body then return 0 end
local text = 'r|' .. ARGV[2] .. '|' .. body .. '|' .. string.format('%.0f', now) .. '|' .. replica
redis.call('SET', KEYS[1], text, 'KEEPTTL')
return 1
""")

# KEYS: kept, keeps of the project, keeps of all. ARGV: sealed answer, seconds, seconds of the sums, most bytes of each.
KEEP = script("""
local size = #ARGV[1]
for i = 1, 2 do
  if tonumber(redis.call('GET', KEYS[i + 1]) or '0') + size > tonumber(ARGV[i + 3]) then return 0 end
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
for i = 2, 3 do
  redis.call('INCRBY', KEYS[i], size)
  redis.call('EXPIRE', KEYS[i], ARGV[3])
end
return 1
""")


class Holder(msgspec.Struct, frozen=True):
    """Which request has a key."""

    running: bool
    request_id: str  # hex
    fingerprint: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a caller got: the whole body, or all events of a stream; `cost` is a header line."""

    stream: bool
    body: bytes
    cost: bytes = b""


class Claim(msgspec.Struct):
    """One request's hold of a key. `answered` once it ended well: then its answer may be kept.

    `bill` goes with the usage event: 16 bytes of key and body, of which the poster bills one.
    """

    digest: bytes
    request_id: str
    fingerprint: str
    tenant_id: UUID
    project_id: UUID
    day: str
    bill: bytes = b""
    answered: bool = False


class Claims:
    """Takes, finishes and reads. Two calls of one key go through one connection, so in their order."""

    def __init__(
        self,
        client: RespClient,
        replica: str,
        sealing: bytes,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._client = client
        self._replica = replica
        self._sealing = sealing
        self._random = random_bytes

    async def take(self, claim: Claim) -> Holder | None:
        """Take the key; returns who has it, or None when it is ours now.

        Raises:
            RespUnavailable, RespError: nobody knows.
            KeysExhausted: the project has used too many today.
        """
        keys = keyspace.once(claim.digest), keyspace.onces(claim.project_id, claim.day)
        values = (claim.request_id, claim.fingerprint, self._replica, DAY_S, KEYS_PER_DAY_MAX, GRACE_MS)
        was: bytes = await self._client.eval(TAKE, keys, values)
        if not was:
            return None
        if was == FULL:
            raise KeysExhausted
        state, request_id, fingerprint, *_ = was.decode().split("|", 4)
        return Holder(state == "r", request_id, fingerprint)

    def finish(self, claim: Claim, *, done: bool) -> None:
        """Say that the request is done, or free its key. Not waited for: what is lost costs us, and no caller."""
        keys = keyspace.once(claim.digest), keyspace.onces(claim.project_id, claim.day)
        values = (claim.request_id, claim.fingerprint, DAY_S, COUNTED_FOR_S, "1" if done else "0")
        self._client.call("EVAL", FINISH.text, len(keys), *keys, *values)

    def rename(self, claim: Claim, request_id: str) -> None:
        """The key's request goes on under another id (hex), which the admission will list."""
        before, claim.request_id = claim.request_id, request_id
        self._client.call("EVAL", RENAME.text, 1, keyspace.once(claim.digest), before, request_id)

    def keep(self, claim: Claim, answer: Answer) -> None:
        """Keep the answer for a day, within the bounds."""
        plain = msgspec.msgpack.encode(answer)
        sealed = seal(
            self._key(claim), plain, context=_context(claim, claim.request_id), nonce=self._random(NONCE_BYTES)
        )
        day = claim.day
        keys = keyspace.kept(claim.digest), keyspace.keeps(day, claim.project_id), keyspace.keeps(day)
        values = (sealed, DAY_S, COUNTED_FOR_S, PROJECT_BYTES_PER_DAY_MAX, ALL_BYTES_PER_DAY_MAX)
        self._client.call("EVAL", KEEP.text, len(keys), *keys, *values)

    async def kept(self, claim: Claim, holder: Holder) -> Answer | None:
        """Return the answer that the holder of the key got, when it was kept.

        Raises:
            RespUnavailable, RespError: nobody knows.
        """
        sealed: bytes | None = await self._client.call("GET", keyspace.kept(claim.digest))
        if sealed is None:
            return None
        try:
            plain = unseal(self._key(claim), sealed, context=_context(claim, holder.request_id))
        except PlatformError:  # of an earlier holder, or of another sealing secret
            return None
        return msgspec.msgpack.decode(plain, type=Answer)

    def _key(self, claim: Claim) -> bytes:
        """The sealing key of one project, from the installation's."""
        owner = claim.tenant_id.bytes + claim.project_id.bytes
        return hashlib.blake2b(owner, digest_size=32, key=self._sealing, person=b"tg-kept-answers").digest()


class KeysExhausted(Exception):  # noqa: N818 - named as the caller speaks of it
    """The project has used as many keys today as it may."""


def day_of(now: datetime) -> str:
    """Return the UTC day by which keys and bytes are counted."""
    return now.date().isoformat()


def _context(claim: Claim, request_id: str) -> bytes:
    return claim.digest + bytes.fromhex(request_id)

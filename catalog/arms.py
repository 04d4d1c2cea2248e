"""Which version serves a conversation of a tenant during a rollout. Pure."""

from hashlib import blake2b
from uuid import UUID

from catalog.rollout_types import PARTS, Arms


def point(seed: bytes, tenant_id: UUID, conversation: bytes) -> int:
    """Return a number below `PARTS` that is always the same for a conversation, and that nobody outside can foresee.

    The seed is a rollout's own, so that another rollout begins with other conversations.
    """
    digest = blake2b(tenant_id.bytes + conversation, key=seed, digest_size=8).digest()
    return int.from_bytes(digest) % PARTS


def takes_canary(arms: Arms, tenant_id: UUID, conversation: bytes) -> bool:
    """Say whether the new version serves it. Who is served by it at some weight is so at every larger one."""
    return arms.parts > 0 and point(arms.seed, tenant_id, conversation) < arms.parts

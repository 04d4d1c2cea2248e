"""Idempotency keys of inference against a small model, on a real Valkey: whatever runs, ends, dies or is lost."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from api.inference.claims import GRACE_MS, Claim, Claims, Holder
from core import keyspace
from core.resp import RespClient

TENANT, PROJECT = UUID(int=1), UUID(int=2)
REPLICAS = ("g1", "g2")
BODIES = ("aa" * 16, "bb" * 16)
DIGESTS = (b"x" * 16, b"y" * 16)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(DIGESTS), st.sampled_from(REPLICAS), st.sampled_from(BODIES)),
        st.tuples(st.just("done"), st.integers(0, 30)),
        st.tuples(st.just("free"), st.integers(0, 30)),
        st.tuples(st.just("die"), st.sampled_from(REPLICAS)),
        st.tuples(st.just("flush")),
    ),
    min_size=1,
    max_size=25,
)


@dataclass
class Run:
    """A request that holds, or held, a key."""

    claim: Claim
    replica: str
    dead: bool = False


@dataclass
class Site:
    """Two replicas with one Valkey, and who has each key, as it should be."""

    client: RespClient
    claims: dict[str, Claims]
    runs: list[Run] = field(default_factory=list)  # that did not end
    running: dict[bytes, Run] = field(default_factory=dict)
    done: dict[bytes, Claim] = field(default_factory=dict)

    def expected(self, claim: Claim) -> Holder | None:
        """Who has the key: nobody, when it is free or its holder died and the body is the same."""
        if (used := self.done.get(claim.digest)) is not None:
            return Holder(False, used.request_id, used.fingerprint)
        held = self.running.get(claim.digest)
        if held is None or (held.dead and held.claim.fingerprint == claim.fingerprint):
            return None
        return Holder(True, held.claim.request_id, held.claim.fingerprint)

    async def take(self, number: int, digest: bytes, replica: str, body: str) -> None:
        claim = Claim(digest, f"{number:032x}", body, TENANT, PROJECT, "2026-12-01")
        expected = self.expected(claim)
        assert await self.claims[replica].take(claim) == expected
        if expected is None:
            await self.client.call("HSET", keyspace.lease(replica), claim.request_id, "held")
            self.running[digest] = Run(claim, replica)
            self.runs.append(self.running[digest])

    async def end(self, which: int, *, done: bool) -> None:
        """A request says how it ended: heard unless another one has the key by now."""
        run = self.runs[which % len(self.runs)]
        if run.dead:
            return
        self.runs.remove(run)
        self.claims[run.replica].finish(run.claim, done=done)
        await self.client.call("HDEL", keyspace.lease(run.replica), run.claim.request_id)
        digest = run.claim.digest
        if digest not in self.done and self.running.get(digest, run) is run:
            self.running.pop(digest, None)
            if done:
                self.done[digest] = run.claim

    async def die(self, replica: str) -> None:
        await self.client.call("DEL", keyspace.lease(replica))
        await self.client.call("INCRBY", "{tg}:offset_us", (GRACE_MS + 1) * 1000)
        for run in self.runs:
            run.dead |= run.replica == replica

    async def flush(self) -> None:
        await self.client.call("FLUSHALL")
        self.running.clear()
        self.done.clear()
        for run in self.runs:  # as replicas register what runs
            if not run.dead:
                await self.client.call("HSET", keyspace.lease(run.replica), run.claim.request_id, "held")


async def play(valkey: Path, plan: list[tuple[object, ...]]) -> None:
    client = await RespClient.connect(f"unix://{valkey}")
    try:
        await client.call("FLUSHALL")
        site = Site(client, {name: Claims(client, name, bytes(32)) for name in REPLICAS})
        for number, step in enumerate(plan, 1):
            match step:
                case ("take", bytes(digest), str(replica), str(body)):
                    await site.take(number, digest, replica, body)
                case ("done" | "free" as how, int(which)) if site.runs:
                    await site.end(which, done=how == "done")
                case ("die", str(replica)):
                    await site.die(replica)
                case ("flush",):
                    await site.flush()
    finally:
        await client.close()


@given(plan=steps)
@settings(max_examples=60, deadline=None)
def test_one_request_of_a_key_runs_and_a_used_one_stays_used(
    valkey_socket: Path, plan: list[tuple[object, ...]]
) -> None:
    """P11, of what Valkey knows: it answers as the model does, step by step."""
    with asyncio.Runner() as runner:
        runner.run(play(valkey_socket, plan))

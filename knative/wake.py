"""What gateways see of deployments, and how they wake one.

State arrives by a message and, should that be lost, by reading `{tg}:state` every quarter of a second. A wake is a key
that expires (``SET NX PX``) and then a message; the controller looks for both. However many callers wait in however
many gateways, one key stands for all of them.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec

from core import keyspace
from core.errors import ErrorKind, PlatformError
from core.resp import RespClient, RespError, RespUnavailable
from knative.types import WAKE_MS, DeploymentState, ReplicaState

POLL_S = 0.25
WAKE_AGAIN_S = 1.0
FORGET_S = 10.0  # a state that Valkey no longer has is kept so long: after a loss the controller publishes it anew
FIRST_KEPT_MS = 10_000
OPENING_S = 10.0  # after it became ready callers are let go step by step (scheduler.held), in this time all of them
READY = frozenset({ReplicaState.READY, ReplicaState.IDLE})
_DECODER = msgspec.json.Decoder(DeploymentState)


class StateFeed:
    """The states of all deployments in this process; `start` before use, `close` at the end."""

    def __init__(self, client: RespClient, *, poll_s: float = POLL_S) -> None:
        self._client = client
        self._poll_s = poll_s
        self._states: dict[str, DeploymentState] = {}
        self._raw: dict[str, bytes] = {}
        self._gone: dict[str, float] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._waiting: dict[UUID, int] = {}
        self.opening: dict[UUID, float] = {}  # deployments that became ready a moment ago: until when
        self._first_noted: dict[UUID, int] = {}
        self._woken_at: dict[UUID, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._nudge = asyncio.Event()

    async def start(self) -> None:
        """Read every state once, then follow."""
        await self._client.subscribe([keyspace.STATE_CHANNEL], self._on_message, self._nudge.set)
        await self._read_all()
        self._spawn(self._follow())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def current(self, deployment_id: UUID) -> DeploymentState | None:
        """Return the last state seen, at most a quarter of a second old while Valkey answers."""
        return self._states.get(deployment_id.hex)

    def known(self) -> list[DeploymentState]:
        """Return all states last seen."""
        return list(self._states.values())

    def restore(self, states: Iterable[DeploymentState]) -> None:
        """Go by states of a former life until there is news of them; what is known already stays."""
        for state in states:
            self._states.setdefault(state.deployment, state)

    def request_wake(self, deployment_id: UUID) -> None:
        """Ask the controller for a ready engine, at most once a second from this process. Returns at once."""
        now = asyncio.get_running_loop().time()
        if now - self._woken_at.get(deployment_id, -WAKE_AGAIN_S) >= WAKE_AGAIN_S:
            self._woken_at[deployment_id] = now
            self._spawn(self._send_wake(deployment_id))

    def note_first_token(self, deployment_id: UUID, ready_us: int, first_token_ms: int) -> None:
        """Say how long the first answer after a wake took; the first word of all gateways counts. Not waited for."""
        if self._first_noted.get(deployment_id) != ready_us:
            self._first_noted[deployment_id] = ready_us
            self._spawn(self._say_first(deployment_id, f"{ready_us} {first_token_ms}"))

    async def _say_first(self, deployment_id: UUID, said: str) -> None:
        with suppress(RespError, RespUnavailable):
            await self._client.call("SET", keyspace.first(deployment_id), said, "NX", "PX", FIRST_KEPT_MS)

    async def wait_ready(self, deployment_id: UUID, timeout_s: float) -> DeploymentState:
        """Wake the deployment if need be and return its state once an engine is ready.

        Raises:
            PlatformError: ``MODEL_LOADING`` (unavailable, with `retry_after_s`) when it takes longer than `timeout_s`;
                ``UPSTREAM_ERROR`` (upstream) when its engine failed again while this caller waited, or still has not
                come back from a failure.
        """
        state = self.current(deployment_id)
        if state is not None and state.state in READY:
            return state
        failed_epoch = state.epoch if state is not None and state.state is ReplicaState.FAILED else None
        self._waiting[deployment_id] = self._waiting.get(deployment_id, 0) + 1
        try:
            async with asyncio.timeout(timeout_s):
                return await self._until_ready(deployment_id, failed_epoch)
        except TimeoutError:
            raise _not_ready(self.current(deployment_id)) from None
        finally:
            self._waiting[deployment_id] -= 1
            if not self._waiting[deployment_id]:
                del self._waiting[deployment_id]

    async def _until_ready(self, deployment_id: UUID, failed_epoch: int | None) -> DeploymentState:
        while True:
            state = self.current(deployment_id)
            if state is not None and state.state in READY:
                return state
            if state is not None and state.state is ReplicaState.FAILED and state.epoch != failed_epoch:
                raise _not_ready(state)
            self.request_wake(deployment_id)
            await self._changed.setdefault(deployment_id.hex, asyncio.Event()).wait()

    async def _send_wake(self, deployment_id: UUID) -> None:
        try:
            if await self._client.call("SET", keyspace.wake(deployment_id), 1, "NX", "PX", WAKE_MS) is not None:
                await self._client.call("PUBLISH", keyspace.WAKE_CHANNEL, deployment_id.hex)
        except (RespError, RespUnavailable):
            self._woken_at.pop(deployment_id, None)  # those who wait ask again at the next poll

    async def _follow(self) -> None:
        """Poll for ever; renew the wishes of those who wait."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._nudge.wait()
            except TimeoutError:
                pass
            self._nudge.clear()
            await self._read_all()
            for deployment_id in list(self._waiting):
                state = self.current(deployment_id)
                if state is None or state.state not in READY:
                    self.request_wake(deployment_id)

    def _on_message(self, _: bytes, payload: bytes) -> None:
        self._spawn(self._read_one(payload.decode("ascii", "replace")))

    async def _read_one(self, deployment: str) -> None:
        try:
            raw = await self._client.call("HGET", keyspace.STATE, deployment)
        except (RespError, RespUnavailable):
            return
        if raw is not None:
            self._take(deployment, raw)

    async def _read_all(self) -> None:
        try:
            flat = await self._client.call("HGETALL", keyspace.STATE)
        except (RespError, RespUnavailable):
            return
        seen = dict(zip(flat[::2], flat[1::2], strict=True))
        for field, raw in seen.items():
            self._take(field.decode(), raw)
        now = asyncio.get_running_loop().time()
        self._forget(now, {field.decode() for field in seen})
        for opened in [deployment_id for deployment_id, until in self.opening.items() if now >= until]:
            del self.opening[opened]

    def _take(self, deployment: str, raw: bytes) -> None:
        """Keep a state, and tell those who wait. No order to check: one connection, and the writer is fenced."""
        self._gone.pop(deployment, None)
        if self._raw.get(deployment) == raw:
            return
        try:
            state = _DECODER.decode(raw)
        except msgspec.MsgspecError:
            return
        before = self._states.get(deployment)
        if before is not None and before.state not in READY and state.state in READY:
            self.opening[UUID(hex=deployment)] = asyncio.get_running_loop().time() + OPENING_S
        self._raw[deployment] = raw
        self._states[deployment] = state
        if (changed := self._changed.pop(deployment, None)) is not None:
            changed.set()

    def _forget(self, now: float, seen: set[str]) -> None:
        for deployment in set(self._states) - seen:
            if now - self._gone.setdefault(deployment, now) >= FORGET_S:
                self._states.pop(deployment, None)
                self._raw.pop(deployment, None)
                self._gone.pop(deployment, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _not_ready(state: DeploymentState | None) -> PlatformError:
    """Return what a caller is told who waited in vain. The reason of a failure is for operators."""
    eta_s = state.eta_s if state is not None else 0
    if state is not None and state.state is ReplicaState.FAILED:
        return PlatformError(
            "UPSTREAM_ERROR",
            ErrorKind.UPSTREAM,
            "The model's engine does not start. Its operators can see why; try again later.",
            retry_after_s=max(eta_s, 5),
        )
    wait = max(eta_s, 1)
    return PlatformError(
        "MODEL_LOADING",
        ErrorKind.UNAVAILABLE,
        f"The model is being loaded; it should be ready in about {wait} s.",
        retry_after_s=wait,
        fields={"estimate_s": wait},
    )

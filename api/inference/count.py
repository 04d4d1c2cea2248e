"""Counts a prompt with the engine's own tokenizer, for the rare bill that has no usage report. Off the hot path."""

import asyncio
from typing import Any

import msgspec

from api.inference.gateway import Gateway
from api.inference.job import Job
from api.inference.relay import Relay
from api.inference.stream import PATHS
from catalog.types import DeploymentKind, EngineKind
from engine.client import Target
from knative.types import DeploymentState

PATIENCE_S = 2.0
TOKENS_MAX = 10**8

_decode = msgspec.json.Decoder().decode


async def count_prompt(gateway: Gateway, job: Job) -> int | None:
    """Return the tokens of the prompt as its engine counts them; None when the engine cannot say in time."""
    model = job.offer.model
    target = _target(gateway, job)
    if target is None or model.engine is EngineKind.OPENAI:
        return None  # a plain OpenAI-compatible server has no tokenizer to ask
    try:
        async with asyncio.timeout(PATIENCE_S):
            if model.engine is EngineKind.LLAMA_CPP:
                return await _count_llama(gateway, job, target)
            found = await _ask(gateway, job, target, PATHS["tokenize"], _prompt(job))
            return _whole(found.get("count"))
    except (TimeoutError, ValueError, msgspec.MsgspecError):
        return None


async def _count_llama(gateway: Gateway, job: Job, target: Target) -> int | None:
    """llama.cpp renders the chat template and counts text in two calls."""
    body = _prompt(job)
    text = body.get("prompt")
    if "messages" in body:
        text = (await _ask(gateway, job, target, "/apply-template", body)).get("prompt")
    if type(text) is not str:
        return None
    asked = {"content": text, "add_special": True, "parse_special": True}
    tokens = (await _ask(gateway, job, target, PATHS["tokenize"], asked)).get("tokens")
    return len(tokens) if type(tokens) is list else None


def _prompt(job: Job) -> dict[str, Any]:
    members = _decode(job.call.body + b"}")
    kept = {name: members[name] for name in ("messages", "prompt", "tools") if members.get(name)}
    return {"model": job.offer.model.upstream_model, **kept}


async def _ask(gateway: Gateway, job: Job, target: Target, path: str, body: dict[str, Any]) -> dict[str, Any]:
    relay = Relay(gateway.loop.create_future(), gateway.clock.monotonic)
    relay.call = gateway.upstream.send(
        target,
        path,
        msgspec.json.encode(body),
        relay,
        request_id=job.public_id,
        credential=gateway.directory.credentials.get(job.offer.model.deployment_id, ""),
    )
    try:
        await relay.done
    except BaseException:
        relay.abort()
        raise
    if relay.failure is not None or relay.status != 200:
        raise ValueError("no count")
    found = _decode(b"".join(relay.body))
    if type(found) is not dict:
        raise ValueError("no count")
    return found


def _target(gateway: Gateway, job: Job) -> Target | None:
    model = job.offer.model
    if model.kind is DeploymentKind.EXTERNAL:
        return gateway.pool.target(model.base_url)
    state: DeploymentState | None = gateway.states.current(model.deployment_id)
    return gateway.pool.target(state.endpoints[0].url) if state is not None and state.endpoints else None


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None

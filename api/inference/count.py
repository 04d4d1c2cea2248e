"""Counts a prompt with the engine's own tokenizer, for the rare bill that has no usage report. Off the hot path."""

import asyncio
from typing import Any

import msgspec

from api.inference.gateway import Gateway
from api.inference.job import Job
from api.inference.relay import Relay
from catalog.types import DeploymentKind, EngineKind
from engine.client import Failure, Target
from knative.types import DeploymentState

PATIENCE_S = 2.0
TOKENIZE = "/tokenize"
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
                return len(await llama_tokens(gateway, job, target))
            found = await _ask(gateway, job, target, TOKENIZE, _prompt(job))
            return _whole(found.get("count"))
    except (TimeoutError, ValueError, msgspec.MsgspecError):
        return None


class Refused(ValueError):  # noqa: N818 - it says what the engine did
    """The engine gave no count; `relay` holds its answer, when there was one."""

    def __init__(self, relay: Relay | None = None) -> None:
        super().__init__("no count")
        self.relay = relay


async def llama_tokens(gateway: Gateway, job: Job, target: Target) -> list[Any]:
    """Return the prompt's tokens by llama.cpp, which renders the chat template and cuts text in two calls.

    Raises:
        Refused: it gave none.
    """
    body = _prompt(job)
    text = body.get("prompt")
    if "messages" in body:
        text = (await _ask(gateway, job, target, "/apply-template", body)).get("prompt")
    if type(text) is not str:
        raise Refused
    asked = {"content": text, "add_special": True, "parse_special": True}
    tokens = (await _ask(gateway, job, target, TOKENIZE, asked)).get("tokens")
    if type(tokens) is not list:
        raise Refused
    return tokens


async def tokenize_llama(gateway: Gateway, job: Job, target: Target) -> Relay:
    """Answer /tokenize for llama.cpp in the shape of vLLM; the relay returned is as if the engine had said it."""
    relay = Relay(gateway.loop.create_future(), gateway.clock.monotonic)
    try:
        async with asyncio.timeout(PATIENCE_S):
            tokens = await llama_tokens(gateway, job, target)
    except Refused as refused:
        if refused.relay is not None:
            return refused.relay
        relay.on_end(Failure.PROTOCOL)
    except (TimeoutError, ValueError, msgspec.MsgspecError):
        relay.on_end(Failure.PROTOCOL)
    else:
        relay.on_head(200, b"application/json", b"")
        facts = {"count": len(tokens), "max_model_len": job.offer.model.context_max, "tokens": tokens}
        relay.on_data(msgspec.json.encode(facts))
        relay.on_end(None)
    return relay


def _prompt(job: Job) -> dict[str, Any]:
    members = _decode(job.call.body)
    kept = {name: members[name] for name in ("messages", "prompt", "tools") if members.get(name)}
    return {"model": job.offer.model.upstream_model, **kept}


async def _ask(gateway: Gateway, job: Job, target: Target, path: str, body: dict[str, Any]) -> dict[str, Any]:
    relay = Relay(gateway.loop.create_future(), gateway.clock.monotonic)
    relay.call = gateway.upstream.send(
        target,
        path,
        (msgspec.json.encode(body),),
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
        raise Refused(relay)
    found = _decode(b"".join(relay.body))
    if type(found) is not dict:
        raise Refused
    return found


def _target(gateway: Gateway, job: Job) -> Target | None:
    model = job.offer.model
    if model.kind is DeploymentKind.EXTERNAL:
        return gateway.pool.target(model.base_url)
    state: DeploymentState | None = gateway.states.current(model.deployment_id)
    return gateway.pool.target(state.endpoints[0].url) if state is not None and state.endpoints else None


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None

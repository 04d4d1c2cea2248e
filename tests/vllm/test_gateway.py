"""The same engine behind the gateway: the contract holds, tiers and tenants reach vLLM, and the bill is the usage."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from psycopg import sql

from billing import receipts
from billing.types import Meter, Outcome
from cli.embedded.postgres import free_port
from core import db
from core.ids import IdKind, parse_id
from core.settings import Settings
from tests.conftest import PostgresService
from tests.contract import engine_contract as contract
from tests.vllm.calls import cached_tokens, chat, prompt, stream, until
from tests.vllm.conftest import BLOCK_TOKENS, MODEL, SEATS, VLLM, Vllm
from tests.vllm.platform_under_test import PICO, PRICES, Platform, running

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
NO_END = {"logit_bias": {"2": -100}}  # the token that ends a turn never comes: answers run to max_tokens
THROUGH_THE_GATEWAY = [
    check for check in contract.CHECKS if check not in {contract.check_abort, contract.check_embeddings}
]
POSTED_WITHIN_S = 10.0


@pytest.fixture(scope="session")
def settings(postgres: PostgresService, valkey_socket: Path, service_folder: Path) -> Settings:
    name = f"v_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE tidegate_template").format(sql.Identifier(name)))
    return Settings.load(
        home=service_folder / "home",
        secrets={key: secrets.token_hex(32) for key in ("pepper", "signing", "sealing")},
        database={"url": postgres.url("app", name), "owner_url": postgres.url("owner", name)},
        valkey={"url": f"unix://{valkey_socket}", "broker_url": f"redis+socket://{valkey_socket}?virtual_host=1"},
        gateway={"port": free_port()},
    )


@pytest.fixture(scope="session")
def platform(settings: Settings, vllm: Vllm) -> Iterator[Platform]:
    with running(settings, vllm.base_url) as platform:
        yield platform


def _client(platform: Platform, caller: int) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {platform.callers[caller].secret}"}
    return httpx.AsyncClient(base_url=platform.base_url, headers=headers, timeout=60.0)


@pytest.fixture
async def red(platform: Platform) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the gateway as the first tenant."""
    async with _client(platform, 0) as client:
        yield client


@pytest.fixture
async def blue(platform: Platform) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the gateway as the second tenant."""
    async with _client(platform, 1) as client:
        yield client


@pytest.fixture
async def sessions(settings: Settings) -> AsyncIterator[db.Sessions]:
    engine = db.create_engine(settings.database)
    yield db.create_sessions(engine)
    await engine.dispose()


def _generation(headers: Mapping[str, str]) -> UUID:
    return parse_id(IdKind.GENERATION, headers["x-request-id"])


async def _receipt(sessions: db.Sessions, tenant_id: UUID, generation_id: UUID) -> receipts.Receipt:
    """Return the receipt once the poster has posted it."""
    async with asyncio.timeout(POSTED_WITHIN_S):
        while True:
            async with db.transaction(sessions) as session:
                found = await receipts.receipt(session, tenant_id, generation_id)
            if found is not None:
                return found
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("check", THROUGH_THE_GATEWAY, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_engine_contract_holds_through_the_gateway(
    red: httpx.AsyncClient, check: Callable[[httpx.AsyncClient, contract.Dialect], Awaitable[None]]
) -> None:
    await check(red, VLLM)


async def test_two_tenants_do_not_share_cached_tokens(red: httpx.AsyncClient, blue: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": prompt("Hello?", lines=30, subject="swans"), "max_tokens": 1}
    assert cached_tokens(await chat(red, body)) == 0
    assert cached_tokens(await chat(blue, body)) == 0
    assert cached_tokens(await chat(red, body)) >= 2 * BLOCK_TOKENS
    assert cached_tokens(await chat(blue, body)) >= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("member", [{"cache_salt": "mine"}, {"priority": -100}, {"vllm_xargs": {"x": 1}}])
async def test_a_caller_cannot_set_what_is_ours(red: httpx.AsyncClient, member: dict[str, Any]) -> None:
    answer = await red.post("/v1/chat/completions", json={"model": MODEL, "messages": prompt("Hello?"), **member})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == next(iter(member))


async def test_tiers_reach_the_engine_as_priorities(red: httpx.AsyncClient, engine_client: httpx.AsyncClient) -> None:
    story = {"model": MODEL, "messages": prompt("Tell a story."), **NO_END}
    short = {"model": MODEL, "messages": prompt("Say hello."), "max_tokens": 2, **NO_END}
    ended: list[str] = []

    async def call(tier: str) -> None:
        await chat(red, short | {"service_tier": tier})
        ended.append(tier)

    seats = [asyncio.create_task(chat(red, story | {"max_tokens": n})) for n in (60, 120)]
    await until(engine_client, RUNNING, SEATS, within_s=10)
    late = []
    for position, tier in enumerate(("flex", "default", "priority"), 1):
        late.append(asyncio.create_task(call(tier)))
        await until(engine_client, WAITING, position, within_s=10)
    await asyncio.gather(*seats, *late)
    assert ended == ["priority", "default", "flex"]


async def test_the_bill_is_the_usage(red: httpx.AsyncClient, platform: Platform, sessions: db.Sessions) -> None:
    body = {"model": MODEL, "messages": prompt("Hello?", lines=30, subject="geese"), "max_tokens": 5, **NO_END}
    await chat(red, body)
    answer = await red.post("/v1/chat/completions", json=body)
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 2 * BLOCK_TOKENS
    assert usage["completion_tokens"] == 5
    uncached = usage["prompt_tokens"] - cached
    expected = uncached * PRICES[Meter.INPUT] + cached * PRICES[Meter.CACHED_INPUT] + 5 * PRICES[Meter.OUTPUT]
    receipt = await _receipt(sessions, platform.callers[0].tenant_id, _generation(answer.headers))
    assert Decimal(receipt.amount) * PICO == expected
    quantities = {line.meter: line.quantity for line in receipt.lines}
    assert quantities == {Meter.INPUT: uncached, Meter.CACHED_INPUT: cached, Meter.OUTPUT: 5}
    assert receipt.outcome is Outcome.COMPLETED


async def test_a_caller_who_leaves_frees_the_seat_and_pays_for_what_was_generated(
    red: httpx.AsyncClient, engine_client: httpx.AsyncClient, platform: Platform, sessions: db.Sessions
) -> None:
    messages = prompt("Tell a very long story.")
    counted = await red.post("/tokenize", json={"model": MODEL, "messages": messages})
    body = {"model": MODEL, "messages": messages, "max_tokens": 2000, **NO_END}
    seen: dict[str, str] = {}
    async with aclosing(stream(red, body, seen)) as events:
        deltas = 0
        async for event in events:
            deltas += bool(event["choices"][0]["delta"].get("content"))
            if deltas == 20:
                break
        await until(engine_client, RUNNING, 1, within_s=5)
    await until(engine_client, RUNNING, 0, within_s=2)
    receipt = await _receipt(sessions, platform.callers[0].tenant_id, _generation(seen))
    assert receipt.outcome is Outcome.CLIENT_ABORT
    quantities = {line.meter: line.quantity for line in receipt.lines}
    assert quantities[Meter.INPUT] == counted.json()["count"]
    assert 20 <= quantities[Meter.OUTPUT] < 200
    paid = quantities[Meter.INPUT] * PRICES[Meter.INPUT] + quantities[Meter.OUTPUT] * PRICES[Meter.OUTPUT]
    assert Decimal(receipt.amount) * PICO == paid

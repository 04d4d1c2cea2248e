"""What callers are promised, of the whole platform: gateways, control plane, controller and poster as processes.

Prices, limits and engines differ from test to test; the platform is one, because a start costs seconds.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import redis
from sqlalchemy import text

from cli.embedded import valkey as vk
from core import db
from core.clock import SystemClock
from core.credit_figure import LAYOUT
from core.settings import Database
from engine import simulator
from engine.simulator import Options
from tests.conftest import PostgresService, fresh_database, settings_of
from tests.factories import fleet as fleets
from tests.factories import owners
from tests.factories.fleet import Customer, Fleet, Member
from tests.factories.gateway_process import METRICS_HEADERS, free_port
from tests.factories.stack import events_of
from tests.factories.tenants import operator
from tests.waiting import until

CHAT = "/v1/chat/completions"
ORIGIN = "https://app.example"
CHEAP = {"input": "2.00", "cached_input": "0.20", "output": "6.00"}
DEAR = {"input": "3.00", "cached_input": "0.30", "output": "15.00"}
STEPPED = {"input": "3.00", "output": "30", "input>3000": "30", "output>3000": "150", "min_charge": "0.001"}
YUAN = {"input": "14.50", "cached_input": "1.45", "output": "43.50"}
REPLICAS = 4
HASTY = REPLICAS  # one gateway more, which gives up on an engine after a second and lets a browser in
HERD = 300


@pytest.fixture(scope="module")
def module_database(postgres: PostgresService) -> Iterator[Database]:
    with fresh_database(postgres) as name:
        yield settings_of(postgres, name)


@pytest.fixture(scope="module")
def own_valkey(tmp_path_factory: pytest.TempPathFactory, service_folder: Path) -> Iterator[Path]:
    """One that no other test empties."""
    folder, address = tmp_path_factory.mktemp("valkey"), service_folder / "platform.sock"
    process = vk.start(folder, address)
    vk.wait_ready(folder, address, lambda: process.poll() is None)
    yield address
    vk.stop(process)


@pytest.fixture(scope="module")
async def fleet(module_database: Database, own_valkey: Path, service_folder: Path) -> AsyncIterator[Fleet]:
    folder = service_folder / "platform"
    folder.mkdir(mode=0o700)
    log = folder / "engine.jsonl"
    engine = await simulator.serve(Options(log=str(log)), SystemClock())
    shared = fleets.environment(folder, module_database, own_valkey)
    gateways = [fleets.gateway(number) for number in range(REPLICAS)]
    gateways.append(fleets.gateway(HASTY, request_timeout_s="1", cors_origins=json.dumps([ORIGIN])))
    others = [
        Member("api", "api.app"),
        Member("controller", "knative.controller"),
        Member("poster", "billing.poster"),
    ]
    pool = db.create_engine(module_database)
    _, token = await operator(db.create_sessions(pool))
    await pool.dispose()
    starting = fleets.running(folder, shared, [member for member, _ in gateways] + others)
    await asyncio.to_thread(starting.__enter__)
    try:
        found = Fleet(folder, [url for _, url in gateways], token, log)
        host, port = engine.addresses[0][:2]
        await furnish(found, f"http://{host}:{port}")
        yield found
        await found.operator.aclose()
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
        await engine.cleanup()


async def furnish(fleet: Fleet, engine: str) -> None:
    """Models with their prices. `exact`: 4.04 bytes a token, so that a body of 16,160 bytes is 4,000 tokens."""
    external = {"kind": "external", "base_url": engine}
    await fleet.add_model("sim", {"context_max": 32768}, **external)
    await fleet.add_model("exact", {"context_max": 32768, "bytes_per_token_milli": 4040}, **external)
    await fleet.add_model("stepped", {"context_max": 32768, "bytes_per_token_milli": 4040}, **external)
    await fleet.add_model("gone", {"context_max": 32768}, kind="external", base_url=f"http://127.0.0.1:{free_port()}")
    herd = {"log": str(fleet.folder / "cold.jsonl"), "load_ms": 1500}
    await fleet.add_model("cold", {"context_max": 32768}, kind="local", waiting_max=64, engine_args=herd)
    await fleet.add_model("slow", {"context_max": 32768}, kind="local", engine_args={"load_ms": 600_000})
    await fleet.publish({name: {"exact": DEAR, "stepped": STEPPED}.get(name, CHEAP) for name in fleet.models})
    await fleet.publish({"sim": YUAN}, "CNY")


@pytest.fixture(scope="module")
async def somebody(fleet: Fleet) -> Customer:
    """A customer for the tests that change nothing of theirs."""
    return await fleet.customer("1")


@pytest.fixture
async def gateways(fleet: Fleet) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client for each of the four, without a key."""
    limits = httpx.Limits(max_connections=200)
    clients = [httpx.AsyncClient(base_url=url, timeout=60, limits=limits) for url in fleet.urls[:REPLICAS]]
    yield clients
    for client in clients:
        await client.aclose()


def body(prompt: str, model: str = "sim", *, size: int = 0, **members: Any) -> bytes:
    """A chat request, with blanks at its end to be of that size."""
    text = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}], **members})
    assert len(text) <= size or not size
    return text.ljust(size).encode()


def figures(valkey: Path, customer: Customer) -> dict[str, int]:
    """The tenant's credit as admission sees it, in nano: available before what is outstanding, and that."""
    with redis.Redis(unix_socket_path=str(valkey)) as client:
        raw = client.get(f"{{tg}}:credit:{customer.tenant_hex}")
        entries = client.hvals(f"{{tg}}:out:{customer.tenant_hex}")
    assert isinstance(entries, list)
    available, _, outstanding = map(int, LAYOUT.unpack(cast("bytes", raw)))
    return {"a": available, "o": outstanding, "entries": sum(map(int, entries))}


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ---- money


async def test_the_receipt_of_the_worked_example(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    """12,345 prompt tokens of which 10,240 cached, 1,000 out of which 640 reasoning, at 2.00 / 0.20 / 6.00."""
    customer = await fleet.customer("10")
    for stream, gateway in zip((False, True), gateways, strict=False):
        prompt = "[[sim n=1000 p=12345 cached=10240 reasoning=640]]"
        answer = await gateway.post(
            CHAT, content=body(prompt, max_tokens=2000, stream=stream), headers=customer.headers
        )
        assert answer.status_code == 200
        receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
        assert receipt["amount"] == "0.012258000000"
        assert (receipt["outcome"], receipt["model"], receipt["stream"]) == ("completed", "sim", stream)
        assert [(line["meter"], line["quantity"], line["amount"]) for line in receipt["lines"]] == [
            ("input", 2105, "0.004210000000"),
            ("cached_input", 10240, "0.002048000000"),
            ("output", 360, "0.002160000000"),
            ("reasoning", 640, "0.003840000000"),
        ]
    assert await fleet.available(customer) == "9.975484000000"


async def test_credit_for_ten_holds_admits_exactly_ten_of_a_hundred(
    fleet: Fleet, gateways: list[httpx.AsyncClient], own_valkey: Path
) -> None:
    """Each call costs all of its hold, 100 in at 3.00 and 20 out at 15.00 are 0.0006, so that none frees credit."""
    customer = await fleet.customer("0.006")
    content = body("[[sim n=20 p=100 d=2000]]", "exact", size=404, max_tokens=20)
    turns = cycle(gateways)
    lowest = 6_000_000

    async def call(gateway: httpx.AsyncClient) -> httpx.Response:
        nonlocal lowest
        answer = await gateway.post(CHAT, content=content, headers=customer.headers)
        seen = figures(own_valkey, customer)
        lowest = min(lowest, seen["a"] - seen["o"])
        return answer

    answers = await asyncio.gather(*(call(next(turns)) for _ in range(100)))
    admitted = [answer for answer in answers if answer.status_code == 200]
    assert len(admitted) == 10
    assert {code_of(answer) for answer in answers if answer not in admitted} == {(402, "INSUFFICIENT_CREDIT")}
    assert {answer.headers["x-tidegate-cost"] for answer in admitted} == {"0.000600000000 USD"}
    for answer in admitted:
        assert (await fleet.receipt(customer, answer.headers["x-request-id"]))["amount"] == "0.000600000000"
    await until(lambda: figures(own_valkey, customer) == {"a": 0, "o": 0, "entries": 0})
    assert lowest == 0
    assert await fleet.available(customer) == "0.000000000000"


async def test_the_hold_is_priced_at_the_step_a_request_may_reach(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    """4,000 in at 30 and 200 out at 150 are 0.15; at the short prices of 3 and 30 it would be 0.018, and all pass.

    LiteLLM PR 40002: five requests worth 0.15 each at once, on a cap of 0.45.
    """
    customer = await fleet.customer("0.45")
    content = body("[[sim n=200 p=4000 d=2000]]", "stepped", size=16_160, max_tokens=200)
    calls = [gateway.post(CHAT, content=content, headers=customer.headers) for gateway in (*gateways, gateways[0])]
    answers = await asyncio.gather(*calls)
    admitted = [answer for answer in answers if answer.status_code == 200]
    assert len(admitted) == 3
    assert {code_of(answer) for answer in answers if answer not in admitted} == {(402, "INSUFFICIENT_CREDIT")}
    for answer in admitted:
        receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
        assert (receipt["amount"], receipt["above_input_tokens"]) == ("0.150000000000", 3000)
        assert [line["unit_price"] for line in receipt["lines"]] == ["30.000000", "150.000000"]
    assert await fleet.available(customer) == "0.000000000000"


async def test_a_call_costs_at_least_the_minimum(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    """3 in and 1 out are 0.000039; the minimum of 0.001 adds 0.000961, and the hold covers it."""
    customer = await fleet.customer("0.00101")
    content = body("[[sim n=1 p=3]]", "stepped", max_tokens=1)
    answer = await gateways[0].post(CHAT, content=content, headers=customer.headers)
    assert answer.headers["x-tidegate-cost"] == "0.001000000000 USD"
    receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
    assert [(line["meter"], line["amount"]) for line in receipt["lines"]] == [
        ("input", "0.000009000000"),
        ("output", "0.000030000000"),
        ("min_charge", "0.000961000000"),
    ]
    (row,) = (await gateways[0].get("/api/v1/usage", headers=customer.headers)).json()["rows"]
    assert (row["amount"], row["min_charge"]) == ("0.001000000000", "0.000961000000")
    assert await fleet.available(customer) == "0.000010000000"
    again = await gateways[1].post(CHAT, content=content, headers=customer.headers)
    assert code_of(again) == (402, "INSUFFICIENT_CREDIT")


async def test_a_tenant_billed_in_yuan_meets_prices_of_their_own(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    """2,105 in at 14.50, 10,240 cached at 1.45 and 1,000 out at 43.50 are CNY 0.0888705."""
    customer = await fleet.customer("1", currency="CNY")
    listed = {one["id"]: one for one in (await gateways[0].get("/v1/models", headers=customer.headers)).json()["data"]}
    prices = listed["sim"]["price_per_million_tokens"]
    assert (prices["currency"], prices["tiers"]["standard"]["input"]) == ("CNY", "14.500000000000")
    assert listed["exact"]["price_per_million_tokens"]["tiers"] == {}
    prompt = "[[sim n=1000 p=12345 cached=10240 reasoning=640]]"
    answer = await gateways[0].post(CHAT, content=body(prompt, max_tokens=1000), headers=customer.headers)
    assert answer.headers["x-tidegate-cost"] == "0.088870500000 CNY"
    receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
    assert (receipt["amount"], receipt["currency"]) == ("0.088870500000", "CNY")
    used = (await gateways[0].get("/api/v1/usage", headers=customer.headers)).json()
    assert (used["currency"], used["rows"][0]["amount"]) == ("CNY", receipt["amount"])
    assert await fleet.available(customer) == "0.911129500000"
    unpriced = await gateways[0].post(CHAT, content=body("x", "exact"), headers=customer.headers)
    assert code_of(unpriced) == (403, "TIER_NOT_PRICED")  # a list in dollars is no price in yuan


async def test_models_show_every_price_and_a_tier_without_one_is_not_served(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    customer = await fleet.customer("1", tier_max="priority")
    shown = (await gateways[0].get("/v1/models/stepped", headers=customer.headers)).json()["price_per_million_tokens"]
    ((tier, standard),) = shown["tiers"].items()
    assert (tier, standard["input"], standard["output"]) == ("standard", "3.000000000000", "30.000000000000")
    assert (standard["per_request"], standard["minimum_per_request"]) == ("0.000000000000", "0.001000000000")
    steps = [(step["above_input_tokens"], step["input"], step["output"]) for step in standard["steps"]]
    assert steps == [(3000, "30.000000000000", "150.000000000000")]
    for tier in ("priority", "flex"):
        content = body("x", "stepped", service_tier=tier)
        refused = await gateways[0].post(CHAT, content=content, headers=customer.headers)
        assert code_of(refused) == (403, "TIER_NOT_PRICED")


async def test_a_stream_cut_after_137_tokens(fleet: Fleet, gateways: list[httpx.AsyncClient], own_valkey: Path) -> None:
    """4,000 in at 3.00, out at 15.00, max_tokens 2,000: hold 0.042, billed 0.014055, released 0.027945."""
    customer = await fleet.customer("1")
    directive = "[[sim n=2000 fault=stall at=137]]"
    prompt = directive + "x" * ((4000 - 4) * 4 - len(directive))  # the engine counts 4,000
    content = body(prompt, "exact", size=16_160, stream=True, max_tokens=2000)
    seen = ""
    async with gateways[0].stream("POST", CHAT, content=content, headers=customer.headers) as answer:
        async for text in answer.aiter_text():
            seen += text
            if seen.count('"delta"') == 138:  # the first says who speaks
                break
        held = figures(own_valkey, customer)
    assert held == {"a": 1_000_000_000, "o": 42_000_000, "entries": 42_000_000}
    receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
    assert (receipt["outcome"], receipt["count_source"], receipt["amount"]) == (
        "client_abort",
        "gateway",
        "0.014055000000",
    )
    await until(lambda: figures(own_valkey, customer) == {"a": 985_945_000, "o": 0, "entries": 0})
    assert 42_000_000 - (held["a"] - figures(own_valkey, customer)["a"]) == 27_945_000
    assert await fleet.available(customer) == "0.985945000000"


async def test_a_client_that_closes_its_half_has_left(fleet: Fleet, somebody: Customer) -> None:
    """Decided so: who can send no more is gone, also while an answer streams; the engine stops, 3 tokens are billed."""
    host, port = fleet.urls[1].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = body("[[sim fault=stall at=3]]", "exact", stream=True)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {somebody.secret}\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    seen = b""
    while seen.count(b'"delta"') < 4:
        seen += await reader.read(65536)
    writer.write_eof()
    async with asyncio.timeout(5):
        while await reader.read(65536):
            pass
    writer.close()
    generation = re.search(rb"[Xx]-[Rr]equest-[Ii]d: (\S+)", seen)
    assert generation is not None
    receipt = await fleet.receipt(somebody, generation[1].decode())
    assert (receipt["outcome"], receipt["amount"]) == ("client_abort", "0.000075000000")  # 10 in and 3 out


async def test_an_engine_that_times_out_before_the_first_token_costs_nothing(fleet: Fleet, own_valkey: Path) -> None:
    customer = await fleet.customer("1")
    async with httpx.AsyncClient(base_url=fleet.urls[HASTY], headers=customer.headers, timeout=30) as client:
        for stream in (False, True):
            answer = await client.post(CHAT, content=body("[[sim t=60000000]]", stream=stream))
            assert code_of(answer) == (504, "UPSTREAM_TIMEOUT")
            receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
            assert (receipt["outcome"], receipt["amount"]) == ("timeout", "0.000000000000")
    await until(lambda: figures(own_valkey, customer) == {"a": 1_000_000_000, "o": 0, "entries": 0})
    assert await fleet.available(customer) == "1.000000000000"


@pytest.mark.parametrize("ids", ["null", "empty", "same"])
async def test_four_calls_are_four_receipts_whatever_the_engine_calls_them(
    fleet: Fleet, gateways: list[httpx.AsyncClient], ids: str
) -> None:
    customer = await fleet.customer("1")
    calls = [
        gateway.post(CHAT, content=body(f"[[sim ids={ids} n=5 p=10]]", stream=stream), headers=customer.headers)
        for gateway, stream in zip(gateways, (False, False, True, True), strict=True)
    ]
    generations = {answer.headers["x-request-id"] for answer in await asyncio.gather(*calls)}
    assert len(generations) == 4
    for generation in generations:
        assert (await fleet.receipt(customer, generation))["amount"] == "0.000050000000"
    assert await fleet.available(customer) == "0.999800000000"


@pytest.mark.parametrize("plan", ["usage=choice", "usage=middle done=0", "usage=every split=1", "usage=null split=3"])
async def test_usage_in_any_chunk_is_the_receipt_of_the_buffered_call(
    fleet: Fleet, gateways: list[httpx.AsyncClient], plan: str
) -> None:
    """Counts of LiteLLM 36168: 239 uncached at 2.00, 15,872 cached at 0.20, 2 out at 6.00 are 0.0036644."""
    customer = await fleet.customer("1")
    for stream in (False, True):
        content = body(f"[[sim n=2 p=16111 cached=15872 {plan}]]", stream=stream)
        answer = await gateways[0].post(CHAT, content=content, headers=customer.headers)
        receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
        assert (receipt["amount"], receipt["count_source"]) == ("0.003664400000", "engine")
        if stream:
            assert events_of(answer.text)[-1] == "[DONE]"


# ---- keys


async def test_a_revoked_key_is_refused_by_every_gateway_within_a_second(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    customer = await fleet.customer("1")
    path = f"/api/v1/admin/tenants/{customer.tenant_id}/keys/{customer.key_id}/revoke"
    began = time.monotonic()
    (await fleet.operator.post(path)).raise_for_status()
    async with asyncio.timeout(1):
        answers = await asyncio.gather(*(fleet.until_status(url, customer, 401) for url in fleet.urls))
    assert time.monotonic() - began < 1
    assert {code_of(answer) for answer in answers} == {(401, "KEY_REVOKED")}
    calls = [gateway.post(CHAT, content=body("x"), headers=customer.headers) for gateway in gateways]
    assert {code_of(answer) for answer in await asyncio.gather(*calls)} == {(401, "KEY_REVOKED")}


async def test_what_is_suspended_may_not_call_until_it_is_active_again(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    customer = await fleet.customer("1")
    tenant = f"/api/v1/admin/tenants/{customer.tenant_id}"
    for path, code in (
        (f"{tenant}/projects/{customer.project_id}", "PROJECT_SUSPENDED"),
        (tenant, "TENANT_SUSPENDED"),
    ):
        (await fleet.operator.patch(path, json={"status": "suspended"})).raise_for_status()
        async with asyncio.timeout(1):
            await asyncio.gather(*(fleet.until_status(url, customer, 403) for url in fleet.urls))
        calls = [gateway.post(CHAT, content=body("x"), headers=customer.headers) for gateway in gateways]
        assert {code_of(answer) for answer in await asyncio.gather(*calls)} == {(403, code)}
        (await fleet.operator.patch(path, json={"status": "active"})).raise_for_status()
        await asyncio.gather(*(fleet.until_status(url, customer, 200) for url in fleet.urls))


ENDINGS = {
    "revoked key": "KEY_REVOKED",
    "suspended key": "KEY_SUSPENDED",
    "person": "OWNER_SUSPENDED",
    "member": "OWNER_SUSPENDED",
    "service account": "OWNER_SUSPENDED",
    "project": "PROJECT_SUSPENDED",
    "tenant": "TENANT_SUSPENDED",
}


@pytest.fixture(scope="module")
async def platform_sessions(module_database: Database) -> AsyncIterator[db.Sessions]:
    """Of the application, and a schema whose `pg_notify` tells nobody."""
    assert module_database.owner_url is not None
    owner = db.create_engine(Database(url=module_database.owner_url))
    async with owner.begin() as connection:
        await connection.execute(text("CREATE SCHEMA IF NOT EXISTS muted"))
        body = "CREATE OR REPLACE FUNCTION muted.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT'"
        await connection.execute(text(body))
        await connection.execute(text("GRANT USAGE ON SCHEMA muted TO tidegate_app"))
    await owner.dispose()
    engine = db.create_engine(module_database)
    yield db.create_sessions(engine)
    await engine.dispose()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("what", ENDINGS)
async def test_every_gateway_refuses_within_a_second_also_when_the_notice_is_lost(
    fleet: Fleet, platform_sessions: db.Sessions, what: str, lost: bool
) -> None:
    """Without the notice only the look that every gateway takes each quarter of a second finds the change."""
    customer = await fleet.customer("0")
    owned = await owners.give(platform_sessions, customer, what)
    for url in fleet.urls[:REPLICAS]:
        await fleet.until_status(url, customer, 200)
    async with db.transaction(platform_sessions) as session:
        if lost:
            await session.execute(text("SET LOCAL search_path = muted, public, pg_catalog"))
        await owners.end(session, owned, what)
    status = 401 if what == "revoked key" else 403
    async with asyncio.timeout(1):
        answers = await asyncio.gather(*(fleet.until_status(url, customer, status) for url in fleet.urls[:REPLICAS]))
    assert {code_of(answer) for answer in answers} == {(status, ENDINGS[what])}


async def test_every_gateway_cuts_what_runs_when_it_is_told_to(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1")
    content = body("[[sim n=1000 fault=stall at=5]]", stream=True)
    calls = [asyncio.create_task(g.post(CHAT, content=content, headers=customer.headers)) for g in gateways]
    running = 0
    async with httpx.AsyncClient(headers=METRICS_HEADERS) as client:
        while running < REPLICAS:
            texts = [(await client.get(f"{url}/metrics")).text for url in fleet.urls[:REPLICAS]]
            running = sum(
                re.search(r"^tidegate_gateway_streams [1-9]", text, re.MULTILINE) is not None for text in texts
            )
    path = f"/api/v1/admin/tenants/{customer.tenant_id}/keys/{customer.key_id}/revoke"
    (await fleet.operator.post(path, json={"hard": True})).raise_for_status()
    async with asyncio.timeout(1):
        answers = await asyncio.gather(*calls)
    assert {events_of(answer.text)[-1]["error"]["code"] for answer in answers} == {"KEY_REVOKED"}


async def test_tokens_and_keys_cannot_do_each_others_work(
    fleet: Fleet, somebody: Customer, gateways: list[httpx.AsyncClient]
) -> None:
    token = {"Authorization": f"Bearer {fleet.operator_token}"}
    called = await gateways[0].post(CHAT, content=body("x"), headers=token)
    assert code_of(called) == (401, "INVALID_API_KEY")
    assert code_of(await gateways[0].get("/v1/models", headers=token)) == (401, "INVALID_API_KEY")
    assert (await gateways[0].get("/v1/generations/gen_" + "0" * 32, headers=token)).status_code == 403
    for path in ("/api/v1/admin/tenants", f"/api/v1/admin/tenants/{somebody.tenant_id}/balance"):
        assert (await gateways[0].get(path, headers=somebody.headers)).status_code == 403
    made = await gateways[0].post("/api/v1/admin/models", json={"name": "mine"}, headers=somebody.headers)
    assert made.status_code == 403


async def test_the_audit_trail_has_the_address_that_the_front_door_saw(fleet: Fleet) -> None:
    """Nobody's own word for it, since no proxy is trusted here."""
    forged = {"X-Forwarded-For": "203.0.113.9", "Forwarded": "for=203.0.113.9", "X-Real-Ip": "203.0.113.9"}
    customer = await fleet.customer("0")
    path = f"/api/v1/admin/tenants/{customer.tenant_id}"
    changed = await fleet.operator.patch(path, json={"tz": "Europe/Berlin"}, headers=forged)
    found = await fleet.operator.get("/api/v1/admin/audit", params={"tenant_id": customer.tenant_id, "limit": 1})
    [record] = found.json()["items"]
    assert record["details"] == {"tz": {"from": "UTC", "to": "Europe/Berlin"}}
    assert (record["client_ip"], record["request_id"]) == ("127.0.0.1", changed.headers["x-request-id"])


async def test_what_was_refused_is_known_and_can_be_tried_under_other_limits(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    """2 a minute for the key, 5 calls over four gateways: 3 are refused, and would have been served under 10."""
    customer = await fleet.customer("1")
    tenant = f"/api/v1/admin/tenants/{customer.tenant_id}"
    rule = {"metric": "requests_per_minute", "amount": 2, "reason": "a trial"}
    (await fleet.operator.put(f"{tenant}/keys/{customer.key_id}/limits", json=rule)).raise_for_status()
    shown = ""
    while shown != "2":  # until every gateway has it
        answers = [await one.post(CHAT, content=b"{}", headers=customer.headers) for one in gateways]
        shown = min(answer.headers.get("x-ratelimit-limit-requests", "-") for answer in answers)
    answers = [await gateways[n % REPLICAS].post(CHAT, content=body("x"), headers=customer.headers) for n in range(5)]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    found: list[dict[str, Any]] = []

    async def written() -> bool:
        found[:] = (await fleet.operator.get(f"{tenant}/refusals")).json()["items"]
        return sum(int(row["requests"]) for row in found) == 3

    await until(written)
    assert {(row["model"], row["code"], row["level"], row["metric"], row["mode"]) for row in found} == {
        ("sim", "RATE_LIMITED", "key", "requests_per_minute", "hard")
    }
    assert found[0]["sample_request_id"] in {answer.headers["x-request-id"] for answer in answers}

    async def tried(amount: int) -> tuple[int, int, int]:
        limit = {"level": "key", "key_id": customer.key_id, "metric": "requests_per_minute", "amount": amount}
        answer = await fleet.operator.post(f"{tenant}/limits/what-if", json={"limits": [limit]})
        total = answer.raise_for_status().json()["total"]
        return total["requests"], total["newly_served"], total["newly_refused"]

    async def posted() -> bool:
        return (await tried(10))[0] == 5

    await until(posted)
    assert [await tried(amount) for amount in (10, 3, 1)] == [(5, 3, 0), (5, 1, 0), (5, 0, 1)]


async def test_a_key_sees_the_models_it_may_use_and_no_others(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1", model_patterns=["si*", "slow"])
    gateway, headers = gateways[0], customer.headers
    listed = (await gateway.get("/v1/models", headers=headers)).json()
    assert [model["id"] for model in listed["data"]] == ["sim", "slow"]
    assert (await gateway.get("/v1/models/sim", headers=headers)).json()["id"] == "sim"
    missing = await gateway.post(CHAT, content=body("x", "nope"), headers=headers)
    assert code_of(missing) == (404, "MODEL_NOT_FOUND")
    assert missing.json()["error"]["details"] == {"models": ["sim", "slow"]}
    assert "sim, slow" in missing.json()["error"]["message"]
    for answer in (
        await gateway.post(CHAT, content=body("x", "exact"), headers=headers),
        await gateway.get("/v1/models/exact", headers=headers),
    ):
        assert code_of(answer) == (403, "MODEL_NOT_ALLOWED")


# ---- limits


async def test_every_answer_shows_the_limits_of_its_key(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1", limits={"requests_per_minute": 4})
    asked = [
        body("x"),
        body("x", stream=True),
        b'{"model":',
        body("x", "nope"),
        body("x", "gone"),
        body("x"),
        body("x"),
    ]
    found = []
    for content in asked:  # one gateway: it knows what it saw; all of them count alike
        answer = await gateways[0].post(CHAT, content=content, headers=customer.headers)
        assert answer.headers["x-request-id"].startswith("gen_")
        assert answer.headers["x-ratelimit-limit-requests"] == "4"
        assert 1 <= int(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 62
        found.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
    assert found == [(200, "3"), (200, "2"), (400, "2"), (404, "2"), (502, "1"), (200, "0"), (429, "0")]
    for gateway in gateways:
        refused = await gateway.post(CHAT, content=body("x"), headers=customer.headers)
        assert code_of(refused) == (429, "RATE_LIMITED")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.headers["retry-after"]) <= 62


async def test_a_key_made_without_limits_has_a_limit_to_show(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1")
    answer = await gateways[0].post(CHAT, content=body("x"), headers=customer.headers)
    limit = int(answer.headers["x-ratelimit-limit-requests"])
    assert limit >= 60_000
    assert answer.headers["x-ratelimit-remaining-requests"] == str(limit - 1)
    poor = await fleet.customer("0")
    refused = await gateways[0].post(CHAT, content=body("x"), headers=poor.headers)
    assert code_of(refused) == (402, "INSUFFICIENT_CREDIT")
    assert int(refused.headers["x-ratelimit-limit-requests"]) == limit


async def test_one_request_at_a_time(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1", limits={"concurrency": 1})
    slow = body("[[sim fault=stall at=3]]", stream=True)
    async with gateways[0].stream("POST", CHAT, content=slow, headers=customer.headers) as first:
        assert first.headers["x-ratelimit-remaining-concurrency"] == "0"
        second = await gateways[1].post(CHAT, content=body("x"), headers=customer.headers)
        assert code_of(second) == (429, "CONCURRENCY_LIMITED")
        assert second.headers["x-ratelimit-limit-concurrency"] == "1"
        assert second.headers["x-ratelimit-remaining-concurrency"] == "0"
        assert int(second.headers["retry-after"]) >= 1

    async def free_again() -> bool:
        return (await gateways[2].post(CHAT, content=body("x"), headers=customer.headers)).status_code == 200

    await until(free_again)


async def test_of_3000_a_minute_on_the_key_and_100_on_the_tenant_100_pass_over_four_gateways(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    customer = await fleet.customer("1", limits={"requests_per_minute": 3000, "tenant:requests_per_minute": 100})
    asked = (gateways[n % REPLICAS].post(CHAT, content=body("x"), headers=customer.headers) for n in range(160))
    answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [200] * 100 + [429] * 60
    for refused in (answer for answer in answers if answer.status_code == 429):
        assert code_of(refused) == (429, "RATE_LIMITED")
        details = {"level": "tenant", "metric": "requests_per_minute", "limit": 100, "model": ""}
        assert refused.json()["error"]["details"] == details
        assert 1 <= int(refused.headers["retry-after"]) <= 62


async def test_tokens_are_taken_as_estimated_and_kept_as_used(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    limits = {"input_tokens_per_minute": 50_000, "output_tokens_per_minute": 300}
    customer = await fleet.customer("1", limits=limits)
    left = []
    for gateway in gateways[:3]:
        content = body("[[sim n=7 p=20]]", max_tokens=100)
        answer = await gateway.post(CHAT, content=content, headers=customer.headers)
        assert answer.json()["usage"]["completion_tokens"] == 7
        assert answer.headers["x-ratelimit-limit-input-tokens"] == "50000"
        assert answer.headers["x-ratelimit-limit-tokens"] == answer.headers["x-ratelimit-limit-output-tokens"] == "300"
        assert answer.headers["x-ratelimit-remaining-tokens"] == answer.headers["x-ratelimit-remaining-output-tokens"]
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
    assert left == [300 - 100, 300 - 7 - 100, 300 - 14 - 100]
    refused = await gateways[3].post(CHAT, content=body("x", max_tokens=290), headers=customer.headers)
    assert code_of(refused) == (429, "TOKENS_LIMITED")
    assert refused.json()["error"]["details"]["metric"] == "output_tokens_per_minute"
    assert refused.headers["x-ratelimit-remaining-output-tokens"] == "0"
    assert int(refused.headers["retry-after"]) >= 1
    too_large = await gateways[0].post(CHAT, content=body("x", max_tokens=301), headers=customer.headers)
    assert code_of(too_large) == (429, "TOKENS_LIMITED")
    assert "max_tokens" in too_large.json()["error"]["message"]
    listed = await gateways[0].get("/v1/models", headers=customer.headers)
    assert (listed.status_code, listed.headers["x-ratelimit-limit-output-tokens"]) == (200, "300")
    embedded = {"model": "sim", "input": "no output at all"}
    assert (await gateways[0].post("/v1/embeddings", json=embedded, headers=customer.headers)).status_code == 200


async def test_of_three_slow_streams_under_a_limit_of_two_the_third_waits_for_an_end(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    customer = await fleet.customer("1", limits={"concurrency": 2})
    slow = body("[[sim fault=stall at=3]]", stream=True)
    first = gateways[0].stream("POST", CHAT, content=slow, headers=customer.headers)
    second = gateways[1].stream("POST", CHAT, content=slow, headers=customer.headers)
    async with first as one:
        async with second as two:
            assert (one.status_code, two.status_code) == (200, 200)
            for gateway in gateways:
                third = await gateway.post(CHAT, content=body("x"), headers=customer.headers)
                assert code_of(third) == (429, "CONCURRENCY_LIMITED")

        async def let_in() -> bool:
            return (await gateways[2].post(CHAT, content=body("x"), headers=customer.headers)).status_code == 200

        await until(let_in)  # the first one still runs


async def test_a_budget_holds_over_four_gateways_and_counts_what_was_charged(
    fleet: Fleet, gateways: list[httpx.AsyncClient]
) -> None:
    """20 input and 10 output tokens cost 100 millionths; ten such requests are all that a budget of 0.001 pays for."""
    customer = await fleet.customer("1", limits={"tenant:spend_per_month": "0.001"})
    content = body("[[sim n=10 p=20]]", max_tokens=10)
    served = 0
    for _ in range(30):
        asked = (gateway.post(CHAT, content=content, headers=customer.headers) for gateway in gateways)
        answers = await asyncio.gather(*asked)
        served += sum(answer.status_code == 200 for answer in answers)
        assert {answer.status_code for answer in answers} <= {200, 402}
        if all(answer.status_code == 402 for answer in answers):
            break
    assert code_of(answers[0]) == (402, "BUDGET_EXCEEDED")
    assert answers[0].json()["error"]["details"]["metric"] == "spend_per_month"
    assert 7 <= served <= 10  # the last ones are refused for the most that they may cost

    async def posted() -> bool:
        return await fleet.available(customer) == f"{1 - served * 0.0001:.12f}"

    await until(posted)


# ---- bad input


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'{"model": "sim",\n "messages": [}', "line 2, column 15"),
        (b'{"model": "sim", "messages": []} x', "line 1, column 34"),
        (b'{"model": "sim", "messages": [{"role": "us', "line 1, column 43"),
        (b'{"model": "sim", "messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content' stands twice"),
        (b'{"model": "sim", "model": "sim", "messages": []}', "'model' stands twice"),
        (body("x", temprature=1), "temprature"),
        (body("x", max_tokens="many"), "max_tokens"),
        (b"[]", "object"),
        (b"", "line 1, column 1"),
    ],
)
async def test_bad_json_is_refused_by_place(
    somebody: Customer, gateways: list[httpx.AsyncClient], content: bytes, place: str
) -> None:
    answer = await gateways[0].post(CHAT, content=content, headers=somebody.headers)
    assert code_of(answer) == (400, "INVALID_REQUEST")
    assert place in answer.json()["error"]["message"]


async def test_too_large_a_body_is_refused_at_its_header(fleet: Fleet, somebody: Customer) -> None:
    host, port = fleet.urls[0].removeprefix("http://").split(":")

    def announce(length: int) -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {somebody.secret}\r\n"
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())  # and not a byte of it
            return connection.recv(4096)

    answer = await asyncio.to_thread(announce, 10_000_001)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"BODY_TOO_LARGE"' in answer


async def test_an_engine_that_is_down_is_502_and_costs_nothing(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1")
    for stream in (False, True):
        answer = await gateways[0].post(CHAT, content=body("x", "gone", stream=stream), headers=customer.headers)
        assert code_of(answer) == (502, "UPSTREAM_ERROR")
        receipt = await fleet.receipt(customer, answer.headers["x-request-id"])
        assert (receipt["outcome"], receipt["amount"]) == ("upstream_error", "0.000000000000")
    broken = await gateways[0].post(
        CHAT, content=body("[[sim n=9 fault=die at=4]]", stream=True), headers=customer.headers
    )
    assert broken.status_code == 200  # the first byte had left
    assert events_of(broken.text)[-1]["error"]["code"] == "UPSTREAM_ERROR"
    assert (await fleet.receipt(customer, broken.headers["x-request-id"]))["amount"] == "0.000000000000"
    assert await fleet.available(customer) == "1.000000000000"


async def test_browsers_are_let_in_by_setting(
    fleet: Fleet, somebody: Customer, gateways: list[httpx.AsyncClient]
) -> None:
    headers = somebody.headers | {"Origin": ORIGIN}
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    async with httpx.AsyncClient(base_url=fleet.urls[HASTY], timeout=30) as open_to_it:
        assert (await open_to_it.options(CHAT, headers=preflight)).headers["access-control-allow-origin"] == ORIGIN
        called = await open_to_it.post(CHAT, content=body("x"), headers=headers)
        receipt = f"/v1/generations/{called.headers['x-request-id']}"
        for answer in (
            called,
            await open_to_it.post(CHAT, content=b"{", headers=headers),
            await open_to_it.get("/v1/models", headers=headers),
            await open_to_it.get(receipt, headers=headers),
        ):
            assert answer.headers["access-control-allow-origin"] == ORIGIN
        stranger = await open_to_it.get("/v1/models", headers=headers | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
    closed = await gateways[0].post(CHAT, content=body("x"), headers=headers)
    assert "access-control-allow-origin" not in closed.headers


# ---- a model that sleeps


async def test_a_model_that_loads_longer_than_the_caller_waits(fleet: Fleet, gateways: list[httpx.AsyncClient]) -> None:
    customer = await fleet.customer("1")
    for stream in (False, True):
        answer = await gateways[0].post(
            CHAT, content=body("x", "slow", stream=stream), headers=customer.headers | {"X-Tidegate-Max-Wait": "0.2"}
        )
        assert code_of(answer) == (503, "MODEL_LOADING")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["details"]["estimate_s"] >= 1
    assert await fleet.available(customer) == "1.000000000000"


async def test_three_hundred_first_calls_start_one_engine(
    fleet: Fleet, gateways: list[httpx.AsyncClient], own_valkey: Path
) -> None:
    """All gateways together hold 64 callers for it: so many are answered, whoever is refused is told when to return."""
    customer = await fleet.customer("1")
    turns = cycle(gateways)
    content = body("[[sim n=2 p=10]]", "cold", max_tokens=2)
    answers = await asyncio.gather(
        *(next(turns).post(CHAT, content=content, headers=customer.headers) for _ in range(HERD))
    )
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(served) == 64
    assert {code_of(answer) for answer in refused} == {(503, "MODEL_LOADING")}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    generated = [json.loads(line) for line in (fleet.folder / "cold.jsonl").read_text().splitlines()]
    assert {line["request_id"] for line in generated} == {answer.headers["x-request-id"] for answer in served}
    assert len({line["pid"] for line in generated}) == 1
    await until(lambda: figures(own_valkey, customer)["entries"] == 0)
    assert 1_000_000_000 - figures(own_valkey, customer)["a"] == len(served) * 32_000  # 10 at 2.00 and 2 at 6.00

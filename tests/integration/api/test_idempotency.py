"""`Idempotency-Key` on inference: one request of a key runs, over replicas; its repeats hear what became of it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api.inference import claims
from api.inference.claims import Claims
from billing.types import UsageEvent
from core import keyspace
from core.clock import SystemClock
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from core.resp import RespClient
from core.waits import Wait
from engine import simulator
from engine.simulator import SIMULATOR, Options, Simulator
from scheduler import refusals
from tenants.api_keys import digest, mint
from tests.factories.gateway import PEPPER, Rig, rig, served_model
from tests.factories.stack import chat, events_of, text_of, until

CHAT = "/v1/chat/completions"
SEALING = b"s" * 32
PROMPT = "[[sim n=7 p=20]] a secret of mine"
ONE = 20 * 2_000_000 + 7 * 6_000_000  # pico
REPLICAS = 2


@dataclass
class Site:
    """Two gateways with one Valkey and one engine, and a customer both know."""

    rigs: list[Rig]
    engine: Simulator
    valkey: RespClient
    key: str

    @property
    def events(self) -> list[UsageEvent]:
        return [event for one in self.rigs for event in one.spool.events]

    @property
    def generated(self) -> int:
        return self.engine.generated_total

    def admit(self, key: str = "", **changes: Any) -> str:
        """Let all replicas know a key; returns it."""
        key = key or mint()
        found = msgspec.structs.replace(self.rigs[0].principal, **changes)
        for one in self.rigs:
            one.gateway.directory.principals[digest(PEPPER, key)] = found
            one.gateway.directory.changed()
        return key

    async def send(
        self, name: str, body: dict[str, Any] | None = None, *, at: int = 0, key: str = "", fallback: str = "none"
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.key}", "Idempotency-Key": name}
        headers["X-Tidegate-Fallback"] = fallback
        async with httpx.AsyncClient(base_url=self.rigs[at].url, headers=headers, timeout=20) as client:
            return await client.post(CHAT, json=body or chat(PROMPT))


@pytest.fixture
async def site(service_folder: Path, valkey: Path) -> AsyncIterator[Site]:
    uds = service_folder / "idem-sim.sock"
    runner = await simulator.serve(Options(), SystemClock(), uds=str(uds))
    client = await RespClient.connect(f"unix://{valkey}")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(client.close)
        model = served_model("sim", f"unix:{uds}")
        rigs = [await stack.enter_async_context(rig({"sim": model}, clock=SystemClock())) for _ in range(REPLICAS)]
        for number, one in enumerate(rigs):
            one.gateway.claims = Claims(client, f"g{number}", SEALING)
        site = Site(rigs, runner.app[SIMULATOR], client, "")
        site.key = site.admit()
        yield site


def _refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_repeat_is_told_where_its_receipt_is(site: Site) -> None:
    first = await site.send("k")
    generation = first.headers["x-request-id"]
    for at in range(REPLICAS):
        again = await site.send("k", at=at)
        assert _refused(again) == (409, "IDEMPOTENCY_KEY_USED")
        details = {"generation": generation, "receipt": f"/v1/generations/{generation}"}
        assert again.json()["error"]["details"] == details
        assert again.headers["x-should-retry"] == "false"
        assert "retry-after" not in again.headers
    (event,) = site.events
    assert (event.amount_pico, f"gen_{event.id.hex}") == (ONE, generation)
    assert len(event.idempotency) == 16
    assert (await site.send("k2")).status_code == 200
    assert len({one.idempotency for one in site.events}) == 2


async def test_a_repeat_is_told_the_receipt_of_the_model_that_served(site: Site) -> None:
    sim = site.rigs[0].models["sim"]
    for one in site.rigs:
        one.models["own"] = served_model("own", sim.base_url, fallback_model="sim")
        one.admission.refused["own"] = refusals.busy("own", 1, "queue", Wait(4, 64, 0, 7))
    body = chat(PROMPT, model="own")
    first = await site.send("k", body, fallback="allow")
    assert (first.status_code, first.json()["model"]) == (200, "sim")
    again = await site.send("k", body, at=1, fallback="allow")
    assert _refused(again) == (409, "IDEMPOTENCY_KEY_USED")
    assert again.json()["error"]["details"]["generation"] == first.headers["x-request-id"]
    (event,) = site.events
    assert f"gen_{event.id.hex}" == first.headers["x-request-id"]


async def test_another_body_under_the_same_key_is_refused(site: Site) -> None:
    assert (await site.send("k")).status_code == 200
    other = await site.send("k", chat(PROMPT + "!"), at=1)
    assert _refused(other) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert other.headers["x-should-retry"] == "false"
    assert len(site.events) == 1


async def test_while_it_runs_repeats_are_told_to_come_back(site: Site) -> None:
    site.rigs[0].admission.gate = asyncio.Event()
    running = asyncio.create_task(site.send("k"))
    await until(lambda: site.rigs[0].admission.calls)
    busy = await site.send("k", at=1)
    assert _refused(busy) == (409, "IDEMPOTENCY_IN_PROGRESS")
    assert int(busy.headers["retry-after"]) >= 1
    assert "x-should-retry" not in busy.headers
    assert _refused(await site.send("k", chat("other"), at=1)) == (409, "IDEMPOTENCY_KEY_REUSED")
    site.rigs[0].admission.gate.set()
    assert (await running).headers["x-request-id"] == busy.json()["error"]["details"]["generation"]
    assert len(site.events) == 1


async def test_what_was_refused_or_failed_leaves_its_key_free(site: Site) -> None:
    """Midaz #709, of inference: neither validation, nor money, nor an engine's failure takes a key."""
    assert (await site.send("k", {**chat(PROMPT), "temprature": 1})).status_code == 400
    assert (await site.send("k", {**chat(PROMPT), "model": "none"})).status_code == 404
    admission = site.rigs[0].admission
    admission.refusal = PlatformError("INSUFFICIENT_CREDIT", ErrorKind.PAYMENT, "no money")
    assert (await site.send("k")).status_code == 402
    admission.refusal = None
    assert (await site.send("k", chat("[[sim fault=refuse]]"))).status_code == 502
    done = await site.send("k", at=1)
    assert done.status_code == 200
    assert [event.amount_pico for event in site.events if event.amount_pico] == [ONE]


async def test_one_of_many_at_once_runs(site: Site) -> None:
    """P11 over two replicas, with keys of which some come with two bodies."""
    bodies = [chat(PROMPT), chat("[[sim n=3 p=11]]")]
    asked = [(f"k{n % 5}", n % 3 == 0, n % REPLICAS) for n in range(60)]
    answers = await asyncio.gather(*(site.send(name, bodies[other], at=at) for name, other, at in asked))
    served = Counter(name for (name, *_), answer in zip(asked, answers, strict=True) if answer.status_code == 200)
    assert served == {f"k{n}": 1 for n in range(5)}
    codes = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
    assert codes <= {"IDEMPOTENCY_IN_PROGRESS", "IDEMPOTENCY_KEY_USED", "IDEMPOTENCY_KEY_REUSED"}
    assert len(site.events) == len({event.idempotency for event in site.events}) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_project_that_keeps_answers_gets_them_again(site: Site, stream: bool) -> None:
    site.admit(site.key, keep_answers=True)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = chat(PROMPT, **options)
    first = await site.send("k", body)
    again = await asyncio.gather(*(site.send("k", body, at=at % REPLICAS) for at in range(6)))
    for answer in again:
        assert (answer.status_code, answer.headers["idempotency-replayed"]) == (200, "true")
        assert answer.content == first.content
        for name in ("content-type", "x-request-id", "x-tidegate-cost"):
            assert answer.headers.get(name) == first.headers.get(name)
    assert "idempotency-replayed" not in first.headers
    if stream:
        events = events_of(again[0].text)
        assert (text_of(events), events[-1]) == (text_of(events_of(first.text)), "[DONE]")
    assert len(site.events) == 1
    assert _refused(await site.send("k", chat("other"))) == (409, "IDEMPOTENCY_KEY_REUSED")
    site.admit(site.key, keep_answers=False)  # from now on nothing kept is shown
    assert _refused(await site.send("k", body)) == (409, "IDEMPOTENCY_KEY_USED")


async def test_what_is_kept_gives_away_neither_prompt_nor_answer_and_expires(site: Site) -> None:
    site.admit(site.key, keep_answers=True)
    text = (await site.send("a key of mine")).json()["choices"][0]["message"]["content"]
    names = [name.decode() for name in await site.valkey.call("KEYS", "*")]
    assert {name.split(":")[1] for name in names} == {"once", "kept", "onces", "keeps"}
    for name in names:
        assert (
            0 < await site.valkey.call("TTL", name) <= (86_400 if name.split(":")[1] in {"once", "kept"} else 172_800)
        )
        value = await site.valkey.call("GET", name)
        for secret in (text, "a secret of mine", "a key of mine"):
            assert secret.encode() not in value + name.encode()


async def test_the_same_key_of_two_callers_never_meets(site: Site) -> None:
    """Another tenant, another project, and another API key of the same project."""
    site.admit(site.key, keep_answers=True)
    others = [
        site.admit(tenant_id=new_uuid(), project_id=new_uuid(), key_id=new_uuid(), keep_answers=True),
        site.admit(project_id=new_uuid(), key_id=new_uuid(), keep_answers=True),
        site.admit(key_id=new_uuid(), keep_answers=True),
    ]
    for caller in ("", *others):
        answer = await site.send("k", key=caller)
        assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (200, None)
    assert len({event.idempotency for event in site.events}) == 4


async def test_an_answer_put_in_the_place_of_another_tenants_does_not_open(site: Site) -> None:
    site.admit(site.key, keep_answers=True)
    theirs = site.admit(tenant_id=new_uuid(), project_id=new_uuid(), key_id=new_uuid(), keep_answers=True)
    await site.send("k")
    (mine,) = await site.valkey.call("KEYS", "{tg}:kept:*")
    await site.send("k", key=theirs)
    (other,) = set(await site.valkey.call("KEYS", "{tg}:kept:*")) - {mine}
    await site.valkey.call("SET", other, await site.valkey.call("GET", mine))
    assert _refused(await site.send("k", key=theirs)) == (409, "IDEMPOTENCY_KEY_USED")


async def test_answers_and_keys_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.admit(site.key, keep_answers=True)
    first = await site.send("k1")
    for bound in ("ANSWER_MAX_BYTES", "PROJECT_BYTES_PER_DAY_MAX", "ALL_BYTES_PER_DAY_MAX"):
        with monkeypatch.context() as patched:
            patched.setattr(claims, bound, len(first.content) // 2)
            for stream in (False, True):
                body = chat(PROMPT, stream=stream)
                assert (await site.send(f"{bound} {stream}", body)).status_code == 200
                assert _refused(await site.send(f"{bound} {stream}", body)) == (409, "IDEMPOTENCY_KEY_USED")
    monkeypatch.setattr(claims, "KEYS_PER_DAY_MAX", len(site.events))
    full = await site.send("one more")
    assert _refused(full) == (429, "IDEMPOTENCY_KEYS_EXHAUSTED")
    assert 0 < int(full.headers["retry-after"]) <= 86_400
    assert (await site.send("k1")).headers["idempotency-replayed"] == "true"  # what is known stays known


async def test_without_valkey_a_request_with_a_key_is_refused_and_one_without_is_served(site: Site) -> None:
    site.rigs[0].gateway.claims = None
    refused = await site.send("k")
    assert _refused(refused) == (503, "SERVICE_UNAVAILABLE")
    assert int(refused.headers["retry-after"]) >= 1
    headers = {"Authorization": f"Bearer {site.key}"}
    async with httpx.AsyncClient(base_url=site.rigs[0].url, headers=headers) as client:
        assert (await client.post(CHAT, json=chat(PROMPT))).status_code == 200
        assert (await client.post("/tokenize", json={"model": "sim", "prompt": "x"})).status_code == 200
    away = await RespClient.connect("unix:///nowhere.sock", required=False)
    site.rigs[1].gateway.claims = Claims(away, "g1", SEALING)
    assert _refused(await site.send("k", at=1)) == (503, "SERVICE_UNAVAILABLE")
    await away.close()
    assert [event.idempotency for event in site.events] == [b""]


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\xe9"])
async def test_a_key_of_another_form_is_refused(site: Site, key: str) -> None:
    headers = [(b"Authorization", f"Bearer {site.key}".encode()), (b"Idempotency-Key", key.encode("latin-1"))]
    async with httpx.AsyncClient(base_url=site.rigs[0].url) as client:
        refused = await client.post(CHAT, json=chat(PROMPT), headers=headers)
        assert (_refused(refused), refused.json()["error"]["param"]) == ((400, "INVALID_REQUEST"), "Idempotency-Key")
        twice = await client.post(CHAT, json=chat(PROMPT), headers=[*headers[:1], *[(b"Idempotency-Key", b"k")] * 2])
        assert twice.status_code == 400


async def test_a_key_whose_replica_died_is_taken_over_and_the_events_tell_it(site: Site) -> None:
    site.rigs[0].admission.gate = asyncio.Event()
    running = asyncio.create_task(site.send("k"))
    await until(lambda: site.rigs[0].admission.calls)
    (name,) = await site.valkey.call("KEYS", "{tg}:once:*")
    _, request_id, *_ = (await site.valkey.call("GET", name)).decode().split("|")
    await site.valkey.call("SET", "{tg}:offset_us", claims.GRACE_MS * 1000 + 1_000_000)
    await site.valkey.call("HSET", keyspace.lease("g0"), request_id, "held")  # as admission lists what runs
    assert _refused(await site.send("k", at=1)) == (409, "IDEMPOTENCY_IN_PROGRESS")
    await site.valkey.call("DEL", keyspace.lease("g0"))  # as the reaper does when its heartbeat ended
    assert _refused(await site.send("k", chat("other"), at=1)) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert (await site.send("k", at=1)).status_code == 200
    site.rigs[0].admission.gate.set()  # it was not dead after all
    assert (await running).status_code == 200
    assert len(site.events) == 2
    assert len({event.idempotency for event in site.events}) == 1  # the poster bills one: billing/test_repeats.py
    assert _refused(await site.send("k")) == (409, "IDEMPOTENCY_KEY_USED")


async def test_valkey_emptied_between_two_leaves_the_poster_what_it_needs(site: Site) -> None:
    assert (await site.send("k")).status_code == 200
    await site.valkey.call("FLUSHALL")
    assert (await site.send("k", at=1)).status_code == 200
    first, second = site.events
    assert first.idempotency == second.idempotency
    assert first.id != second.id


async def test_another_body_after_valkey_was_emptied_is_another_bill(site: Site) -> None:
    """Nobody knows that the key was used, so both are answered; as the repeat of the first it would be free."""
    assert (await site.send("k")).status_code == 200
    await site.valkey.call("FLUSHALL")
    assert (await site.send("k", chat(PROMPT + "!"), at=1)).status_code == 200
    assert (await site.send("k", at=1)).json()["error"]["code"] == "IDEMPOTENCY_KEY_REUSED"
    first, second = site.events
    assert first.idempotency != second.idempotency
    assert (first.amount_pico, second.amount_pico) == (ONE, ONE)


async def test_a_pepper_that_turns_leaves_one_bill(site: Site) -> None:
    """Between the first gateway's restart with the new pepper and the last one's, a repeat of either is known."""
    site.rigs[0].gateway.previous_peppers = (PEPPER,)
    site.rigs[0].gateway.pepper = b"n" * 32
    assert (await site.send("k")).status_code == 200
    await site.valkey.call("FLUSHALL")
    assert (await site.send("k", at=1)).status_code == 200
    first, second = site.events
    assert first.idempotency == second.idempotency


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_caller_who_leaves_has_used_the_key_only_if_something_is_billed(site: Site, tokens: int) -> None:
    body = chat(f"[[sim n=50 p=20 fault=stall at={tokens}]]", stream=True)
    headers = {"Authorization": f"Bearer {site.key}", "Idempotency-Key": "k"}
    async with httpx.AsyncClient(base_url=site.rigs[0].url, headers=headers) as client:
        asking = asyncio.create_task(client.post(CHAT, json=body))
        await until(lambda: site.rigs[0].gateway.relays)
        (relay,) = site.rigs[0].gateway.relays
        await until(lambda: relay.status and relay.events.deltas == tokens)
        asking.cancel()
    await until(lambda: site.events)
    await site.rigs[0].settled()
    assert (site.events[0].amount_pico > 0) is (tokens > 0)
    if tokens:
        assert _refused(await site.send("k", body)) == (409, "IDEMPOTENCY_KEY_USED")
    else:
        assert (await site.send("k")).status_code == 200

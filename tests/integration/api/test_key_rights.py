"""What a gateway lets a key do: peppers that turn, rights that end while something runs, keys that are none."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial

import httpx
import msgspec
import pytest

from api.inference.directory import Directory
from api.inference.ending import end_running
from api.inference.metrics import Metrics
from api.inference.rehash import WAITING_MAX, Rehash
from api.inference.snapshot import Follower
from billing.types import CountSource, Outcome
from core import db
from core.clock import ManualClock, SystemClock
from core.settings import Database
from core.settings import Gateway as GatewaySettings
from core.usage import TokenUsage
from tenants import api_keys, key_secrets, principals
from tenants.api_keys import digest, mint
from tenants.credentials import Peppers, pepper_id
from tenants.key_types import KeyPolicy
from tenants.types import Principal
from tests.factories.gateway import PEPPER, rig
from tests.factories.gateway_process import SEALING, seed
from tests.factories.memory import MemoryTransport
from tests.factories.stack import Stack, chat, events_of, until
from tests.factories.tenants import PEPPER as STORED_PEPPER
from tests.factories.tenants import customer

OLD = b"o" * 32
ODDITIES = (
    b"tg_" + b"0" * 10_000,
    b"tg_\xff\xfe\x00x".replace(b"\x00", b"\x80"),
    "tg_schlüssel".encode(),
    "tg_ключ".encode(),
    b"tg_%00%0d%0a",
    b"tg_' OR 1=1 --",
    b"\xed\xa0\x80tg_",
)


def _raw(key: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer %b\r\nContent-Length: 2\r\n\r\n{}" % (path, key)


@pytest.mark.parametrize("key", ODDITIES)
async def test_what_is_no_key_is_refused_and_nothing_breaks(key: bytes) -> None:
    """Every sort of byte that can stand in a header, also beside previous peppers."""
    async with rig({}, listen=False) as made:
        made.gateway.previous_peppers = (OLD,)
        for path in (b"/v1/chat/completions", b"/v1/embeddings"):
            connection = made.connection()
            transport = MemoryTransport(connection)
            connection.data_received(_raw(key, path))
            assert transport.statuses == [401]
        assert made.gateway.metrics.counters["internal_errors_total"] == 0


async def test_models_refuse_odd_keys_alike(stack: Stack) -> None:
    for key in ODDITIES:
        answer = await stack.client.get("/v1/models", headers=[(b"Authorization", b"Bearer " + key)])
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "INVALID_API_KEY")


async def test_keys_that_begin_alike_are_different_keys(stack: Stack) -> None:
    """A digest of the first characters alone would let the one pass for the other."""
    key = stack.rig.key
    body = key[:20] + "".join(reversed(key[20:]))
    for other in (body, key[:-1] + ("0" if key[-1] != "0" else "1"), key + "0", key[:20], key.upper(), " " + key[:30]):
        answer = await stack.client.get("/v1/models", headers={"Authorization": f"Bearer {other}"})
        assert answer.status_code == 401, other
    assert (await stack.client.get("/v1/models")).status_code == 200


# ---- peppers


async def test_a_key_known_under_an_old_pepper_works_and_is_noted(stack: Stack) -> None:
    noted: list[tuple[bytes, bytes]] = []
    gateway = stack.rig.gateway
    key = mint()
    gateway.directory.principals[digest(OLD, key)] = stack.rig.principal
    headers = {"Authorization": f"Bearer {key}"}
    calls = (
        partial(stack.client.get, "/v1/models", headers=headers),
        partial(stack.client.post, "/v1/chat/completions", json=chat("x"), headers=headers),
    )
    assert [(await call()).status_code for call in calls] == [401, 401]
    gateway.previous_peppers, gateway.rehash = (b"?" * 32, OLD), lambda older, new: noted.append((older, new))
    assert [(await call()).status_code for call in calls] == [200, 200]
    assert noted == [(digest(OLD, key), digest(PEPPER, key))] * 2
    gateway.directory.principals[digest(PEPPER, key)] = stack.rig.principal
    assert [(await call()).status_code for call in calls] == [200, 200]
    assert len(noted) == 2  # found at the first look now
    assert (await stack.client.get("/v1/models", headers={"Authorization": f"Bearer {mint()}"})).status_code == 401


async def test_what_was_met_is_written_together_and_reaches_the_directory(
    sessions: db.Sessions, database_settings: Database
) -> None:
    seeded = await seed(sessions, "http://127.0.0.1:9/")
    who, metrics = seeded.customer, Metrics()
    turned = Peppers(OLD, (STORED_PEPPER,))
    rehash = Rehash(sessions, turned.ids[0], metrics)
    fresh = digest(OLD, who.secret)
    for _ in range(3):
        rehash.note(who.digest, fresh)
    rehash.note(b"?" * 32, b"!" * 32)  # revoked meanwhile, or never there
    await rehash.write()
    assert metrics.counters["rehashed_total"] == 1
    async with db.transaction(sessions) as session:
        known = await principals.load_all(session, turned.ids[:1])
        assert [use.api_keys for use in await key_secrets.pepper_use(session, turned)] == [1, 0]
    assert {key: value.key_id for key, value in known.items()} == {fresh: who.key.id}


async def test_what_cannot_be_written_is_dropped_and_counted(database_settings: Database) -> None:
    engine = db.create_engine(Database.model_validate({"url": "postgresql://nobody@127.0.0.1:1/none"}))
    metrics = Metrics()
    rehash = Rehash(db.create_sessions(engine), pepper_id(OLD), metrics)
    for number in range(WAITING_MAX + 2):
        rehash.note(number.to_bytes(32, "big"), b"!" * 32)
    assert metrics.counters["rehash_dropped_total"] == 2
    await rehash.write()
    assert metrics.counters["rehash_dropped_total"] == 2 + WAITING_MAX
    await engine.dispose()


# ---- an overlap


async def test_an_overlap_ends_at_its_second(sessions: db.Sessions, stack: Stack) -> None:
    """The gateway looks at its own clock: no notice is needed for the end of a secret."""
    made, now = await customer(sessions), SystemClock().now()
    async with db.transaction(sessions) as session:
        policy = KeyPolicy(now)
        _, second = await api_keys.rotate(
            session, made.tenant.id, made.key.id, pepper=STORED_PEPPER, overlap=timedelta(hours=1), policy=policy
        )
    clock = ManualClock(now)
    async with rig(stack.rig.models, clock=clock) as turned:
        gateway = turned.gateway
        gateway.pepper = STORED_PEPPER
        async with db.transaction(sessions) as session:
            gateway.directory.principals = await principals.load_all(session)

        async def codes() -> list[tuple[int, str]]:
            found = []
            for key in (made.secret, second):
                async with httpx.AsyncClient(base_url=turned.url, headers={"Authorization": f"Bearer {key}"}) as client:
                    answer = await client.get("/v1/models")
                    found.append((answer.status_code, answer.json().get("error", {}).get("code", "")))
            return found

        assert await codes() == [(200, ""), (200, "")]
        clock.advance(3599)
        assert await codes() == [(200, ""), (200, "")]
        clock.advance(1)
        assert await codes() == [(401, "KEY_EXPIRED"), (200, "")]


# ---- rights that end while something runs


async def _stalled(stack: Stack, key: str) -> "asyncio.Task[httpx.Response]":
    """A stream that has said five tokens and no more."""
    before = len(stack.rig.gateway.relays)
    headers = {"Authorization": f"Bearer {key}"}
    body = chat("[[sim n=100 p=30 fault=stall at=5]]", stream=True)
    task = asyncio.create_task(stack.client.post("/v1/chat/completions", json=body, headers=headers))
    await until(lambda: len(stack.rig.gateway.relays) > before)
    await until(lambda: all(relay.events.deltas == 5 for relay in stack.rig.gateway.relays))
    return task


@pytest.mark.parametrize(
    ("kind", "code"),
    [("api_key", "KEY_REVOKED"), ("project", "PROJECT_SUSPENDED"), ("tenant", "TENANT_SUSPENDED")],
)
async def test_the_hard_way_cuts_what_runs_and_charges_what_was_said(stack: Stack, kind: str, code: str) -> None:
    """30 in at 2.00 and 5 out at 6.00: 0.00009."""
    other_key, other = stack.rig.add_key()
    mine = await _stalled(stack, stack.rig.key)
    theirs = await _stalled(stack, other_key)
    who = stack.rig.principal
    entity = {"api_key": who.key_id, "project": who.project_id, "tenant": who.tenant_id}[kind]
    end_running(stack.rig.gateway, "person", entity)  # a kind that ends nothing
    end_running(stack.rig.gateway, kind, entity)
    answer = await mine
    assert events_of(answer.text)[-1]["error"]["code"] == code
    event = stack.rig.event
    assert (event.key_id, event.outcome, event.count_source) == (who.key_id, Outcome.CLIENT_ABORT, CountSource.GATEWAY)
    assert event.usage == TokenUsage(input_uncached=event.usage.input_uncached, output=5)
    assert event.usage.input_uncached > 0
    assert not theirs.done()
    assert stack.rig.gateway.metrics.counters["streams_ended_total"] == 1
    end_running(stack.rig.gateway, "api_key", other.key_id)
    await theirs
    assert not stack.rig.admission.held


async def test_a_buffered_answer_is_cut_too_and_costs_nothing(stack: Stack) -> None:
    call = asyncio.create_task(stack.chat("[[sim n=100 fault=stall at=5]]"))
    await until(lambda: stack.rig.gateway.relays)
    end_running(stack.rig.gateway, "tenant", stack.rig.principal.tenant_id)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "TENANT_SUSPENDED")
    assert (stack.rig.event.outcome, stack.rig.event.amount_pico) == (Outcome.CLIENT_ABORT, 0)


def _refuse(stack: Stack, refusal: str) -> Principal:
    known = stack.rig.gateway.directory.principals
    refused: Principal = msgspec.structs.replace(stack.rig.principal, refusal=refusal)
    known[digest(PEPPER, stack.rig.key)] = refused
    return refused


async def test_a_key_that_was_revoked_while_it_waited_starts_nothing(stack: Stack) -> None:
    """In the queue: it was let in by a key that has no rights any more."""
    stack.rig.admission.gate = asyncio.Event()
    call = asyncio.create_task(stack.chat("x"))
    await until(lambda: stack.rig.admission.calls)
    _refuse(stack, "KEY_REVOKED")
    stack.rig.admission.gate.set()
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "KEY_REVOKED")
    assert stack.generated() == []
    assert not stack.rig.admission.held


async def test_a_key_that_only_changed_while_it_waited_is_served(stack: Stack) -> None:
    stack.rig.admission.gate = asyncio.Event()
    call = asyncio.create_task(stack.chat("x"))
    await until(lambda: stack.rig.admission.calls)
    _refuse(stack, "")
    stack.rig.admission.gate.set()
    assert (await call).status_code == 200


@pytest.mark.parametrize("refusal", ["KEY_SUSPENDED", "OWNER_SUSPENDED"])
async def test_suspension_is_told_by_its_code_on_every_path(stack: Stack, refusal: str) -> None:
    _refuse(stack, refusal)
    for answer in (await stack.chat("x"), await stack.client.get("/v1/models")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, refusal)


# ---- the follower


@pytest.fixture
async def ended(sessions: db.Sessions, database_settings: Database) -> AsyncIterator[list[tuple[str, str]]]:
    """What a follower was told to cut, with the refusal that the directory had by then."""
    await seed(sessions, "http://127.0.0.1:9/")
    found: list[tuple[str, str]] = []
    directory, metrics, loaded = Directory(), Metrics(), asyncio.Event()

    def end(kind: str, _entity: object) -> None:
        refusals = {principal.refusal for principal in directory.principals.values()}
        found.append((kind, ",".join(sorted(refusals))))

    follower = Follower(
        directory,
        sessions,
        database_settings.url.get_secret_value(),
        sealing=SEALING,
        clock=SystemClock(),
        metrics=metrics,
        end=end,
    )
    task = asyncio.create_task(follower.run(loaded.set))
    async with asyncio.timeout(20):
        await loaded.wait()
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(metrics.config_delay.counts) > 0
    assert "tidegate_gateway_config_delay_seconds_bucket" in metrics.text({})


async def test_what_runs_is_cut_after_the_keys_are_refused(sessions: db.Sessions, ended: list[tuple[str, str]]) -> None:
    async with db.transaction(sessions) as session:
        known = await principals.load_all(session)
        (principal,) = known.values()
        await api_keys.revoke(session, principal.tenant_id, principal.key_id, clock=SystemClock(), hard=True)
    await until(lambda: ended)
    assert ended == [("api_key", "KEY_REVOKED")]


@pytest.mark.parametrize(
    ("proxies", "forwarded", "network", "status"),
    [
        (("127.0.0.0/8",), "10.1.2.3", "10.0.0.0/8", 200),  # proxies by network
        (("127.0.0.1", "192.0.2.0/24"), "10.1.2.3, 192.0.2.7", "10.0.0.0/8", 200),  # two of ours in a row
        (("127.0.0.1", "192.0.2.0/24"), "10.1.2.3, 6.6.6.6, 192.0.2.7", "10.0.0.0/8", 403),
        (("127.0.0.1",), "::ffff:10.1.2.3", "10.0.0.0/8", 200),  # the same address as IPv6 writes it
        (("127.0.0.1",), "10.1.2.3", "::ffff:10.0.0.0/104", 200),
        (("127.0.0.1",), "::ffff:11.1.2.3", "10.0.0.0/8", 403),
        (("127.0.0.1",), "fd00::7", "fd00::/8", 200),
        (("127.0.0.1",), "10.1.2.3.4", "0.0.0.0/0", 403),  # no address is in no network
        (("127.0.0.1",), "1" * 500, "0.0.0.0/0", 403),
        (("10.0.0.0/8",), "10.1.2.3", "10.0.0.0/8", 403),  # who speaks is no proxy of ours
    ],
)
async def test_where_a_key_may_be_used_from(
    stack: Stack, proxies: tuple[str, ...], forwarded: str, network: str, status: int
) -> None:
    settings = GatewaySettings(spool_wait_ms=2000, trusted_proxies=proxies)
    async with rig(stack.rig.models, clock=SystemClock(), settings=settings) as made:
        key, _ = made.add_key(allowed_networks=(network,))
        headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": forwarded}
        async with httpx.AsyncClient(base_url=made.url, headers=headers, timeout=20) as client:
            assert (await client.post("/v1/chat/completions", json=chat("x"))).status_code == status
            assert (await client.get("/v1/models")).status_code == status

"""The small parts that all requests share."""

import asyncio
import threading

import pytest

from api.inference.access import resolve
from api.inference.access_log import BUFFER_MAX, AccessLog
from api.inference.directory import OFFERS_MAX, Directory, Offer, engine_fields, may_use
from api.inference.gateway import Waiters
from api.inference.limits import LimitLines
from api.inference.metrics import GAP_BUCKETS_S, Histogram, Metrics
from api.inference.request import parse
from api.inference.sweeper import date_line
from billing.price_table import NEVER_US, PriceTable, VersionPrices
from billing.types import Meter, PriceItem
from catalog.types import EngineKind
from core.ids import new_uuid
from core.tiers import Tier
from tests.factories.gateway import FakeAdmission, FixedPrices, principal, served_model


async def test_waiters_are_late_one_by_one_and_cancelling_one_leaves_the_others() -> None:
    """A future of its own for every waiter: a shared one would be cancelled for all."""
    loop = asyncio.get_running_loop()
    waiters = Waiters(loop, 0.02)
    first, second, third = (loop.create_future() for _ in range(3))
    for waiter in (first, second, third):
        waiters.add(waiter)
    first.cancel()
    second.set_result(True)
    assert await third is None
    assert await second is True
    again = loop.create_future()
    waiters.add(again)  # the line starts anew after it was empty
    assert await again is None


async def test_access_lines_are_written_together_and_dropped_when_nobody_reads() -> None:
    loop = asyncio.get_running_loop()
    written: list[bytes] = []
    gate = threading.Event()
    dropped: list[int] = []

    def write(data: bytes) -> None:
        gate.wait(5)
        written.append(data)

    log = AccessLog(write, lambda _, count: dropped.append(count))
    log.line("a")
    log.line("b")
    log.flush(loop)
    for _ in range(BUFFER_MAX // 256 + 1):
        log.line("c")
    log.flush(loop)  # the first write is still under way: the lines go, and are counted
    assert dropped == [BUFFER_MAX // 256 + 1]
    log.line("d")
    gate.set()
    await log.close(loop)
    assert written == [b"a\nb\n", b"d\n"]


async def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    def write(_: bytes) -> None:
        raise OSError("disk full")

    dropped: list[int] = []
    log = AccessLog(write, lambda _, count: dropped.append(count))
    log.line("a")
    await log.close(asyncio.get_running_loop())
    assert dropped == [1]


def test_histograms_count_upwards() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="0.1"} 1',
        'x_bucket{le="1"} 2',
        'x_bucket{le="+Inf"} 3',
        "x_sum 7.600000",
        "x_count 3",
    ]
    assert len(Histogram(GAP_BUCKETS_S).counts) == len(GAP_BUCKETS_S) + 1


def test_metrics_text() -> None:
    metrics = Metrics()
    metrics.count("chat", 200)
    metrics.count("chat", 200)
    metrics.add("timeouts_total", 3)
    text = metrics.text({"connections": 2})
    assert 'tidegate_gateway_requests_total{endpoint="chat",status="200"} 2\n' in text
    assert "tidegate_gateway_timeouts_total 3\n" in text
    assert "# TYPE tidegate_gateway_connections gauge\ntidegate_gateway_connections 2\n" in text
    with pytest.raises(KeyError):
        metrics.add("no_such_counter")


def test_offers_are_bounded() -> None:
    directory = Directory()
    who, model = principal(), served_model("m", "http://x")
    schedule = FixedPrices((Tier.STANDARD,), input_=1, cached=1, output=1).schedule(
        model.model_id, Tier.STANDARD, who.currency, who.tenant_id
    )
    assert schedule is not None
    offer = Offer(who, model, Tier.STANDARD, schedule, NEVER_US, None, b"", LimitLines(()))
    for _ in range(OFFERS_MAX + 5):
        directory.remember((new_uuid().int, "m", None, "chat"), offer)
    assert len(directory.offers) == 5
    directory.changed()
    assert not directory.offers


def test_prices_published_ahead_take_effect_at_their_instant() -> None:
    who, model = principal(), served_model("m", "http://x")
    versions = []
    for at_us, price in ((0, 1), (1000, 2)):
        items = [PriceItem(model.model_id, Tier.STANDARD, meter, price) for meter in (Meter.INPUT, Meter.OUTPUT)]
        versions.append((at_us, VersionPrices(new_uuid(), who.currency, items)))
    directory = Directory()
    directory.models = {"m": model}
    directory.prices = PriceTable(versions, as_of_us=0)
    call = parse("embeddings", b'{"model":"m","input":"x"}')
    found = [resolve(directory, FakeAdmission(), who, call, now).schedule.input for now in (1, 999, 1000, 1001)]
    assert found == [1, 1, 2, 2]


def test_model_patterns() -> None:
    assert may_use(principal(), "anything")
    assert may_use(principal(model_patterns=("a-*", "b")), "a-1")
    assert not may_use(principal(model_patterns=("a-*", "b")), "bb")


@pytest.mark.parametrize(
    ("engine", "tier", "endpoint", "found"),
    [
        (EngineKind.VLLM, Tier.STANDARD, "chat", b'"model":"in\\"ner","cache_salt":"salt"'),
        (EngineKind.VLLM, Tier.PRIORITY, "completions", b'"model":"in\\"ner","cache_salt":"salt","priority":-10'),
        (EngineKind.VLLM, Tier.BATCH, "chat", b'"model":"in\\"ner","cache_salt":"salt","priority":10'),
        (EngineKind.VLLM, Tier.BATCH, "embeddings", b'"model":"in\\"ner"'),
        (EngineKind.LLAMA_CPP, Tier.PRIORITY, "chat", b'"model":"in\\"ner"'),
        (EngineKind.OPENAI, Tier.PRIORITY, "chat", b'"model":"in\\"ner"'),
    ],
)
def test_our_members_for_each_engine(engine: EngineKind, tier: Tier, endpoint: str, found: bytes) -> None:
    model = served_model("m", "http://x", engine=engine, upstream_model='in"ner')
    assert engine_fields(principal(), model, tier, endpoint) == found


def test_the_date_header() -> None:
    assert date_line(784_111_777_000_000) == b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"  # RFC 9110's own example

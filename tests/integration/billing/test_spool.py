"""The spool on a real disk: durable before the callback, readable after any kill, bounded."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from billing import spool_format as fmt
from billing.spool import SpoolBusyError, SpoolWriter
from billing.spool_reader import SpoolReader
from billing.types import Outcome, UsageEvent
from core.clock import ManualClock
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier
from core.usage import TokenUsage


def event(number: int = 0, *, raw_usage: str = "") -> UsageEvent:
    some = UUID(int=number + 1)
    return UsageEvent(
        new_uuid(), some, some, some, some, some, some,
        "demo", "chat", Tier.STANDARD, Currency.USD, some, Outcome.COMPLETED, 200, number, 1, 2,
        TokenUsage(1, 2, 3, 4, number), raw_usage=raw_usage,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "replica-1"


def writer(folder: Path, *, segment_bytes: int = 64 * 1024, marks: tuple[int, int, int] = (10**9,) * 3) -> SpoolWriter:
    spool = SpoolWriter(folder, clock=ManualClock(), segment_bytes=segment_bytes, marks=marks)
    spool.start(asyncio.get_running_loop())
    return spool


async def append_all(spool: SpoolWriter, events: list[UsageEvent]) -> list[bool]:
    loop = asyncio.get_running_loop()
    done: list[asyncio.Future[bool]] = []
    for one in events:
        future: asyncio.Future[bool] = loop.create_future()
        done.append(future)
        spool.append(one, future.set_result)
    return await asyncio.wait_for(asyncio.gather(*done), 20)


def damaged(folder: Path) -> int:
    return len(list(folder.glob("damaged-*")))


def read_all(folder: Path) -> list[UsageEvent]:
    reader, events = SpoolReader(folder), []
    while batch := reader.read(1000):
        events += batch
    return events


async def test_what_was_acknowledged_is_read_back_in_order_over_many_segments(folder: Path) -> None:
    spool = writer(folder, segment_bytes=8 * 1024)
    events = [event(number) for number in range(500)]
    acknowledged = []
    for at in range(0, 500, 20):
        acknowledged += await append_all(spool, events[at : at + 20])
    assert acknowledged == [True] * 500
    assert read_all(folder) == events  # while the writer lives
    assert len(fmt.segment_numbers(folder)) > 5
    spool.close()
    assert read_all(folder) == events
    assert spool.figures.events == 500


async def test_a_reader_follows_the_writer_and_deletes_what_is_posted(folder: Path) -> None:
    spool = writer(folder, segment_bytes=4 * 1024)
    reader = SpoolReader(folder)
    assert reader.read(10) == []
    await append_all(spool, first := [event(number) for number in range(60)])
    assert [*reader.read(25), *reader.read(1000)] == first
    reader.acknowledge()
    assert reader.read(10) == []
    await append_all(spool, second := [event(number) for number in range(60, 120)])
    assert reader.read(1000) == second
    reader.rewind()
    assert reader.read(1000) == second  # not committed, so offered again
    reader.acknowledge()
    assert SpoolReader(folder).read(10) == []  # the checkpoint is on disk
    assert len(fmt.segment_numbers(folder)) == 1
    assert not reader.tidy()  # its writer lives
    spool.close()
    assert reader.tidy()
    assert fmt.segment_numbers(folder) == []
    again = writer(folder)
    await append_all(again, [third := event(7)])
    assert reader.read(10) == [third]
    again.close()


async def test_a_torn_last_record_is_dropped_at_every_byte_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    spool = writer(folder)
    events = [msgspec.structs.replace(event(number), waste_us=1) for number in range(3)]  # no 0 at the end
    await append_all(spool, events)
    spool.close()
    name = fmt.segment_name(fmt.segment_numbers(folder)[0])
    whole = (folder / name).read_bytes()
    last = len(fmt.encode(events[2]))
    for cut in range(last):
        for zeros in (0, 4096):  # a file cut short, and a preallocated one
            torn = tmp_path / f"torn-{cut}-{zeros}"
            torn.mkdir()
            (torn / name).write_bytes(whole[: len(whole) - last + cut] + bytes(zeros))
            assert read_all(torn) == events[:2]
            if cut % 40 == 0:  # a returning replica writes on, and the reader passes the torn place
                back = writer(torn)
                await append_all(back, [fourth := event(9)])
                back.close()
                assert read_all(torn) == [*events[:2], fourth]
                assert damaged(torn) == 0
            shutil.rmtree(torn)


async def test_damage_in_the_middle_is_kept_for_a_person_and_does_not_stop_the_rest(folder: Path) -> None:
    spool = writer(folder)
    await append_all(spool, events := [event(number) for number in range(4)])
    spool.close()
    path = folder / fmt.segment_name(1)
    data = bytearray(path.read_bytes())
    data[fmt.HEADER.size + len(fmt.encode(events[0])) + 40] ^= 1
    path.write_bytes(data)
    spool = writer(folder)
    await append_all(spool, [later := event(5)])
    spool.close()
    assert read_all(folder) == [events[0], later]
    assert damaged(folder) == 1


async def test_a_frame_of_another_version_is_set_aside(folder: Path) -> None:
    spool = writer(folder)
    await append_all(spool, [first := event(1)])
    spool.close()
    payload = msgspec.msgpack.encode(["not an event"])
    import zlib

    with (folder / fmt.segment_name(1)).open("ab") as file:
        file.write(fmt.FRAME.pack(len(payload), zlib.crc32(payload, len(payload))) + payload + fmt.encode(event(2)))
    assert [one.amount_pico for one in read_all(folder)] == [first.amount_pico, 2]
    assert (folder / "rejected.bin").stat().st_size == fmt.FRAME.size + len(payload)


async def test_one_writer_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = writer(folder)
    monkeypatch.setattr("billing.spool.LOCK_TRIES", 2)
    with pytest.raises(SpoolBusyError):
        writer(folder)
    spool.close()
    writer(folder).close()


async def test_a_full_disk_refuses_new_work_and_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = writer(folder)
    monkeypatch.setattr("billing.spool.RETRY_S", 0.001)
    await append_all(spool, [first := event(1)])
    real = os.pwrite

    def is_full() -> bool:
        return all(spool.refuses(tier) for tier in Tier)

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert await append_all(spool, [second := event(2)]) == [False]
    assert is_full()
    assert await append_all(spool, [third := event(3)]) == [False]
    monkeypatch.setattr(os, "pwrite", real)
    assert await append_all(spool, [fourth := event(4)]) == [True]
    assert not any(spool.refuses(tier) for tier in Tier)
    spool.close()
    assert read_all(folder) == [first, second, third, fourth]


async def test_every_write_is_synchronous(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags = os.pwrite, []

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    spool = writer(folder)
    assert await append_all(spool, [event(1)]) == [True]
    spool.close()
    assert flags
    assert all(found & os.O_DSYNC for found in flags)


async def test_more_than_a_batch_in_one_turn_is_durable_without_another_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("billing.spool.BATCH_MAX", 1)
    monkeypatch.setattr("billing.spool.REFRESH_S", 60)
    spool = writer(folder)
    async with asyncio.timeout(10):
        assert await append_all(spool, [event(number) for number in range(50)]) == [True] * 50
    spool.close()


def refused(spool: SpoolWriter) -> list[str]:
    return [tier.label for tier in Tier if spool.refuses(tier)]


async def test_unposted_bytes_are_counted_and_lower_tiers_refused_first(folder: Path) -> None:
    frame = len(fmt.encode(event(1)))
    marks = (7 * frame, 9 * frame, 10 * frame)
    spool = writer(folder, marks=marks)
    for events, who in ((6, []), (1, ["batch"]), (1, ["batch"]), (1, ["batch", "standard"])):
        await append_all(spool, [event(1)] * events)
        assert refused(spool) == who
    await append_all(spool, [event(1)])
    assert (spool.bytes_unposted, refused(spool)) == (10 * frame, ["batch", "standard", "priority"])
    assert await append_all(spool, [event(1)]) == [True]  # what is done already is still kept
    spool.close()
    reader = SpoolReader(folder)
    assert len(reader.read(3)) == 3
    reader.acknowledge()
    again = writer(folder, marks=marks)
    assert (again.bytes_unposted, refused(again)) == (8 * frame, ["batch"])
    again.close()


async def test_from_outside_what_is_only_preallocated_does_not_count_as_unposted(folder: Path) -> None:
    spool = writer(folder, segment_bytes=1024 * 1024)
    frame = len(fmt.encode(event(1)))
    for events in (1, 9, 90):  # ends within the first page and within later ones
        before = fmt.unposted_bytes(folder)
        await append_all(spool, [event(1)] * events)
        assert 0 <= before + events * frame - fmt.unposted_bytes(folder) <= 8  # the zeros that a frame ends in
        assert fmt.unposted_bytes(folder, fmt.file_end) > 1000 * frame
    reader = SpoolReader(folder)
    assert len(reader.read(1000)) == 100
    reader.acknowledge()
    assert fmt.unposted_bytes(folder) == 0
    spool.close()


CHILD = """
import asyncio, sys
from pathlib import Path
from core.clock import SystemClock
from core.tiers import Tier
from billing.spool import SpoolWriter
from tests.integration.billing.test_spool import event

async def main():
    spool = SpoolWriter(Path(sys.argv[1]), clock=SystemClock(), segment_bytes=32 * 1024)
    spool.start(asyncio.get_running_loop())
    for number in range(10**6):
        done = asyncio.get_running_loop().create_future()
        for extra in range(3):
            spool.append(event(3 * number + extra), done.set_result if extra == 2 else lambda ok: None)
        assert await done
        print(3 * number + 2, flush=True)

asyncio.run(main())
"""


def test_kill_nine_loses_nothing_acknowledged(tmp_path: Path) -> None:
    folder = tmp_path / "replica-k"
    seen: list[int] = []
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            acknowledged = [int(child.stdout.readline()) for _ in range(120)][-1]
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        acknowledged = int(rest[-1]) if rest else acknowledged
        seen.append(acknowledged)
        numbers = [one.amount_pico for one in read_all(folder)]
        runs = [at for at, number in enumerate(numbers) if number == 0]
        assert len(runs) == len(seen)
        assert numbers[runs[-1] :][: acknowledged + 1] == list(range(acknowledged + 1))

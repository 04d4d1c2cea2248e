"""`tidegate backup` and `restore`: a home comes back whole, and a drill under load with everything killed."""

import asyncio
import contextlib
import os
import signal
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psycopg
import pytest

from cli.backup.archive import ArchiveReader, ArchiveWriter
from tests.fault import bills
from tests.fault.real_platform import MODEL, Platform
from tests.fault.test_books import tidegate
from tests.fault.test_kills import CALLERS, PROMPT, by_hand, everything_posted
from tests.fault.test_up import Starter, database, start
from tests.fault.traffic import Traffic

__all__ = ["start"]  # the fixture


def said(*arguments: str, code: int = 0) -> str:
    done = tidegate(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def one_pico_more(file: Path, copy: Path) -> Path:
    """A backup, whole in itself, of books that are not the ones in it."""
    with ArchiveReader(file) as old, ArchiveWriter(copy, 0) as new:
        manifest = old.manifest()
        for name in manifest.files:
            with new.member(name) as member:
                for piece in old.pieces(name):
                    member.write(piece)
        debit = {currency: str(int(pico) + 1) for currency, pico in manifest.figures.debit.items()}
        figures = msgspec.structs.replace(manifest.figures, debit=debit)
        new.finish(msgspec.structs.replace(manifest, figures=figures))
    return copy


def test_a_home_comes_back_whole(start: Starter, tmp_path: Path) -> None:
    up = start("a")
    (up.home / "objects" / "batch").mkdir()
    (up.home / "objects" / "batch" / "out.jsonl").write_bytes(b"{}\n" * 3)
    file = tmp_path / "one.tgbackup"
    assert "Keep them apart" in said("backup", str(file), "--home", str(up.home), "--with-secrets")
    secrets = tmp_path / "one.tgbackup.secrets.json"
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert secrets.read_bytes() == (up.home / "secrets.json").read_bytes()
    with tarfile.open(file) as archive:
        names = archive.getnames()
    assert {"database.dump", "objects/batch/out.jsonl"} <= set(names)
    assert not any("secrets" in name for name in names)
    assert "is not empty" in said("restore", str(file), "--home", str(up.home), code=1)
    assert start.stop(up) == 0

    restored = tmp_path / "b"
    kept = secrets.rename(tmp_path / "kept.json")
    assert "name the file with --secrets" in said("restore", str(file), "--home", str(restored), code=1)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"PGDMP", b"PGDMq", 1))
    refused = said("restore", str(file), "--home", str(restored), "--secrets", str(kept), code=1)
    assert "is damaged: database.dump is not as it was written" in refused
    assert not restored.exists()
    file.write_bytes(whole)
    other = one_pico_more(file, tmp_path / "other.tgbackup")
    different = said("restore", str(other), "--home", str(restored), "--secrets", str(kept), code=1)
    assert f"differs from the backup: the sum of debits in USD is {10**14} and was {10**14 + 1}" in different
    assert not restored.exists()
    words = said("restore", str(file), "--home", str(restored), "--secrets", str(kept))
    for sentence in ("zero difference to the backup", "the books are right", "the audit trail is right"):
        assert sentence in words
    assert (restored / "objects" / "batch" / "out.jsonl").read_bytes() == b"{}\n" * 3
    assert (restored / "secrets.json").read_bytes() == kept.read_bytes()
    assert (restored / "secrets.json").stat().st_mode & 0o777 == 0o600
    again = start("b")
    with database(again) as connection:
        assert connection.execute("SELECT sum(credit)::text FROM ledger_balance").fetchone() == (str(10**14),)
        with pytest.raises(psycopg.errors.RestrictViolation):
            connection.execute("UPDATE ledger_transfer SET amount = 1")
    assert start.stop(again) == 0
    assert "The secrets are NOT in it" in said("backup", str(tmp_path), "--home", str(restored))  # stopped, to a folder
    assert len(list(tmp_path.glob("tidegate-*T*Z.tgbackup"))) == 1


@pytest.fixture
async def platforms(tmp_path: Path) -> AsyncIterator[tuple[Platform, Platform]]:
    """One with an engine and callers, and a folder for another."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = Platform(tmp_path / "a"), Platform(tmp_path / "b")
    try:
        await first.start_engine()
        await first.start()
        first.offer_simulator()
        yield first, second
    finally:
        await asyncio.to_thread(first.stop)
        await asyncio.to_thread(second.stop)


def kill_everything(platform: Platform) -> None:
    """SIGKILL to `up` first, so that it starts nothing again, then to all it started."""
    assert platform.up is not None
    pids = [platform.pid(name) for name in ("gateway", "poster", "worker", "controller", "api", "postgres", "valkey")]
    platform.up.kill()
    platform.up.wait(30)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended with its parent
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(400)
async def test_restore_drill(platforms: tuple[Platform, Platform], tmp_path: Path) -> None:
    """What was acknowledged before the backup is there, what came later is lost by count, nothing is billed twice."""
    first, second = platforms
    traffic = Traffic(first.facts["base_url"], str(first.facts["api_key"]), MODEL, CALLERS, PROMPT)
    await traffic.start()
    await traffic.until(lambda: traffic.whole() >= 2 * CALLERS, "traffic")
    before = {answer.generation_id for answer in traffic.answers if answer.whole}
    # An answer may leave 20 ms before its event is on disk; events reach the disk in order, so a later one tells.
    await traffic.until(lambda: traffic.whole() >= len(before) + CALLERS, "answers")
    file = tmp_path / "drill.tgbackup"
    await asyncio.to_thread(said, "backup", str(file), "--home", str(first.home), "--with-secrets")
    during = traffic.whole()
    assert during > len(before)  # callers were served all the while
    await traffic.until(lambda: traffic.whole() >= during + CALLERS, "answers after the backup")
    after = {answer.generation_id for answer in traffic.answers if answer.whole}
    await traffic.until(lambda: traffic.whole() >= len(after) + CALLERS, "answers that tell that those are on disk")
    kill_everything(first)
    await traffic.stop()

    words = await asyncio.to_thread(said, "restore", str(file), "--home", str(second.home))
    assert "zero difference to the backup" in words
    await second.start()
    earlier = Traffic("", "", MODEL, 0, "", answers=[a for a in traffic.answers if a.generation_id in before])
    found = await everything_posted(second, earlier)
    log = bills.read_engine_log(first.engine_log)
    bills.check(earlier.answers, found, log, by_hand)
    acknowledged = {answer.generation_id for answer in traffic.answers if answer.whole}
    lost = acknowledged - {bill.generation_id for bill in found}
    assert not lost & before

    assert lost  # and those are they: answered after the backup, in the books of the dead home only

    # Its spool has them too, posted or not, until a segment is full; what is in both is posted once.
    spool = str(first.home / "spool" / "gateway-1")
    adopted = said("spool", "adopt", spool, "--posted-too", "--home", str(second.home))
    assert "Adopted as" in adopted
    on_disk = Traffic("", "", MODEL, 0, "", answers=[a for a in traffic.answers if a.generation_id in after])
    bills.check(on_disk.answers, await everything_posted(second, on_disk), log, by_hand)
    assert "the books are right" in await asyncio.to_thread(said, "ledger", "verify", "--home", str(second.home))
    assert "the audit trail is right" in await asyncio.to_thread(said, "audit", "verify", "--home", str(second.home))

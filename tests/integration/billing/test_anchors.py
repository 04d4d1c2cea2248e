"""Whoever owns the database deletes seals and has the platform seal forged books anew: refused, and named for good."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from billing import anchors, seals, tasks, verify
from cli import ledger, screen
from cli.backup.archive import ArchiveReader, ArchiveWriter, Figures, Manifest
from cli.backup.restore import FOLDERS, _place
from cli.backup.take import _spools
from cli.home import Home
from core.clock import SystemClock
from core.db import Sessions, transaction
from core.settings import Database, Settings
from core.tasks import TaskContext
from core.telemetry import TaskFigures, create_registry, render
from tests.factories import billing as make
from tests.integration.billing.test_verify import owner_of

FORGE = "UPDATE ledger_tx SET note = 'forged', body_sha256 = sha256('forged') WHERE kind <> 'usage'"
Say = list[str]


@pytest.fixture
def settings(database_settings: Database, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": dict.fromkeys(("pepper", "signing", "sealing"), "00" * 32),
            "database": database_settings,
            "valkey": {"url": "unix:///nowhere", "broker_url": "unix:///nowhere"},
        }
    )


@pytest.fixture
def said(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Say:
    """What the command line says; it finds the test's database."""

    @contextmanager
    def database(_home: Path) -> Iterator[Settings]:
        yield settings

    lines: Say = []
    monkeypatch.setattr(ledger, "database", database)
    monkeypatch.setattr(screen, "say", lines.append)
    return lines


async def seal(settings: Settings) -> int:
    return await asyncio.to_thread(ledger.seal, settings.home)


async def verified(settings: Settings, said: Say) -> str:
    await asyncio.to_thread(verify.main, settings, said.append, lambda _: None)
    return said[-1]


async def two_seals(sessions: Sessions, settings: Settings) -> seals.SealHead:
    tenant_id = await make.tenant(sessions, "1")
    for key in ("a", "b"):
        await make.add_credit(sessions, tenant_id, "1", key)
        assert await seal(settings) == 0
    head = anchors.load(settings.home)
    assert head.seq == 2
    return head


async def seals_of(sessions: Sessions) -> int:
    async with transaction(sessions) as session:
        return (await seals.head(session)).seq


@pytest.mark.parametrize(
    ("kept", "problem"),
    [(0, "seal 1: it was anchored outside the database and is gone"), (1, "seal 2: it was anchored")],
)
async def test_seals_that_were_deleted_are_not_made_anew(
    sessions: Sessions, settings: Settings, said: Say, kept: int, problem: str
) -> None:
    """All of them, or the last alone, with the rows they covered forged; by the command and by the worker."""
    anchored = await two_seals(sessions, settings)
    with owner_of(settings.database) as owner:
        if not kept:
            owner.execute(FORGE)
        owner.execute(f"DELETE FROM ledger_leaf WHERE seal_seq > {kept}")
        owner.execute(f"DELETE FROM ledger_seal WHERE seq > {kept}")
    assert problem in await verified(settings, said)
    assert await seal(settings) == 1
    assert "wrong: ledger_seal: seal 2: it was anchored outside the database and is gone" in said[-2]
    context = TaskContext(settings, sessions, SystemClock(), TaskFigures(create_registry()))
    with pytest.raises(tasks.LedgerWrongError, match="seal 2"):
        await tasks.seal_ledger(context)
    assert b"\ntidegate_ledger_anchor_lost 1.0" in render(context.figures._registry)
    assert await seals_of(sessions) == kept
    assert anchors.load(settings.home) == anchored
    assert problem in await verified(settings, said)


async def test_seals_made_anew_by_hand_do_not_take_the_anchor(
    sessions: Sessions, settings: Settings, said: Say
) -> None:
    """A longer chain over forged rows, with the anchored seal put back into it, until the anchor has moved on."""
    anchored = await two_seals(sessions, settings)
    with owner_of(settings.database) as owner:
        owner.execute("CREATE TABLE kept AS SELECT * FROM ledger_seal WHERE seq = 2")
        owner.execute(FORGE)
        owner.execute("DELETE FROM ledger_leaf")
        owner.execute("DELETE FROM ledger_seal")
        owner.execute("INSERT INTO seal_queue (tx_id) SELECT id FROM ledger_tx")  # what sealing takes for new
        for number in range(3):
            async with transaction(sessions) as session:
                assert await seals.seal(session)
            await make.add_credit(sessions, await make.tenant(sessions, "1"), "1", f"later{number}")
        assert await seal(settings) == 1
        assert "seal 2: it is not the one that was anchored" in said[-2]
        owner.execute("DELETE FROM ledger_seal WHERE seq = 2")
        owner.execute("INSERT INTO ledger_seal TABLE kept")
    assert await seal(settings) == 1
    assert "seal 3: it does not follow the seal before it" in said[-2]
    assert anchors.load(settings.home) == anchored


async def test_sealing_goes_on_behind_an_older_anchor(sessions: Sessions, settings: Settings, said: Say) -> None:
    """As after a crash between commit and anchor, or where another host's worker sealed; and it never goes back."""
    await two_seals(sessions, settings)
    async with transaction(sessions) as session:
        await make.add_credit(sessions, await make.tenant(sessions, "1"), "1", "c")
        assert await seals.seal(session)
    assert await seal(settings) == 0
    newest = anchors.load(settings.home)
    assert newest.seq == 3
    assert not anchors.save(settings.home, seals.SealHead(2, bytes(32)))
    with pytest.raises(seals.AnchorLostError):
        anchors.save(settings.home, seals.SealHead(3, bytes(32)))
    assert anchors.load(settings.home) == newest
    assert "the books are right" in await verified(settings, said)


async def test_a_restored_home_has_its_backups_anchor(
    sessions: Sessions, settings: Settings, said: Say, tmp_path: Path
) -> None:
    """Sealing goes on behind it."""
    anchored = await two_seals(sessions, settings)
    with ArchiveWriter(tmp_path / "x", 0) as archive:
        _spools(archive, settings)
        archive.finish(Manifest(1, "0", "", "", 0, Figures({}, {}, {}), dict(archive.files)))
    new = Home(tmp_path / "new", tmp_path / "run")
    with ArchiveReader(tmp_path / "x") as archive:
        for name in archive.manifest().files:
            assert name.partition("/")[0] in FOLDERS
            _place(new, name, archive.pieces(name))
    restored = settings.model_copy(update={"home": new.path})
    assert anchors.load(restored.home) == anchored
    await make.add_credit(sessions, await make.tenant(sessions, "1"), "1", "c")
    async with transaction(sessions) as session:
        assert await seals.seal(session, anchors.load(restored.home))
    assert "the books are right" in await verified(restored, said)

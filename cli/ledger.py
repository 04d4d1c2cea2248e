"""`tidegate ledger …` beside `verify`: trial balance, reconciliation, seals, the close of a month, write-offs."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import date, datetime, timedelta
from pathlib import Path

from billing import anchors, periods, reconcile, seals, usage_days
from cli import screen
from cli.books import database
from core.clock import SystemClock
from core.db import Sessions, create_engine, create_sessions, transaction
from core.errors import PlatformError
from core.ids import IdKind, format_id
from core.money import format_pico
from core.resp import RespClient, RespUnavailable
from core.settings import Settings
from tenants import audit
from tenants.types import SYSTEM

REASON_MAX_CHARS = 500


def month_of(text: str) -> date:
    """Read ``2026-10``.

    Raises:
        ValueError: it is no month.
    """
    return datetime.strptime(text, "%Y-%m").date()  # noqa: DTZ007 - a month, not an instant


def _run(home: Path, work: Callable[[Settings, Sessions], Awaitable[int]]) -> int:
    with database(home) as settings:

        async def main() -> int:
            engine = create_engine(settings.database)
            try:
                return await work(settings, create_sessions(engine))
            except PlatformError as error:
                screen.say(error.message)
                return 1
            finally:
                await engine.dispose()

        return asyncio.run(main())


def trial_balance(home: Path, month: date | None) -> int:
    """Print debits and credits of each kind of account; 1 when they differ."""

    async def work(_settings: Settings, sessions: Sessions) -> int:
        async with transaction(sessions) as session:
            lines = await periods.trial_balance(session, month)
        sums: dict[tuple[str, str], list[int]] = {}
        for line in lines:
            for key in ((line.currency, line.code), (line.currency, "~")):
                moved = sums.setdefault(key, [0, 0])
                moved[0] += line.debit
                moved[1] += line.credit
        for (currency, code), (debit, credit) in sorted(sums.items()):
            name = "total" if code == "~" else code
            screen.say(f"{currency}  {name:<28} {format_pico(debit):>30} {format_pico(credit):>30}")
        screen.say(f"sha256 {periods.digest(lines).hex()}")
        return int(any(debit != credit for (_, code), (debit, credit) in sums.items() if code == "~"))

    return _run(home, work)


def compare(home: Path) -> int:
    """Compare events, rollups and ledger, and with Valkey there its figures; 1 when something differs."""

    async def work(settings: Settings, sessions: Sessions) -> int:
        tenants, wrong = await reconcile.books(sessions)
        screen.say(f"{screen.count(tenants, 'tenant')}: events, rollups and ledger compared to the pico")
        try:
            client = await RespClient.connect(settings.valkey.url.get_secret_value())
            try:
                count, off = await reconcile.figures(sessions, client)
            finally:
                await client.close()
            wrong += off
            screen.say(f"{screen.count(count, 'credit figure')} compared, tolerance {reconcile.TOLERANCE_NANO} nano")
        except (RespUnavailable, OSError):
            screen.say("Valkey is away: its credit figures were not compared")
        for one in wrong:
            screen.say(f"wrong: {format_id(IdKind.TENANT, one.tenant_id)}: {one.problem}")
        return int(bool(wrong))

    return _run(home, work)


def seal(home: Path) -> int:
    """Seal what no seal covers yet, and print the head; 1 when the seals are not those that this home anchored."""

    async def work(settings: Settings, sessions: Sessions) -> int:
        sealed = 0
        while True:
            try:
                count, newest, _ = await anchors.seal(sessions, settings.home)
            except seals.AnchorLostError as lost:
                screen.say(f"wrong: ledger_seal: {lost}. Nothing was sealed and the anchor stays.")
                screen.say("See docs/runbooks/backup.md when the database was put back to an earlier time on purpose.")
                return 1
            sealed += count
            if not count:
                break
        screen.say(f"{sealed:,} rows sealed; the head is {newest.seq}:{newest.hash.hex()}")
        return 0

    return _run(home, work)


def close(home: Path, month: date, override: str | None) -> int:
    """Close a month for good; with `override`, the reason, also when usage of it may be on a disk."""

    async def work(settings: Settings, sessions: Sessions) -> int:
        grace = timedelta(hours=settings.books.close_grace_hours)
        reason = (override or "").strip()[:REASON_MAX_CHARS]
        done = await periods.close(sessions, month, SystemClock().now(), grace=grace, override_reason=reason)
        details = {"month": f"{month:%Y-%m}", "by": "tidegate ledger", "override": reason}
        async with transaction(sessions) as session:
            audit.record(session, SYSTEM, "ledger.close", details=details)
        digest = (done.trial_balance_sha256 or b"").hex()
        screen.say(f"{month:%Y-%m} is closed; its trial balance has the sha256 {digest}")
        return 0

    return _run(home, work)


def drop_days(home: Path, keep_days: int | None) -> int:
    """Drop the usage events of days that are not kept any longer; 1 when the books are wrong, and then none."""

    async def work(settings: Settings, sessions: Sessions) -> int:
        kept = settings.retention.usage_days if keep_days is None else keep_days
        if not kept:
            screen.say("Usage events are kept for ever (TIDEGATE_RETENTION__USAGE_DAYS is 0).")
            return 0
        dropped, staying, wrong = await usage_days.drop_due(
            sessions, SystemClock().now(), kept, "tidegate ledger", anchor=anchors.load(home)
        )
        if wrong is not None:
            screen.say(f"wrong: {wrong.table}: {wrong.row}: {wrong.problem}. Nothing was dropped.")
            return 1
        for gone in dropped:
            screen.say(f"{gone.day}  dropped  {gone.events:,} events, {gone.hash.hex()}")
        for one in staying:
            screen.say(f"{one.day}  stays    {one.hindrance}")
        if not dropped and not staying:
            screen.say(f"No day is older than {kept} days.")
        return 0

    return _run(home, work)


def write_off(home: Path, replica: str) -> int:
    """Give back what is held for a replica that never returns."""

    async def work(settings: Settings, sessions: Sessions) -> int:
        try:
            client = await RespClient.connect(settings.valkey.url.get_secret_value())
        except (RespUnavailable, OSError):
            screen.say("Valkey is away: start the platform first.")
            return 1
        try:
            lost = await reconcile.write_off(client, replica)
        finally:
            await client.close()
        async with transaction(sessions) as session:
            for tenant_id, requests in lost.items():
                details = {"replica": replica, "requests": len(requests), "by": "tidegate ledger"}
                audit.record(session, SYSTEM, "ledger.write_off", tenant_id=tenant_id, details=details)
        count = sum(map(len, lost.values()))
        screen.say(f"{count:,} holds of {replica} given back to {len(lost):,} tenants")
        return 0

    return _run(home, work)

"""The preview of a draft as operators ask for it: by route and by command."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import pytest

from cli import prices as command
from core import db
from core.ids import IdKind, format_id
from core.settings import Database
from tenants.types import OperatorRole
from tests.factories import billing as make
from tests.factories.people import operator_person
from tests.integration.billing.test_price_preview import DAY, NOON, at, draft_of, post
from tests.integration.control.conftest import Client

DAYS = {"start": "2025-11-05", "end": "2025-11-05"}


async def _used(sessions: db.Sessions) -> tuple[str, list[str]]:
    """Three tenants with 3, 2 and 1 requests at 3.00, and a draft at 2.00."""
    prices = await make.publish_prices(sessions, make.items({**make.PRICES, "input": "3.00"}))
    made = []
    for count in (1, 3, 2):
        tenant_id = await make.tenant(sessions, "5")
        s = make.schedule(prices, tenant_id)
        await post(sessions, *(at(make.event(tenant_id, s), NOON) for _ in range(count)))
        made.append((count, format_id(IdKind.TENANT, tenant_id)))
    draft = await draft_of(sessions, prices, *make.items(make.PRICES))
    return format_id(IdKind.PRICE_VERSION, draft), [name for _, name in sorted(made, reverse=True)]


async def test_the_largest_difference_comes_first_page_by_page(admin: Client, sessions: db.Sessions) -> None:
    draft, tenants = await _used(sessions)
    path = f"/api/v1/admin/price-versions/{draft}/impact"
    first = (await admin.get(path, params={**DAYS, "limit": 2})).json()
    rest = (await admin.get(path, params={**DAYS, "limit": 2, "offset": first["next_offset"]})).json()
    assert [one["tenant_id"] for one in (*first["tenants"], *rest["tenants"])] == tenants
    assert (first["next_offset"], rest["next_offset"]) == (2, None)
    assert first["total"] == rest["total"]
    assert (first["total"]["paid"], first["total"]["difference"]) == ("0.086178000000", "-0.012630000000")
    (line,) = first["tenants"][0]["lines"]
    assert (line["tier"], line["would_pay"], line["by_event"]) == ("standard", "0.036774000000", 3)
    table = await admin.get(path, params={**DAYS, "format": "csv"})
    head, *lines = table.text.splitlines()
    assert head.startswith("tenant_id,model_id,tier,currency,requests,paid,would_pay,difference")
    assert [line.split(",")[0] for line in lines] == tenants
    assert lines[0].split(",")[4:8] == ["3", "0.043089000000", "0.036774000000", "-0.006315000000"]


async def test_days_and_rights_are_checked(anonymous: Client, admin: Client, sessions: db.Sessions) -> None:
    draft, _ = await _used(sessions)
    path = f"/api/v1/admin/price-versions/{draft}/impact"
    for days in ({"start": "2025-11-06", "end": "2025-11-05"}, {"start": "2025-01-01", "end": "2025-11-05"}):
        answer = await admin.get(path, params=days)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_RANGE")
    for role, status in ((OperatorRole.SUPPORT, 403), (OperatorRole.FINANCE, 200)):
        visitor = anonymous.visited_by(await operator_person(sessions, role))
        assert (await visitor.get(path, params=DAYS)).status_code == status


@pytest.fixture
def by_environment(database_settings: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds the database of this test."""
    monkeypatch.setenv("TIDEGATE_DATABASE__URL", database_settings.url.get_secret_value())
    for name in ("URL", "BROKER_URL"):
        monkeypatch.setenv(f"TIDEGATE_VALKEY__{name}", "unix:///nowhere")
    for name in ("PEPPER", "SIGNING", "SEALING"):
        monkeypatch.setenv(f"TIDEGATE_SECRETS__{name}", "00" * 32)


@pytest.mark.usefixtures("by_environment")
async def test_the_command_writes_the_same(
    admin: Client, sessions: db.Sessions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, _ = await _used(sessions)

    def run(kind: str, output: Path | None) -> int:
        days = (DAY - timedelta(days=1), DAY)
        return command.impact(tmp_path, draft, days, kind=kind, output=output)

    file = tmp_path / "impact.json"
    assert await asyncio.to_thread(run, "json", file) == 0
    assert capsys.readouterr().err == "1 of 2 days\n2 of 2 days\n"
    by_route = (await admin.get(f"/api/v1/admin/price-versions/{draft}/impact", params=DAYS)).json()
    by_command = json.loads(await asyncio.to_thread(file.read_text))
    assert by_command["tenants"] == by_route["tenants"]
    assert await asyncio.to_thread(run, "table", None) == 0
    shown = capsys.readouterr().out
    assert "6 requests from 2025-11-04 to 2025-11-05, USD: 6 rated one by one" in shown
    assert "-0.012630000000" in shown
    draft = "pver_" + "0" * 32
    assert await asyncio.to_thread(run, "csv", None) == 1
    assert "There is no price version" in capsys.readouterr().out

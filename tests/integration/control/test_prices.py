"""Price books over the API: what is refused and why, what is warned of, and what is shown before it is published."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from core import db
from core.ids import IdKind, format_id, new_uuid
from tests.factories import billing as make
from tests.factories import catalog
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
MODEL = format_id(IdKind.MODEL, make.MODEL)
STANDARD = {"model_id": MODEL, "tier": "standard"}


def item(meter: str, price: str, **members: Any) -> dict[str, Any]:
    return {**STANDARD, "meter": meter, "unit_price": price, **members}


LIST = [item("input", "2"), item("cached_input", "0.20"), item("output", "6")]


async def made(answer_of: Any) -> dict[str, Any]:
    answer = await answer_of
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
async def versions(admin: Client, sessions: db.Sessions) -> str:
    """The path of a list's versions."""
    await catalog.know(sessions, make.MODEL)
    book = await made(admin.post(f"{ADMIN}/price-books", {"name": "list", "currency": "USD"}))
    return f"{ADMIN}/price-books/{book['id']}/versions"


async def tenant(admin: Client, currency: str = "USD") -> str:
    found = await made(admin.post(f"{ADMIN}/tenants", {"name": new_uuid().hex, "currency": currency}))
    return str(found["id"])


def path_of(version: dict[str, Any]) -> str:
    return f"{ADMIN}/price-versions/{version['id']}"


async def test_a_draft_is_priced_compared_changed_and_published(admin: Client, versions: str) -> None:
    acme = await tenant(admin)
    first = await made(admin.post(versions, {"items": LIST}))
    assert (first["problem"], first["warnings"]) == ("", [])
    assert (await admin.post(f"{path_of(first)}/publish", {})).status_code == 200

    long = [
        item(one["meter"], price, above_input_tokens=200_000)
        for one, price in zip(LIST, ("4", "0.4", "9"), strict=True)
    ]
    off = {"tenant_id": acme, **STANDARD}
    second = await made(
        admin.post(
            versions,
            {"items": [*long, item("min_charge", "0.0001")], "discounts": [{**off, "percent_off": "12.5"}]},
        )
    )
    shown = (await admin.get(path_of(second))).json()
    assert shown["discounts"] == [{**off, "percent_off": "12.5000"}]
    assert {(i["meter"], i["above_input_tokens"], i["unit_price"]) for i in shown["items"]} == {
        ("input", 0, "2.000000"),
        ("cached_input", 0, "0.200000"),
        ("output", 0, "6.000000"),
        ("input", 200_000, "4.000000"),
        ("cached_input", 200_000, "0.400000"),
        ("output", 200_000, "9.000000"),
        ("min_charge", 0, "0.000100000000"),
    }
    compared = (await admin.get(f"{path_of(second)}/changes")).json()
    assert (compared["against"], compared["total"], compared["problem"]) == (first["id"], 10, "")
    own = {(c["meter"], c["above_input_tokens"]): c["after"] for c in compared["changes"] if c["tenant_id"] == acme}
    assert own == {
        ("input", 0): "1.750000",
        ("cached_input", 0): "0.175000",
        ("output", 0): "5.250000",
        ("input", 200_000): "3.500000",
        ("cached_input", 200_000): "0.350000",
        ("output", 200_000): "7.875000",
    }
    changed = await admin.patch(
        path_of(second),
        {
            "items": [item("cached_input", "2.5")],
            "remove": [{**STANDARD, "meter": "min_charge"}],
            "remove_discounts": [off],
        },
    )
    assert changed.status_code == 200, changed.text
    assert changed.json()["discounts"] == []
    assert [one["code"] for one in changed.json()["warnings"]] == ["CACHED_ABOVE_INPUT", "LARGE_CHANGE", "STEP_CHEAPER"]
    late = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    published = await admin.post(f"{path_of(second)}/publish", {"effective_at": late})
    assert (published.status_code, published.json()["state"]) == (200, "published")
    assert len(published.json()["warnings"]) == 3  # a warning is no refusal
    trail = (await admin.get(f"{ADMIN}/audit", params={"action": "price_version.change"})).json()["items"]
    assert trail[0]["details"]["prices"] == {
        f"{MODEL} standard cached_input": {"from": "0.200000", "to": "2.500000"},
        f"{MODEL} standard min_charge": {"from": "0.000100000000", "to": None},
        f"{MODEL} standard percent_off {acme}": {"from": "12.5000", "to": None},
    }


async def test_a_draft_is_deleted_and_what_is_published_is_not(admin: Client, versions: str) -> None:
    draft = await made(admin.post(versions, {"items": LIST}))
    assert (await admin.call("DELETE", path_of(draft))).status_code == 204
    assert (await admin.get(path_of(draft))).status_code == 404
    assert (await admin.call("DELETE", path_of(draft))).status_code == 404
    kept = await made(admin.post(versions, {"items": LIST}))
    await admin.post(f"{path_of(kept)}/publish", {})
    refused = await admin.call("DELETE", path_of(kept))
    assert (refused.status_code, refused.json()["code"]) == (409, "PRICE_VERSION_PUBLISHED")
    trail = (await admin.get(f"{ADMIN}/audit", params={"action": "price_version.delete"})).json()["items"]
    assert [record["target_id"] for record in trail] == [draft["id"]]


async def test_mistakes_are_refused_by_name(admin: Client, versions: str) -> None:
    nobody, chinese = format_id(IdKind.TENANT, new_uuid()), await tenant(admin, "CNY")
    nothing = format_id(IdKind.MODEL, new_uuid())
    off = {"tenant_id": nobody, **STANDARD, "percent_off": "5"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"items": [*LIST, item("input", "3")]}, "input price of model .* twice"),
        ({"items": [item("input", "1", model_id=nothing)]}, "There is no model"),
        ({"items": [item("input", "1", tenant_id=nobody)]}, "does not exist"),
        ({"items": [item("input", "1", tenant_id=chinese)]}, "is billed in CNY, not in USD"),
        ({"items": [], "discounts": [off]}, "does not exist"),
        ({"items": [], "discounts": [{**off, "percent_off": "0"}]}, "more than 0 and at most 100"),
        ({"items": [], "discounts": [{**off, "percent_off": "100.5"}]}, "more than 0 and at most 100"),
        ({"items": [item("request", "1", above_input_tokens=5)]}, "per request: it has no step"),
        ({"items": [item("min_charge", "1000001")]}, "too large"),
        ({"items": [item("input", "0.0000001")]}, "more than 6 decimals"),
    ]
    for body, says in cases:
        answer = await admin.post(versions, body)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_PRICE"), body
        assert re.search(says, answer.json()["detail"]), answer.text
    for wrong in (item("input", "-1"), item("input", "1", above_input_tokens=-1), item("thoughts", "1")):
        assert (await admin.post(versions, {"items": [wrong]})).status_code == 422

    for items, says in (
        ([], "The draft has no prices."),
        ([item("output", "6")], "has no input price."),
        (
            [*LIST, item("input", "4", above_input_tokens=9)],
            "no cached_input and no output price above 9 input tokens.",
        ),
    ):
        draft = await made(admin.post(versions, {"items": items}))
        assert draft["problem"].endswith(says)
        refused = await admin.post(f"{path_of(draft)}/publish", {})
        assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_PRICE")
        assert refused.json()["detail"].endswith(says)
    good = await made(admin.post(versions, {"items": LIST}))
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    late = await admin.post(f"{path_of(good)}/publish", {"effective_at": past})
    assert (late.status_code, late.json()["code"]) == (400, "INVALID_EFFECTIVE_AT")


async def test_a_tier_that_was_priced_and_is_missing_is_warned_of(admin: Client, versions: str) -> None:
    batch = [{**one, "tier": "batch"} for one in LIST]
    first = await made(admin.post(versions, {"items": [*LIST, *batch]}))
    await admin.post(f"{path_of(first)}/publish", {})
    draft = await made(admin.post(versions, {"items": LIST, "complete": True}))
    ((code, tier, message),) = [(one["code"], one["tier"], one["message"]) for one in draft["warnings"]]
    assert (code, tier) == ("DROPPED", "batch")
    assert message.endswith("has no price any more, so that it is not served.")

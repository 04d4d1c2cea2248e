"""Operators make, change and lock out operators."""

from datetime import UTC, datetime, timedelta

from tests.integration.control.conftest import Client

OPERATORS = "/api/v1/admin/operators"


async def _second(admin: Client) -> tuple[str, str]:
    """Make an operator; return its path and a token."""
    made = await admin.post(OPERATORS, {"name": "second"})
    assert made.status_code == 201
    path = f"{OPERATORS}/{made.json()['id']}"
    issued = await admin.post(f"{path}/tokens", {})
    assert issued.status_code == 201
    return path, issued.json()["token"]


async def _status(anonymous: Client, token: str) -> int:
    return (await anonymous.acting_as(token).get(OPERATORS)).status_code


async def test_a_token_works_until_all_are_revoked(admin: Client, anonymous: Client) -> None:
    path, token = await _second(admin)
    assert await _status(anonymous, token) == 200
    assert (await admin.post(f"{path}/tokens/revoke")).status_code == 204
    assert await _status(anonymous, token) == 401
    fresh = (await admin.post(f"{path}/tokens", {})).json()["token"]
    assert await _status(anonymous, fresh) == 200


async def test_a_disabled_operator_stays_out_with_every_token(admin: Client, anonymous: Client) -> None:
    path, token = await _second(admin)
    assert (await admin.post(f"{path}/disable")).json()["disabled_at"] is not None
    assert await _status(anonymous, token) == 401
    fresh = (await admin.post(f"{path}/tokens", {})).json()["token"]
    assert await _status(anonymous, fresh) == 401


async def test_tokens_are_shown_once(admin: Client) -> None:
    _, token = await _second(admin)
    for path in (OPERATORS, "/api/v1/admin/audit"):
        answer = await admin.get(path)
        assert answer.status_code == 200
        assert token not in answer.text
        assert token[4:12] not in answer.text


async def test_a_token_of_the_past_is_refused_and_names_are_unique(admin: Client) -> None:
    path, _ = await _second(admin)
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    refused = await admin.post(f"{path}/tokens", {"expires_at": past})
    assert (refused.status_code, refused.json()["param"]) == (400, "expires_at")
    assert (await admin.post(OPERATORS, {"name": "second"})).status_code == 409
    for method_path in ("tokens", "tokens/revoke", "disable"):
        assert (await admin.post(f"{OPERATORS}/opr_{'0' * 32}/{method_path}", {})).status_code == 404

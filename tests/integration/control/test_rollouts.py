"""Rollouts over the API: begun, read, cancelled, followed as events; each with its audit record."""

from datetime import timedelta
from typing import Any

import pytest

from api.admin import rollout_events
from api.services import Services
from catalog import rollouts
from catalog.rollout_types import Move, RolloutState
from core import db
from core.clock import ManualClock
from core.ids import IdKind, format_id, parse_id
from tests.factories.catalog import NOW, deploy
from tests.factories.rollouts import second_version
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"


class Hurrying(ManualClock):
    """Two seconds go by from look to look."""

    def monotonic(self) -> float:
        self.advance(2)
        return super().monotonic()


async def _begin(admin: Client, sessions: db.Sessions, **body: Any) -> dict[str, Any]:
    model_id, version_id = await second_version(sessions, await deploy(sessions, "m", min_scale=1))
    path = f"{ADMIN}/models/{format_id(IdKind.MODEL, model_id)}/rollouts"
    answer = await admin.post(path, {"version_id": format_id(IdKind.MODEL_VERSION, version_id), **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_a_rollout_is_begun_read_and_cancelled(admin: Client, sessions: db.Sessions) -> None:
    steps = [{"percent": 1, "seconds": 60}, {"percent": 50.5, "requests": 7}]
    made = await _begin(admin, sessions, steps=steps, shadow={"percent": 1, "comparisons": 5})
    assert (made["state"], made["names"], made["percent"]) == ("requested", ["m"], 0.0)
    assert [step["parts"] for step in made["plan"]["steps"]] == [100, 5050]
    path = f"{ADMIN}/rollouts/{made['id']}"
    read = (await admin.get(path)).json()
    assert read["notes"][0]["state"] == "requested"
    assert read["figures"]["canary"]["requests"] == 0
    assert [one["id"] for one in (await admin.get(f"{ADMIN}/rollouts")).json()["items"]] == [made["id"]]
    of_model = await admin.get(f"{ADMIN}/rollouts?model_id={made['model_id']}")
    assert len(of_model.json()["items"]) == 1
    cancelled = await admin.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["wish"]) == (200, "cancelled")
    records = (await admin.get(f"{ADMIN}/audit?action=rollout.")).json()["items"]
    assert [(one["action"], one["target_id"]) for one in records] == [
        ("rollout.cancel", made["id"]),
        ("rollout.start", made["id"]),
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"steps": [{"percent": 50}, {"percent": 10}]},
        {"steps": [{"percent": 100}]},
        {"steps": [{"percent": 1}], "room": "instead"},
        {"shadow": {"percent": 1}, "room": "instead"},
    ],
)
async def test_plans_that_cannot_work_are_refused(admin: Client, sessions: db.Sessions, body: dict[str, Any]) -> None:
    model_id, version_id = await second_version(sessions, await deploy(sessions, "m", min_scale=1))
    path = f"{ADMIN}/models/{format_id(IdKind.MODEL, model_id)}/rollouts"
    answer = await admin.post(path, {"version_id": format_id(IdKind.MODEL_VERSION, version_id), **body})
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ROLLOUT")


async def test_after_the_switch_it_is_rolled_back_not_cancelled(admin: Client, sessions: db.Sessions) -> None:
    made = await _begin(admin, sessions)
    async with db.transaction(sessions) as session:
        known = await rollouts.get(session, parse_id(IdKind.ROLLOUT, made["id"]))
        await rollouts.move(session, known, Move(RolloutState.SWITCHING), now=NOW)
    path = f"{ADMIN}/rollouts/{made['id']}"
    late = await admin.post(f"{path}/cancel")
    assert (late.status_code, late.json()["code"]) == (409, "ROLLOUT_TOO_LATE")
    assert (await admin.post(f"{path}/rollback")).json()["wish"] == "rolled_back"


async def test_its_moves_are_events_and_nothing_is_missed_between_two_streams(
    admin: Client, services: Services, sessions: db.Sessions
) -> None:
    made = await _begin(admin, sessions)
    rollout_id = parse_id(IdKind.ROLLOUT, made["id"])
    async with db.transaction(sessions) as session:
        known = await rollouts.get(session, rollout_id)
        ended = await rollouts.move(session, known, Move(RolloutState.FAILED, "no room"), now=NOW + timedelta(1))
        assert ended is not None
        notes = await rollouts.notes(session, rollout_id)
    answer = await admin.get(f"{ADMIN}/rollouts/{made['id']}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[0] == "retry: 1000"
    assert [event.splitlines()[0] for event in events[1:3]] == [f"id: {note.id}" for note in notes]
    assert events[-1] == 'event: ended\ndata: {"state":"failed"}'
    again = await admin.get(f"{ADMIN}/rollouts/{made['id']}/events", headers={"last-event-id": str(notes[0].id)})
    assert "requested" not in again.text
    assert "no room" in again.text


async def test_a_stream_of_events_is_closed_in_time(admin: Client, sessions: db.Sessions) -> None:
    made = await _begin(admin, sessions)
    events = rollout_events.follow(sessions, parse_id(IdKind.ROLLOUT, made["id"]), 0, clock=Hurrying(), look_s=0)
    pieces = [piece async for piece in events]
    assert b": still there\n\n" in pieces
    assert len(pieces) < 12

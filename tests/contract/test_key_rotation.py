"""Secrets and peppers turn while gateways run and start again: real processes, one database."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import httpx

from core import db
from core.clock import SystemClock
from core.settings import Database
from tenants import api_keys, key_secrets
from tenants.credentials import Peppers
from tenants.key_types import KeyPolicy
from tests.factories.gateway_process import Process, Seeded, gateway_process, seed
from tests.factories.tenants import PEPPER
from tests.waiting import until

NEXT = bytes(range(32, 64))
TURNED = {"TIDEGATE_SECRETS__PEPPER": NEXT.hex()}
BOTH = {**TURNED, "TIDEGATE_SECRETS__PREVIOUS_PEPPERS": f'["{PEPPER.hex()}"]'}


async def _status(gateway: Process, secret: str) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
        answer = await client.get("/v1/models")
    return answer.status_code, answer.json().get("error", {}).get("code", "")


async def _all_are(gateways: Sequence[Process], wanted: dict[str, tuple[int, str]]) -> None:
    """Every gateway comes to answer every secret so."""

    async def so() -> bool:
        return all(
            [await _status(gateway, secret) == answer for gateway in gateways for secret, answer in wanted.items()]
        )

    await until(so)


async def _rotate(sessions: db.Sessions, seeded: Seeded, overlap: timedelta) -> str:
    who = seeded.customer
    async with db.transaction(sessions) as session:
        _, secret = await api_keys.rotate(
            session, who.tenant.id, who.key.id, pepper=PEPPER, overlap=overlap, policy=KeyPolicy(SystemClock().now())
        )
    return secret


WORKS, ENDED = (200, ""), (401, "KEY_REVOKED")


async def test_an_overlap_holds_on_every_replica_and_over_a_restart(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> None:
    seeded = await seed(sessions, "http://127.0.0.1:9/")
    first = seeded.customer.secret
    async with gateway_process(database_settings, valkey, tmp_path, replica="g1") as one:
        second = await _rotate(sessions, seeded, timedelta(hours=1))
        async with gateway_process(database_settings, valkey, tmp_path, replica="g2") as two:
            await _all_are((one, two), {first: WORKS, second: WORKS})
        third = await _rotate(sessions, seeded, timedelta(hours=1))  # within the overlap: the oldest ends
        async with gateway_process(database_settings, valkey, tmp_path, replica="g2") as two:  # started again
            await _all_are((one, two), {first: ENDED, second: WORKS, third: WORKS})
            last = await _rotate(sessions, seeded, timedelta(0))
            await _all_are((one, two), {first: ENDED, second: ENDED, third: ENDED, last: WORKS})


async def test_a_pepper_turns_without_a_key_that_stops_working(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> None:
    """Replica by replica: one that knows the old pepper alone serves beside one that has turned."""
    seeded = await seed(sessions, "http://127.0.0.1:9/")
    who = seeded.customer
    async with db.transaction(sessions) as session:
        _, unused = await api_keys.create(session, who.tenant.id, who.project.id, name="unused", pepper=PEPPER)

    async def left() -> list[int]:
        async with db.transaction(sessions) as session:
            return [use.api_keys for use in await key_secrets.pepper_use(session, Peppers(NEXT, (PEPPER,)))]

    async with (
        gateway_process(database_settings, valkey, tmp_path, replica="g1") as old,
        gateway_process(database_settings, valkey, tmp_path, replica="g2", settings=BOTH) as turned,
    ):
        assert await left() == [0, 2]
        await _all_are((old, turned), {who.secret: WORKS})

        async def stored() -> bool:
            return await left() == [1, 1]

        await until(stored)
        await _all_are((old, turned), {who.secret: WORKS, unused: WORKS})
        async with db.transaction(sessions) as session:
            await api_keys.revoke(session, who.tenant.id, who.key.id, clock=SystemClock())
        await _all_are((old, turned), {who.secret: ENDED})
    async with gateway_process(database_settings, valkey, tmp_path, replica="g1", settings=TURNED) as alone:
        await _all_are((alone,), {who.secret: ENDED, unused: (401, "INVALID_API_KEY")})

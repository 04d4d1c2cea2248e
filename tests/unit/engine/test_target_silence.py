"""How a gateway notices that an engine says nothing any more."""

import asyncio

from engine.client import Flight, Target, UpstreamPool


class Nobody:
    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None: ...

    def on_data(self, block: bytes) -> None: ...

    def on_end(self, failure: object) -> None: ...


async def test_silence_begins_with_an_unanswered_call_and_ends_with_a_byte() -> None:
    pool = UpstreamPool(asyncio.get_running_loop(), lambda: 0.0, connections_max=1)
    target: Target = pool.target("http://127.0.0.1:1")
    pool.listen(1.0)
    assert target.silent_since == 0.0  # it owes nothing
    flight = Flight(pool, target, b"", Nobody())
    pool.listen(2.0)
    pool.listen(3.0)
    assert target.silent_since == 2.0
    flight.abort()
    pool.listen(4.0)
    assert target.silent_since == 2.0  # whoever left has not made it speak
    target.heard = True
    pool.listen(5.0)
    assert (target.silent_since, target.heard) == (0.0, False)

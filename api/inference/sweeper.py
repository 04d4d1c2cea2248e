"""One timer for every deadline of the process, instead of one timer per request."""

import asyncio
from email.utils import formatdate

from api.inference.gateway import Gateway
from api.inference.hung import Watch

STEP_S = 0.25
POOL_STEPS = 20  # idle connections to engines are looked at so many steps apart


def sweep(gateway: Gateway, now: float) -> None:
    """End connections and engine calls whose time is over, and write the access lines."""
    gateway.now = now
    for connection in list(gateway.connections):
        if now >= connection.deadline:
            connection.sweep(now)
    for relay in list(gateway.relays):
        if now >= relay.deadline:
            gateway.metrics.add("timeouts_total")
            relay.time_out()
    gateway.pool.listen(now)
    gateway.router.look(now, lambda url: gateway.pool.target(url).silent_since)
    gateway.log.flush(gateway.loop)


def date_line(now_us: int) -> bytes:
    """The Date header as a whole line."""
    return f"Date: {formatdate(now_us // 1_000_000, usegmt=True)}\r\n".encode("ascii")


async def run(gateway: Gateway) -> None:
    """Sweep for ever."""
    step, watch = 0, Watch(gateway)
    try:
        while True:
            gateway.date_line = date_line(gateway.clock.now_us())
            sweep(gateway, gateway.clock.monotonic())
            watch.look(gateway.now)
            step += 1
            if step % POOL_STEPS == 0:
                gateway.pool.sweep(gateway.clock.monotonic())
            await asyncio.sleep(STEP_S)
    finally:
        await watch.close()

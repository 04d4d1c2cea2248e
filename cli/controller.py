"""The controller's process: it owns engines and wakes them, reads their figures for the scheduler, moves rollouts."""

import os
import socket
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from core import db
from core.clock import SystemClock
from core.resp import RespClient
from core.settings import Settings
from knative import controller
from knative.rollouts import RolloutDriver
from scheduler.scraper import Scraper


async def scrape(settings: Settings, client: RespClient, registry: CollectorRegistry) -> None:
    """Read the engines' figures while this process lives, where caps are to adapt."""
    if not settings.controller.adaptive_caps:
        return
    seats = settings.controller.seats_per_engine
    holder = f"{socket.gethostname()}:{os.getpid()}"
    await Scraper(client, holder=holder, clock=SystemClock(), seats=seats, registry=registry).run()


async def move_rollouts(settings: Settings, client: RespClient, _registry: CollectorRegistry) -> None:
    """Move rollouts on while this process lives; which of several controllers does it makes no difference."""
    engine = db.create_engine(settings.database)
    try:
        driver = RolloutDriver(
            db.create_sessions(engine), client, SystemClock(), engines_max=settings.controller.engines_max
        )
        await driver.run()
    finally:
        await engine.dispose()


def run(settings: Settings, ready: Callable[[], None]) -> None:
    """The process entry: blocks until SIGTERM."""
    controller.run(settings, ready, beside=(scrape, move_rollouts))

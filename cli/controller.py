"""The controller's process: it owns engines and wakes them, and beside that reads their figures for the scheduler."""

import os
import socket
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.resp import RespClient
from core.settings import Settings
from knative import controller
from scheduler.scraper import Scraper


async def scrape(settings: Settings, client: RespClient, registry: CollectorRegistry) -> None:
    """Read the engines' figures while this process lives, where caps are to adapt."""
    if not settings.controller.adaptive_caps:
        return
    seats = settings.controller.seats_per_engine
    holder = f"{socket.gethostname()}:{os.getpid()}"
    await Scraper(client, holder=holder, clock=SystemClock(), seats=seats, registry=registry).run()


def run(settings: Settings, ready: Callable[[], None]) -> None:
    """The process entry: blocks until SIGTERM."""
    controller.run(settings, ready, beside=(scrape,))

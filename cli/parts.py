"""The processes of the platform, by name. Each is a module with `run(settings, ready)`, imported only where it runs."""

import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from core import logging
from core.settings import Settings

# Imported by the parts only once they run: `tidegate up` imports them before it forks, so that they are shared.
PRELOADED: tuple[str, ...] = (
    "asyncio",
    "celery.app.amqp",
    "celery.apps.worker",
    "celery.beat",
    "celery.concurrency.solo",
    "celery.worker.consumer",
    "kombu.transport.redis",
    "sqlalchemy.dialects.postgresql.psycopg",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One process. Lower stop stages end first: the door, then what works, then what writes down."""

    name: str
    module: str
    summary: str
    stop_stage: int
    stop_timeout_s: float = 20.0


PARTS: tuple[Part, ...] = (
    Part("gateway", "api.inference.app", "serve inference traffic (the data plane)", stop_stage=0),
    Part("api", "api.app", "serve the control plane: tenants, operators, receipts", stop_stage=1),
    Part("controller", "cli.controller", "own engines, placement and wakes", stop_stage=1, stop_timeout_s=40.0),
    Part("worker", "core.worker", "run background jobs and their schedule", stop_stage=2),
    Part("poster", "billing.poster", "move usage from the spools of this host to the ledger", stop_stage=2),
)


def runner(part: Part) -> Callable[[Settings, Callable[[], None]], None]:
    """Return the part's `run`, its log set up; importing it is the slow half of a start."""
    run: Callable[[Settings, Callable[[], None]], None] = importlib.import_module(part.module).run

    def run_logged(settings: Settings, ready: Callable[[], None]) -> None:
        logging.configure(settings.log, part.name)
        run(settings, ready)

    return run_logged


def preload() -> None:
    """Import all that the parts will need, and put it out of the collector's reach so that forks keep sharing it."""
    gc.disable()  # forks switch it on again
    for part in PARTS:
        runner(part)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()

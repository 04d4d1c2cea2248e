"""The worker: Celery with its beat, in one process with one asyncio loop, running what packages list in `TASKS`.

Pool *solo*: tasks run one after the other in this process, which costs no second copy of the program. Their time limits
are asyncio's, because solo has none of its own. What may take minutes runs apart, in a thread (`core.lane`), and holds
nobody. Nothing is opened at import, so the process may be a fork.
"""

import asyncio
import importlib
import os
import socket
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery, beat, signals
from celery.apps.worker import Worker
from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from prometheus_client import CollectorRegistry

from core import db, logging, outbox, telemetry
from core.clock import SystemClock
from core.lane import Lane
from core.settings import Settings
from core.tasks import Job, Periodic, Task, TaskContext

TASK_MODULES: tuple[str, ...] = (
    "billing.tasks",
    "core.idempotency",
    "billing.alert_tasks",
    "catalog.registry.tasks",
    "core.mail",
    "tenants.people_tasks",
    "tenants.tasks",
)
QUEUE = "tidegate"
RELAY = "outbox.relay"
EXECUTE = "outbox.execute"
RELAY_EVERY_S = 1.0
RELAY_TIMEOUT_S = 30.0
REPORT_EVERY_S = 10.0
STOP_TIMEOUT_S = 3.0
VISIBILITY_TIMEOUT_S = 900  # a message taken by a worker that died comes back after this; the outbox is faster

log = logging.get_logger(__name__)


def broker_url(url: str) -> str:
    """Return the broker's URL as kombu wants it; ``unix:///path?db=1`` becomes ``redis+socket:///path?virtual_host=1``."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    return f"redis+socket://{parts.path}?virtual_host={int(database)}"


def collect(modules: Iterable[str]) -> tuple[Task, ...]:
    """Import the packages' task lists by name, and add the worker's own tasks."""
    found: list[Task] = [Periodic("outbox.prune", outbox.prune, every_s=3600)]
    for module in modules:
        found += importlib.import_module(module).TASKS
    names = [task.name for task in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two tasks have the same name: {sorted(names)}")
    return tuple(found)


def create_app(settings: Settings) -> Celery:
    """Build the Celery application without tasks; nothing connects."""
    app = Celery("tidegate", set_as_current=False)
    app.conf.update(
        broker_url=broker_url(settings.valkey.broker_url.get_secret_value()),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT_S, "socket_connect_timeout": 3},
        task_default_queue=QUEUE,
        task_acks_late=True,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_publish_retry_policy={"max_retries": 2, "interval_start": 0.1, "interval_max": 0.5},
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        timezone="UTC",
    )
    return app


@dataclass(slots=True)
class Tasks:
    """Runs tasks on the process's loop, and counts them. No exception leaves: a failure is logged and counted."""

    runner: asyncio.Runner
    lane: Lane
    context: TaskContext
    registry: CollectorRegistry
    jobs: Mapping[str, Job]
    metrics: telemetry.WorkerMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = telemetry.worker_metrics(self.registry)

    def run_periodic(self, task: Periodic) -> None:
        async def run(context: TaskContext) -> None:
            async def limited() -> str:
                async with asyncio.timeout(task.timeout_s):
                    await task.run(context)
                return "done"

            await self._measured(task.name, limited)

        if not task.apart:
            self.runner.run(run(self.context))
        elif not self.lane.start(task.name, run):
            log.info("task.still_running", task=task.name)

    def execute(self, row_id: int) -> None:
        async def limited() -> str:
            return (await outbox.execute(self.context, self.jobs, row_id)).value

        self.runner.run(self._measured(EXECUTE, limited))

    def relay(self, send: Callable[[int], object]) -> None:
        """Send open outbox rows; one that cannot be sent now comes again by itself."""

        async def claim() -> str:
            async with asyncio.timeout(RELAY_TIMEOUT_S):
                rows.extend(await outbox.claim(self.context))
            return "done"

        rows: list[int] = []
        self.runner.run(self._measured(RELAY, claim))
        for row_id in rows:
            send(row_id)

    async def report(self, context: TaskContext) -> None:
        """Write the worker's figures beside the others; the file's age is also the worker's sign of life."""
        try:
            waiting, dead = await outbox.count(context)
            self.metrics.outbox_open.set(waiting)
            self.metrics.outbox_dead.set(dead)
        finally:
            telemetry.write_snapshot(self.registry, context.settings, "worker")

    async def _measured(self, name: str, work: Callable[[], Coroutine[Any, Any, str]]) -> None:
        started = self.context.clock.monotonic()
        try:
            outcome = await work()
        except Exception as error:
            outcome = "failed"
            log.warning("task.failed", task=name, error=type(error).__name__, exc_info=True)
        self.metrics.tasks.labels(name, outcome).inc()
        self.metrics.seconds.labels(name).observe(self.context.clock.monotonic() - started)


def _register_periodic(app: Celery, tasks: Tasks, task: Periodic) -> None:
    @app.task(name=task.name)
    def run_periodic() -> None:
        tasks.run_periodic(task)


def register(app: Celery, tasks: Tasks, periodic: Iterable[Periodic]) -> None:
    """Make Celery tasks of ours and put the periodic ones on the beat. A beat that is late is dropped, not queued."""

    @app.task(name=EXECUTE)
    def execute(row_id: int) -> None:
        tasks.execute(row_id)

    @app.task(name=RELAY)
    def relay() -> None:
        tasks.relay(execute.delay)

    schedule: dict[str, Any] = {RELAY: _beat(RELAY, RELAY_EVERY_S)}
    for task in periodic:
        _register_periodic(app, tasks, task)
        schedule[task.name] = _beat(task.name, task.every_s)
    app.conf.beat_schedule = schedule


def _beat(name: str, every_s: float) -> dict[str, Any]:
    return {"task": name, "schedule": every_s, "options": {"expires": every_s}}


def _work(app: Celery, settings: Settings, ready: Callable[[], None]) -> None:
    """Consume until SIGTERM; the beat is a thread that starts with the first connection to the broker."""
    service = beat.Service(app, max_interval=1, scheduler_cls=beat.Scheduler)
    thread = threading.Thread(target=service.start, name="beat", daemon=True)

    def started(**_: Any) -> None:
        if not thread.is_alive():
            for name, entry in app.conf.beat_schedule.items():
                app.send_task(name, **entry["options"])  # once at the start: the beat's first is an interval away
            thread.start()
        ready()

    signals.worker_ready.connect(started, weak=False)
    worker = Worker(
        app=app,
        hostname=f"worker-{os.getpid()}@{socket.gethostname()}",
        pool_cls="solo",
        concurrency=1,
        loglevel=settings.log.level.upper(),
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    try:
        worker.start()
    finally:
        signals.worker_ready.disconnect(started)
        if thread.is_alive():
            service.stop()
            thread.join(STOP_TIMEOUT_S)


def run(settings: Settings, ready: Callable[[], None]) -> None:
    """Be the worker's process: blocks until SIGTERM, then lets the running task end; `ready` once it consumes."""
    serve(settings, ready, collect(TASK_MODULES))


def serve(settings: Settings, ready: Callable[[], None], found: Iterable[Task]) -> None:
    """Work on these tasks; see `run`."""
    logging.configure(settings.log, "worker")
    warnings.filterwarnings("ignore", category=SecurityWarning)  # of root: messages are JSON, never code
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)  # tasks that outlive a connection end first
    signals.setup_logging.connect(_keep_logging, weak=False)
    engine = db.create_engine(settings.database)
    registry = telemetry.create_registry()
    figures = telemetry.TaskFigures(registry)

    def make_context(sessions: db.Sessions) -> TaskContext:
        return TaskContext(settings, sessions, SystemClock(), figures)

    jobs = {task.name: task for task in found if isinstance(task, Job)}
    with asyncio.Runner() as runner:
        lane = Lane(settings, make_context)
        tasks = Tasks(runner, lane, make_context(db.create_sessions(engine)), registry, jobs)
        app = create_app(settings)
        report = Periodic("worker.report", tasks.report, REPORT_EVERY_S)
        register(app, tasks, (report, *(task for task in found if isinstance(task, Periodic))))
        try:
            _work(app, settings, ready)
        finally:
            lane.stop(STOP_TIMEOUT_S)
            runner.run(engine.dispose())


def _keep_logging(**_: Any) -> None:
    """Being connected is all: Celery leaves logging alone then."""

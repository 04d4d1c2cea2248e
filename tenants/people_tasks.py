"""What the worker does for people."""

from datetime import timedelta

from core.db import transaction
from core.tasks import Job, Periodic, Task, TaskContext
from tenants import sessions, sign_in, throttle

FORGET_SESSIONS_AFTER = timedelta(days=30)
TRIES_FORGOTTEN_MAX = 50_000


async def forget(context: TaskContext) -> None:
    """Delete what signing in leaves behind: counted tries that matter no more, sessions and links long over."""
    now = context.clock.now()
    async with transaction(context.sessions) as session:
        await throttle.forget(session, now, TRIES_FORGOTTEN_MAX)
        await sessions.forget(session, now - FORGET_SESSIONS_AFTER)


TASKS: tuple[Task, ...] = (
    Job(sign_in.RESET_JOB, sign_in.mail_reset, timeout_s=30),
    Periodic("people.forget", forget, every_s=300),
)

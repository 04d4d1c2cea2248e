"""What the worker does for tenants."""

from datetime import timedelta

from core.db import transaction
from core.logging import get_logger
from core.tasks import Periodic, Task, TaskContext
from tenants import audit, audit_anchor, audit_chain, audit_queries, closing, refusals
from tenants.audit_anchor import Anchor
from tenants.audit_chain import Finding, Head
from tenants.types import SYSTEM

AGAIN_MAX = 200_000  # older records looked at again in one run

log = get_logger(__name__)


class AuditWrongError(Exception):
    """The audit trail was altered; the log names the record."""


async def verify_audit(context: TaskContext) -> None:
    """Verify what is new in the audit chain and a part of what is old, and anchor its newest hash in the log."""
    home = context.settings.home
    anchor = audit_anchor.load(home)
    async with transaction(context.sessions) as session:
        await audit_queries.freeze(session)
        finding, right = await audit_chain.verify(session, anchor.head)
        again = Head()
        if finding is None:
            again = await audit_chain.head_at(session, anchor.again if anchor.again < right.seq else 0)
            finding, again = await audit_chain.verify(session, again, links_max=AGAIN_MAX)
    _report(context, finding, right)
    if finding is not None:
        log.error("audit.found_wrong", seq=finding.seq, record=finding.record, problem=finding.problem)
        raise AuditWrongError(f"{finding.seq} {finding.record}")
    audit_anchor.save(home, Anchor(right.seq, right.hash.hex(), again.seq))
    log.info("audit.head_anchored", seq=right.seq, hash=right.hash.hex())


def _report(context: TaskContext, finding: Finding | None, right: Head) -> None:
    context.figures.set("audit_wrong", "1 when the audit trail was altered, else 0.", int(finding is not None))
    context.figures.set("audit_verified_seq", "Number of the newest audit record found right.", right.seq)


async def erase_closed(context: TaskContext) -> None:
    """Forget the people of tenants that closed long enough ago."""
    keep = timedelta(days=context.settings.retention.closed_tenant_days)
    async with transaction(context.sessions) as session:
        erased = await closing.erase_due(session, now=context.clock.now(), keep=keep)
        for tenant_id in erased:
            audit.record(session, SYSTEM, "tenant.erase", tenant_id=tenant_id, target_id=tenant_id)
    if erased:
        log.info("tenants.erased", count=len(erased))


async def roll_refusals(context: TaskContext) -> None:
    """Make the partitions of refusals ahead, and drop those that are old."""
    dropped = await refusals.roll_partitions(context.sessions, context.clock)
    if dropped:
        log.info("refusals.dropped", days=dropped)


TASKS: tuple[Task, ...] = (
    Periodic("tenants.verify_audit", verify_audit, every_s=3600, timeout_s=1800, apart=True),
    Periodic("tenants.erase_closed", erase_closed, every_s=3600),
    Periodic("tenants.roll_refusals", roll_refusals, every_s=3600),
)

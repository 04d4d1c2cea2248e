"""The names of all Valkey keys, in one place, because several packages meet there.

All keys of a pool share the hash tag ``{tg}``, so that one script may touch any of them. Who writes what:

==========================  =======  =========================================================================
key                         type     content and writer
==========================  =======  =========================================================================
``{tg}:epoch``              string   random id; absent or changed means Valkey lost its data (scheduler)
``{tg}:c:<counter>``        string   what is held of a cap, or nano spent of a budget; written by the scheduler's
                                     scripts; a missing budget is made by billing
``{tg}:o:<owner>``          string   the record of a key, project or tenant: its requests in flight and its rates,
                                     packed (scheduler/scripts/common.lua); ``{tg}:b:<owner>:<unit>``: buckets of a
                                     rate that are too many for it (scheduler)
``{tg}:form:<hash>``        string   what requests of callers with equal limits on one deployment demand (scheduler)
``{tg}:credit:<tenant>``    string   available nano before outstanding, version of the ledger balance it came from, sum
                                     of ``{tg}:out:<tenant>``, packed: core/credit_figure.py (the sum by both, else
                                     billing)
``{tg}:out:<tenant>``       hash     request id → nano outstanding: the hold, after settling the charge, gone
                                     once the poster has committed it (scheduler adds and lowers, billing removes)
``{tg}:budgets``            hash     counter of each known budget → tenant and end of its period, Unix µs (billing);
                                     ``{tg}:budgets_at``: how far their repair has come
``{tg}:m:<deployment>``     string   its load, packed: core/load.py (scheduler)
``{tg}:lease:<replica>``    hash     request or block id → what it holds or waits for, packed (scheduler)
``{tg}:blocks``             zset     replica → when it took a block last, server µs (scheduler, ADR 0032)
``{tg}:local:<tenant>``     string   requests of it may be admitted from a block: known by its replica alone (scheduler)
``{tg}:owed:<replica>``     hash     request id → tenant: served by a former life of that replica, its money still
                                     held (scheduler adds; the replica, back with its spool, settles and removes)
``{tg}:q:<deployment>:…``   …        who waits: also ``w:``, ``v:``, ``d:``, see scripts/queue.lua (scheduler)
``{tg}:r:<deployment>:…``   zset     who may be preempted: also ``a:``, ``n:``, ``x:``, scripts/preempt.lua (scheduler)
``{tg}:queues``             zset     deployments with waiters by the time of their last turn (scheduler)
``{tg}:waiters``            string   requests waiting over all deployments (scheduler)
``{tg}:unclaimed``          zset     grants in the post by the time they lapse, server µs (scheduler)
``{tg}:beat``               zset     replica → expiry of its heartbeat, server ms (scheduler)
``{tg}:grants:<replica>``   list     grants for queued requests of that replica (scheduler)
``{tg}:settle``             string   admission is fenced until then, server µs; ``{tg}:awaited``: for whom (scheduler)
``{tg}:scraper``            string   who reads the engines' figures; ``{tg}:figures``: hash, deployment → JSON of
                                     `scheduler.scraper.Reading` (scheduler)
``{tg}:recounted``          string   when a recount began last, server µs; ``{tg}:libraries``: hash, replica → the
                                     version of the script library that it calls (scheduler)
``{tg}:swept``              string   how far the removal of counters that say nothing any more has come (scheduler)
``{tg}:offset_us``          string   added to the server's time by the scheduler's scripts; only tests set it
``{tg}:once:<digest>``      string   who holds an idempotency key: state (r running, d done), request id, fingerprint
                                     of the body, since when (ms), replica (gateways)
``{tg}:kept:<digest>``      string   the answer of a project that keeps them, sealed (gateways)
``{tg}:onces:…``            string   keys of a project that are done on a day; ``{tg}:keeps:…``: bytes kept, also of all
``{tg}:routing:<depl.>``    hash     gateway → JSON of `scheduler.router.router.Report` (gateways, every two seconds)
``{tg}:state``              hash     deployment → JSON of `knative.types.DeploymentState` (controller)
``{tg}:wake:<deployment>``  string   somebody waits for this deployment (gateways; SET NX PX)
``{tg}:held:<deployment>``  zset     who is held until it wakes, by tier and arrival; ``{tg}:ramp:<deployment>``: how
                                     far they have been let go since it was ready (scheduler/held.py, from gateways)
``{tg}:first:<deployment>`` string   how long its first answer after a wake took (gateways, for the controller)
``{tg}:serving``            hash     replica → the configuration revision that it serves (gateways)
``{tg}:arms:<rollout>``     hash     replica → JSON of `knative.arm_figures.Figures`; expires (gateways)
==========================  =======  =========================================================================

Channels: ``{tg}:state`` (a deployment id whose state changed), ``{tg}:wake`` (a deployment id to wake).
"""

from uuid import UUID

PREFIX = "{tg}:"
EPOCH = "{tg}:epoch"
BEAT = "{tg}:beat"
STATE = "{tg}:state"
STATE_CHANNEL = "{tg}:state"
WAKE_CHANNEL = "{tg}:wake"
SCRAPER = "{tg}:scraper"
FIGURES = "{tg}:figures"
SERVING = "{tg}:serving"


def credit(tenant_id: UUID) -> str:
    return f"{{tg}}:credit:{tenant_id.hex}"


def outstanding(tenant_id: UUID) -> str:
    return f"{{tg}}:out:{tenant_id.hex}"


def local(tenant_id: UUID) -> str:
    return f"{{tg}}:local:{tenant_id.hex}"


def counter(name: str) -> str:
    return f"{{tg}}:c:{name}"


def record(owner: str) -> str:
    return f"{{tg}}:o:{owner}"


def deployment(deployment_id: UUID) -> str:
    return f"{{tg}}:m:{deployment_id.hex}"


def lease(replica: str) -> str:
    return f"{{tg}}:lease:{replica}"


def owed(replica: str) -> str:
    return f"{{tg}}:owed:{replica}"


def grants(replica: str) -> str:
    return f"{{tg}}:grants:{replica}"


def once(digest: bytes) -> str:
    return f"{{tg}}:once:{digest.hex()}"


def kept(digest: bytes) -> str:
    return f"{{tg}}:kept:{digest.hex()}"


def onces(project_id: UUID, day: str) -> str:
    return f"{{tg}}:onces:{project_id.hex}:{day}"


def keeps(day: str, project_id: UUID | None = None) -> str:
    return f"{{tg}}:keeps:{project_id.hex if project_id else 'all'}:{day}"


def routing(deployment: str) -> str:
    return f"{{tg}}:routing:{deployment}"


def wake(deployment_id: UUID) -> str:
    return f"{{tg}}:wake:{deployment_id.hex}"


def held(deployment_id: UUID) -> str:
    return f"{{tg}}:held:{deployment_id.hex}"


def ramp(deployment_id: UUID) -> str:
    return f"{{tg}}:ramp:{deployment_id.hex}"


def first(deployment_id: UUID) -> str:
    return f"{{tg}}:first:{deployment_id.hex}"


def arms(rollout_id: UUID) -> str:
    return f"{{tg}}:arms:{rollout_id.hex}"

"""What the four processes of flood.py do, and the limits that hold for it."""

from itertools import product
from uuid import UUID

import msgspec

from catalog.types import ServedModel
from core import keyspace
from core.demand import Demand, DemandKind, Unit
from core.tiers import Tier
from scheduler import commands
from scheduler.types import Entitlement
from tests.factories.scheduler import concurrency, rate, served_model, tokens
from tests.integration.scheduler.ledger import Rules

REPLICAS = 4
LONG_S = 100_000.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant asks of one deployment, in each process. Seconds are of the scripts' time."""

    model: ServedModel
    tenant: UUID
    tier: Tier = Tier.STANDARD
    users: int = 4
    backlog: bool = False  # a user asks anew as soon as its request is granted, else when it has ended
    serves_s: tuple[float, float] = (0.4, 0.6)
    pause_s: tuple[float, float] = (0.0, 0.0)  # before it asks again
    bursts_s: float = 0.0  # all ask at every multiple of it
    wait_s: tuple[float, ...] = (LONG_S,)
    leaves: float = 0.0  # of the callers, at any moment
    streams: float = 0.0  # of those served: its caller has had a byte, so that it keeps its place
    weight: float = 1.0
    prompt: tuple[int, int] = (10, 400)
    output: tuple[int, int] = (10, 100)
    guess: int = 1  # how many times what it uses is told at the door
    hold: int = 0  # nano; 0: nothing costs money
    demands: tuple[Demand, ...] = ()
    entitlements: tuple[Entitlement, ...] = ()


class Scenario(msgspec.Struct, frozen=True):
    """Who asks for what. `platform`: the cap of all deployments."""

    lines: tuple[Line, ...]
    platform: int = 10_000


class Told(msgspec.Struct):
    """How a request ended for its caller: ``served``, ``left`` or the code of a refusal."""

    request: str
    line: int
    replica: str
    ended: str
    reason: str = ""
    status_kind: str = ""
    retry_after_s: int | None = None
    preempted: int = 0


def _model(number: int, places: int, *, waiting_max: int = 10_000) -> ServedModel:
    model, one = served_model(inflight_max=places, waiting_max=waiting_max), UUID(int=number)
    return msgspec.structs.replace(model, deployment_id=one, model_id=one)


def _tenant(number: int) -> UUID:
    return UUID(int=0xA0 + number)


P, S, B = Tier.PRIORITY, Tier.STANDARD, Tier.BATCH

# Every kind of limit at once, all of them small. The third tenant's credit ends early.
STORM_MODELS = (_model(1, 3, waiting_max=6), _model(2, 6, waiting_max=12), _model(3, 12))
STORM_TENANTS = (_tenant(1), _tenant(2), _tenant(3))
STORM_CREDIT, STORM_HOLD = (10**9, 10**9, 60_000), 1000
STORM_RATES = (240, 36_000)  # requests and input tokens a minute
STORM_CONCURRENCY = {"tenant": 12, "model": 6, "key": 9}
STORM_CAPABILITY = 4


def _storm_demands(tenant: UUID, model: ServedModel) -> tuple[Demand, ...]:
    own = Demand(DemandKind.CAP, f"tenant:{tenant.hex}", 1, STORM_CONCURRENCY["tenant"] - 3, "MODEL_BUSY")
    return (
        own,
        concurrency(STORM_CONCURRENCY["tenant"], counter=f"tenant:{tenant.hex}:conc"),
        concurrency(STORM_CONCURRENCY["model"], counter=f"tenant:{tenant.hex}:m:{model.model_id.hex}:conc"),
        concurrency(STORM_CONCURRENCY["key"], counter=f"key:{tenant.hex}:conc"),
        rate(STORM_RATES[0], counter=f"key:{tenant.hex}:rpm"),
        tokens(STORM_RATES[1], Unit.INPUT_TOKEN, counter=f"key:{tenant.hex}:itpm"),
    )


STORM_ENTITLEMENTS = (Entitlement(STORM_TENANTS[0].hex, capability=STORM_CAPABILITY),)
STORM = Scenario(
    tuple(
        Line(
            model=model,
            tenant=tenant,
            tier=tier,
            users=1,
            serves_s=(0.1, 1.5),
            prompt=(10, 100) if tenant is STORM_TENANTS[1] else (10, 400),
            pause_s=(0.5, 3.0),
            wait_s=(0.0, 1.0, 5.0, LONG_S),
            leaves=0.4,
            hold=STORM_HOLD,
            demands=_storm_demands(tenant, model),
            entitlements=STORM_ENTITLEMENTS if model is STORM_MODELS[2] else (),
        )
        for tenant, model, tier in product(STORM_TENANTS, STORM_MODELS, Tier)
    ),
    platform=16,
)

# The same with nine in ten callers that leave.
CROWD = Scenario(tuple(msgspec.structs.replace(line, leaves=0.9) for line in STORM.lines), platform=STORM.platform)

# Three tenants that always wait, of unlike weights; on the second deployment some tell thrice of what they use.
TURN_WEIGHTS = {_tenant(1): 0.5, _tenant(2): 1.0, _tenant(3): 4.0}
TURN_MODELS = {_model(1, 8): (1, 1, 1), _model(2, 8): (1, 3, 3)}  # how many times of it each tells
TURNS = Scenario(
    tuple(
        Line(model=model, tenant=tenant, tier=P, users=5, backlog=True, serves_s=(0.3, 0.5), weight=weight, guess=guess)
        for model, guesses in TURN_MODELS.items()
        for (tenant, weight), guess in zip(TURN_WEIGHTS.items(), guesses, strict=True)
    )
)

# What five tenants have of 20 places at high tide: the first three by their entitlements, the
# first whatever its tier, and the others by weight.
ENTITLED_MODEL = _model(1, 20)
ENTITLED_PLACES = {_tenant(1): 4, _tenant(2): 8, _tenant(3): 2}
ENTITLED_WEIGHTS = {_tenant(4): 1, _tenant(5): 2}  # of the other six places
ENTITLEMENTS = (
    Entitlement(_tenant(1).hex, guarantee=4, deserved=4),
    Entitlement(_tenant(2).hex, deserved=8),
    Entitlement(_tenant(3).hex, capability=2),
)
ENTITLED = Scenario(
    tuple(
        Line(
            model=ENTITLED_MODEL,
            tenant=tenant,
            tier=B if tenant == _tenant(1) else P,
            users=4,
            backlog=True,
            serves_s=(0.8, 1.2),
            weight=weight,
            entitlements=ENTITLEMENTS,
        )
        for tenant, weight in ({_tenant(1): 1, _tenant(2): 1, _tenant(3): 8} | ENTITLED_WEIGHTS).items()
    )
)

# A flood of priority beside standard and batch, of two tenants each.
FLOOR_MODEL = _model(1, 10)
FLOORS = Scenario(
    tuple(
        Line(model=FLOOR_MODEL, tenant=_tenant(number), tier=tier, users=users, backlog=True, serves_s=(0.3, 0.6))
        for tier, users in ((P, 10), (S, 2), (B, 2))
        for number in (1, 2)
    )
)

# Batch that runs for long has all that it may; priority comes and goes, and needs more than is kept for it.
PREEMPT_MODEL = _model(1, 8)
PREEMPTION = Scenario(
    (
        Line(model=PREEMPT_MODEL, tenant=_tenant(1), tier=B, users=3, serves_s=(20, 40)),
        Line(model=PREEMPT_MODEL, tenant=_tenant(2), tier=B, users=1, serves_s=(20, 40), streams=0.5),
        Line(
            model=PREEMPT_MODEL,
            tenant=_tenant(3),
            tier=P,
            users=2,
            serves_s=(6, 9),
            bursts_s=15,
            wait_s=(6.0,),
        ),
    )
)

SCENARIOS = {
    "storm": STORM,
    "crowd": CROWD,
    "turns": TURNS,
    "entitled": ENTITLED,
    "floors": FLOORS,
    "preemption": PREEMPTION,
}


def rules_of(scenario: Scenario) -> Rules:
    """The limits of a scenario as the ledger has them."""
    rules = Rules({keyspace.counter(commands.GLOBAL): scenario.platform}, {}, scenario.platform)
    for line in scenario.lines:
        deployment = line.model.deployment_id.hex
        rules.deployments[deployment] = line.model.inflight_max
        for demand in line.demands:
            if demand.kind is DemandKind.CAP:
                rules.limits[keyspace.counter(demand.counter)] = demand.limit
            elif demand.kind is DemandKind.CONCURRENCY:
                rules.limits[keyspace.record(demand.counter.removesuffix(":conc"))] = demand.limit
        if line.demands:
            rules.rates[keyspace.record(f"key:{line.tenant.hex}")] = STORM_RATES
        for one in line.entitlements:
            rules.limits[keyspace.counter(f"entitled:{deployment}:{one.owner}")] = one.capability
            if one.guarantee:
                rules.guarantees.setdefault(deployment, {})[one.owner] = one.guarantee
    return rules

"""Operators: how a deployment's engine is started on given hardware, and how gateways choose among its replicas."""

from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Query
from msgspec import structs
from pydantic import Field

from api.deps import CurrentServices, DeploymentId, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Input, Output, problems
from catalog import deployments
from catalog.hardware import HardwareProfile, Share, Vendor
from catalog.registry import versions
from catalog.types import Deployment, EngineKind
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from core.resp import RespError, RespUnavailable
from engine.arguments.command import command_line
from engine.arguments.types import CommandLine, Family, Task
from scheduler.router.router import Report
from scheduler.routing_feed import read_reports

router = APIRouter(route_class=GuardedRoute, tags=["deployments"])

MODELS_FOLDER = "/models"  # where weights are mounted, in what is shown
FAMILIES = MappingProxyType({EngineKind.VLLM: Family.VLLM, EngineKind.LLAMA_CPP: Family.LLAMA_CPP})


class HardwareIn(Input):
    """What one replica is given, and the engine, where the deployment says no more than that it speaks OpenAI's API."""

    engine: Annotated[Family | None, Field(strict=False)] = None
    vendor: Annotated[Vendor, Field(strict=False)] = Vendor.NVIDIA
    card: Annotated[str, Field(max_length=64, description="As its driver names it: A100, H100, L40S, MLU590.")] = ""
    memory_mib: Annotated[int, Field(strict=False, ge=1, le=16_777_216, description="Of one whole card.")] = 81_920
    cards: Annotated[int, Field(strict=False, ge=1, le=1024)] = 1
    share: Annotated[Share, Field(strict=False)] = Share.WHOLE
    units: Annotated[int, Field(strict=False, ge=0, le=8192, description="Of 2 GiB, of a shared card.")] = 0


class ObjectionOut(Output):
    """What is wrong: which setting, why, and what to do about it."""

    param: str
    reason: str
    remedy: str


class MemoryOut(Output):
    """Of all cards of a replica together."""

    budget_mib: int
    weights_mib: int
    overhead_mib: int
    kv_mib: int
    kv_tokens: int = Field(description="How many tokens fit into the KV memory.")


class CommandOut(Output):
    """A command line. With objections it is what would be tried, and must not be."""

    deployment_id: str
    engine: str
    accepted: bool
    arguments: list[str]
    environment: dict[str, str]
    files: dict[str, str] = Field(description="To be written beside it: name → text.")
    seats: int = Field(description="Requests at once.")
    context: int
    memory: MemoryOut | None = Field(description="null: the weights' size or a token's KV memory is not known.")
    objections: list[ObjectionOut]
    notes: list[str]


class SeenOut(Output):
    """One replica, as one gateway sees it. `weight` is less than 1 while it starts slowly."""

    replica: str
    phase: str
    why_not: str
    weight: float
    inflight: int
    elsewhere: int
    waiting: int
    kv_used: float
    heat_bytes: int
    sent: int
    first_byte_ms: int


class ConsideredOut(Output):
    """One replica in a decision: the lowest score wins, in bytes of prompt to be read."""

    replica: str
    score: int
    cached_bytes: int
    heat_bytes: int
    inflight: int
    elsewhere: int
    waiting: int
    kv_used: float
    weight: float
    phase: str
    why_not: str


class RoutingDecisionOut(Output):
    """Why a request went where it went: one a second is kept, without any of its content."""

    prompt_bytes: int
    chosen: str
    by: str = Field(description="least, two choices, prefix, home or probe; see docs/routing.md.")
    replicas: int
    considered: list[ConsideredOut]


class GatewayRouting(Output):
    """What one gateway knows of the replicas of a deployment, and its last decisions."""

    gateway: str
    at_us: int
    figures_fresh: bool
    mean_bytes: int
    replicas: list[SeenOut]
    decisions: list[RoutingDecisionOut]


class RoutingOut(Output):
    """By gateway; none for a deployment with one replica, or one that nobody has called for ten minutes."""

    gateways: list[GatewayRouting]


@router.get(
    f"{ADMIN}/deployments/{{deployment_id}}/command",
    summary="Show how a deployment's engine is started on given hardware",
    responses=problems(400, 404),
)
async def show_command(
    deployment_id: DeploymentId, session: ReadSession, hardware: Annotated[HardwareIn, Query()]
) -> CommandOut:
    """Nothing is started. Objections say why a combination is wrong, and what to do about it."""
    found = await deployments.get(session, deployment_id)
    family = FAMILIES.get(found.engine) or hardware.engine
    if family is None or found.engine is EngineKind.SIMULATOR:
        message = f"Which engine runs this deployment ({found.engine.value}) is not known: say engine=tensorrt-llm."
        raise PlatformError("NO_COMMAND", ErrorKind.INVALID, message, param="engine")
    version = await versions.get(session, found.version_id)
    task = Task(
        model=f"{MODELS_FOLDER}/{version.reference}" if version.sha256 else found.source,
        served_name=found.upstream_model,
        context_max=found.context_max,
        hardware=HardwareProfile(**hardware.model_dump(exclude={"engine"})),
        weights_bytes=version.size_bytes,
        facts=version.facts,
        gpu_memory_mb=found.gpu_memory_mb,
        kv_request_mb=found.kv_request_mb,
        host="0.0.0.0",  # noqa: S104 - of a pod
    )
    return _command_out(found, family, command_line(family, found.engine_args, task))


def _command_out(deployment: Deployment, family: Family, line: CommandLine) -> CommandOut:
    memory = line.memory
    return CommandOut(
        deployment_id=format_id(IdKind.DEPLOYMENT, deployment.id),
        engine=family.value,
        accepted=not line.objections,
        arguments=list(line.arguments),
        environment=line.environment,
        files=line.files,
        seats=line.seats,
        context=line.context,
        memory=None if memory is None else MemoryOut(**structs.asdict(memory)),
        objections=[ObjectionOut(param=o.param, reason=o.reason, remedy=o.remedy) for o in line.objections],
        notes=list(line.notes),
    )


@router.get(
    f"{ADMIN}/deployments/{{deployment_id}}/routing",
    summary="Show how gateways choose among a deployment's replicas",
    responses=problems(404),
)
async def show_routing(deployment_id: DeploymentId, session: ReadSession, services: CurrentServices) -> RoutingOut:
    """Each gateway says every two seconds what it sees; those that have said nothing for ten are left out."""
    found = await deployments.get(session, deployment_id)
    try:
        reports = await read_reports(services.valkey, found.id.hex, services.clock.now_us())
    except (RespError, RespUnavailable):
        message = "Valkey cannot be reached, and with it what gateways say."
        raise PlatformError("SERVICE_UNAVAILABLE", ErrorKind.UNAVAILABLE, message, retry_after_s=5) from None
    return RoutingOut(gateways=[_routing_out(report) for report in reports])


def _routing_out(report: Report) -> GatewayRouting:
    return GatewayRouting(
        gateway=report.gateway,
        at_us=report.at_us,
        figures_fresh=report.figures_fresh,
        mean_bytes=report.mean_bytes,
        replicas=[SeenOut(**structs.asdict(seen)) for seen in report.replicas],
        decisions=[
            RoutingDecisionOut(
                prompt_bytes=decision.prompt_bytes,
                chosen=decision.chosen,
                by=decision.by,
                replicas=decision.replicas,
                considered=[ConsideredOut(**structs.asdict(one)) for one in decision.considered],
            )
            for decision in report.decisions
        ],
    )

"""Whether a model sleeps, what its caller is told, and what it hears while it is held."""

from api.inference import errors
from api.inference.gateway import Gateway
from catalog.types import DeploymentKind, ServedModel
from core.errors import PlatformError
from knative.types import DeploymentState, ReplicaState

EXTERNAL = DeploymentKind.EXTERNAL
ANSWERING = frozenset({ReplicaState.READY, ReplicaState.IDLE})
COMMENT = b": tidegate "
"""How what a held caller hears begins: no event, and no part of an answer."""
UNKNOWN = DeploymentState("", ReplicaState.ABSENT)


def is_awake(state: DeploymentState | None) -> bool:
    return state is not None and state.state in ANSWERING and bool(state.endpoints)


def is_asleep(gateway: Gateway, model: ServedModel) -> bool:
    """Whether a caller of this model has to wait for an engine."""
    return model.kind is not EXTERNAL and not is_awake(gateway.states.current(model.deployment_id))


def loading(gateway: Gateway, model: ServedModel, waited_s: float = 0.0) -> PlatformError:
    """Return MODEL_LOADING with the time that load history promises."""
    state = gateway.states.current(model.deployment_id) or UNKNOWN
    return errors.model_loading(state.eta_s, waited_s)


def news(state: DeploymentState | None) -> bytes:
    """Return the comment that a stream's caller gets while it is held."""
    if is_awake(state):
        return COMMENT + b"ready, your turn is near\n\n"
    eta_s = state.eta_s if state is not None else 0
    return COMMENT + (b"loading, about %d s\n\n" % eta_s if eta_s else b"loading\n\n")

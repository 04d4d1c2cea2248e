"""What engine arguments are made from, and what comes of them."""

from enum import StrEnum

import msgspec

from catalog.hardware import HardwareProfile
from catalog.registry.types import Facts


class Family(StrEnum):
    """Whose command line."""

    VLLM = "vllm"
    TENSORRT_LLM = "tensorrt-llm"
    LLAMA_CPP = "llama.cpp"


class Objection(msgspec.Struct, frozen=True):
    """A wrong combination: which setting, why, and what to do about it."""

    param: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.param}: {self.reason} {self.remedy}"


class Task(msgspec.Struct, frozen=True):
    """What is to be run, and where it is to answer."""

    model: str  # the weights' path: a folder, or a GGUF file
    served_name: str
    context_max: int
    hardware: HardwareProfile
    weights_bytes: int = 0  # 0: unknown, then memory is not checked
    facts: Facts = Facts()
    gpu_memory_mb: int = 0  # stated by the deployment, with the next one: the batch bound comes from both
    kv_request_mb: int = 0  # of one request as it begins
    host: str = "127.0.0.1"  # or the path of a unix socket, ending in .sock
    port: int = 8000


class Memory(msgspec.Struct, frozen=True):
    """Of all cards of a replica together, in MiB. `kv_tokens`: what fits into the KV memory."""

    budget_mib: int
    weights_mib: int
    overhead_mib: int
    kv_mib: int
    kv_tokens: int


class CommandLine(msgspec.Struct, frozen=True):
    """How the engine is started. With objections it is what would be tried, and must not be."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = {}
    files: dict[str, str] = {}  # to be written beside it: name → text
    seats: int = 0
    context: int = 0
    memory: Memory | None = None  # None: the weights' size or the KV memory of a token is not known
    objections: tuple[Objection, ...] = ()
    notes: tuple[str, ...] = ()

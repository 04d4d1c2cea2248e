"""Whether weights and KV memory fit, and how many requests do. Pure."""

import math

from catalog.hardware import HardwareProfile, Vendor, batch_bound_mb
from engine.arguments.types import Memory, Objection, Task

MIB = 1024 * 1024
OVERHEAD_MIB = 1536  # of each card: the driver's context, activations, captured graphs
USUAL_TOKENS = 4096  # of a request as it begins, where nothing is stated; it may double
SEATS_MAX = 256
SEATS_UNKNOWN = 32


def memory_of(task: Task, cards: int, *, tensor: int, kv_part: float = 1.0) -> Memory | None:
    """Return what becomes of the memory of `cards`; None when the weights' size or a token's need is not known.

    `tensor`: ranks that share each layer; with more of them than KV heads, each head is kept several times. `kv_part`:
    of the 16 bits a KV entry has usually.
    """
    facts = task.facts
    if not task.weights_bytes or not facts.kv_bytes_per_token:
        return None
    budget = task.hardware.budget_mib * cards
    weights = math.ceil(task.weights_bytes / MIB)
    overhead = 0 if task.hardware.vendor is Vendor.CPU else OVERHEAD_MIB * cards
    copies = max(1.0, tensor / facts.kv_heads) if facts.kv_heads else 1.0
    kv = max(0, budget - weights - overhead)
    return Memory(budget, weights, overhead, kv, int(kv * MIB / (facts.kv_bytes_per_token * kv_part * copies)))


def check(task: Task, memory: Memory | None, *, context: int, cards: int, more_cards: bool = True) -> list[Objection]:
    """Object when the weights, or one request of `context` tokens beside them, do not fit."""
    if memory is None or memory.kv_tokens >= context:
        return []
    gib = 1024
    least = memory.weights_mib + memory.overhead_mib
    room = f"{memory.budget_mib / gib:.1f} GiB of {cards} times {task.hardware.card or task.hardware.vendor.value}"
    needed = cards_needed(task, context)
    bigger = f"give it {needed} such cards, " if more_cards and needed > cards else ""
    if least >= memory.budget_mib:
        need = f"The weights and what each card needs besides take {least / gib:.1f} GiB and do not fit in the {room}."
        return [Objection("hardware", need, f"{_sentence(bigger)}or run a quantised version (AWQ, GPTQ, FP8, GGUF).")]
    reason = f"One request of {context:,} tokens does not fit: the {room} hold {memory.kv_tokens:,} beside the weights."
    return [Objection("context", reason, f"{_sentence(bigger)}or lower context to {memory.kv_tokens:,}.")]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text else "Choose larger cards, "


def cards_needed(task: Task, context: int) -> int:
    """Return the least power of two of cards on which weights and one request fit; 0 where none up to 64 does."""
    for cards in (1, 2, 4, 8, 16, 32, 64):
        memory = memory_of(task, cards, tensor=cards)
        heads = task.facts.heads
        if memory is not None and memory.kv_tokens >= context and not (heads and heads % cards):
            return cards
    return 0


def seats(task: Task, memory: Memory | None, context: int) -> int:
    """Return the batch bound: the formula of `batch_bound` of what is stated, else of what the weights leave.

    Where a request is not stated, it is `USUAL_TOKENS`, or the whole context where that is less.
    """
    if stated := batch_bound_mb(task.gpu_memory_mb, task.kv_request_mb):
        return stated
    if memory is None:
        return SEATS_UNKNOWN
    return max(1, min(SEATS_MAX, memory.kv_tokens // (2 * min(USUAL_TOKENS, context))))


def shared_well(hardware: HardwareProfile, *, cards: int) -> list[Objection]:
    """Object to shares that are none, and to several cards where a share cannot span them."""
    found = []
    if hardware.share.value != "whole" and not hardware.units:
        found.append(Objection("hardware.units", "A shared card is given by units of 2 GiB.", "Say how many."))
    elif hardware.share.value != "whole" and hardware.units * 2048 > hardware.memory_mib:
        found.append(
            Objection(
                "hardware.units",
                f"{hardware.units} units are more than the card's {hardware.memory_mib:,} MiB.",
                f"Give it {hardware.memory_mib // 2048} at most.",
            )
        )
    if cards > 1 and (hardware.share.value in {"mig", "time-sliced"} or _mlu_slice(hardware)):
        found.append(
            Objection(
                "tensor_parallel",
                f"Ranks cannot run together on {hardware.share.value} parts of {cards} cards.",
                "Give it whole cards, or one part that is large enough.",
            )
        )
    return found


def _mlu_slice(hardware: HardwareProfile) -> bool:
    return hardware.vendor is Vendor.CAMBRICON and hardware.share.value != "whole"

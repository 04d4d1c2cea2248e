"""What is wrong with parallelism, quantisation and extra options, whatever the engine. Pure.

Which card computes with which quantisation: vLLM's documentation, "Supported Hardware" (read for 0.32.0: AWQ from
Turing, GPTQ from Volta, FP8 from Turing as weights and from Ada in arithmetic).
"""

import shlex
from collections.abc import Mapping
from types import MappingProxyType

from catalog.hardware import Vendor, capability
from engine.arguments.types import Objection, Task

# Ten times the least compute capability, and whether the CPU runs it
_NEEDS = MappingProxyType(
    {
        "awq": (75, True),
        "gptq": (70, True),
        "int8": (75, True),
        "compressed-tensors": (75, True),
        "fp8": (75, False),
        "mxfp4": (80, False),
        "nvfp4": (100, False),
    }
)
_GENERATION = MappingProxyType({70: "Volta", 75: "Turing", 80: "Ampere", 100: "Blackwell"})


def parallel(task: Task, tensor: int, pipeline: int) -> list[Objection]:
    """Object to ranks that there are no cards, heads or layers for."""
    facts, cards, found = task.facts, task.hardware.cards, []
    if tensor * pipeline > cards:
        found.append(
            Objection(
                "tensor_parallel",
                f"{tensor} by {pipeline} ranks need {tensor * pipeline} cards; the profile has {cards}.",
                f"Lower tensor_parallel or pipeline_parallel, or choose a profile with {tensor * pipeline} cards.",
            )
        )
    if facts.heads and facts.heads % tensor:
        fit = [n for n in range(1, cards + 1) if facts.heads % n == 0]
        found.append(
            Objection(
                "tensor_parallel",
                f"The model's {facts.heads} attention heads cannot be divided among {tensor} ranks.",
                f"Use {' or '.join(map(str, fit[-3:]))}.",
            )
        )
    if facts.kv_heads and tensor > facts.kv_heads and tensor % facts.kv_heads:
        found.append(
            Objection(
                "tensor_parallel",
                f"{tensor} ranks are no multiple of the model's {facts.kv_heads} KV heads.",
                f"Use a divisor or a multiple of {facts.kv_heads}.",
            )
        )
    if facts.layers and pipeline > facts.layers:
        reason = f"{pipeline} stages are more than the model's {facts.layers} layers."
        found.append(Objection("pipeline_parallel", reason, "Lower it."))
    return found


def quantisation(task: Task, asked: str) -> list[Objection]:
    """Object to a quantisation that the card cannot compute with, or that the weights do not have."""
    of_weights, hardware = kind(task.facts.quantisation), task.hardware
    found = []
    if asked in {"awq", "gptq"} and of_weights and asked != of_weights:
        found.append(
            Objection(
                "quantisation",
                f"The weights are {task.facts.quantisation}, and {asked} is made before they are uploaded.",
                f"Deploy a version quantised by {asked}, or leave quantisation empty.",
            )
        )
    used = asked or of_weights
    needs, on_cpu = _NEEDS.get(used, (0, True))
    if hardware.vendor is Vendor.CPU and not on_cpu:
        reason = f"The CPU does not compute with {used}."
        found.append(Objection("quantisation", reason, "Use AWQ, GPTQ or INT8, or weights in bfloat16."))
    has = capability(hardware)
    if has and has < needs:
        others = [name for name, (least, _) in _NEEDS.items() if least <= has and name != "compressed-tensors"]
        instead = f" or {', '.join(others)}" if others else ""
        found.append(
            Objection(
                "quantisation",
                f"{used} needs {_GENERATION[needs]} or newer; a {hardware.card} has capability {has / 10:.1f}.",
                f"Use weights in 16 bits{instead} on it, or a newer card.",
            )
        )
    return found


def kind(quantisation_of_weights: str) -> str:
    """Return the family of what weights say of themselves: ``awq_marlin`` is awq, ``w8a8`` int8, ``bfloat16`` none."""
    said = quantisation_of_weights.lower()
    if said in {"", "bfloat16", "float16", "float32", "bf16", "f16", "f32"}:
        return ""
    for name in ("awq", "gptq", "nvfp4", "mxfp4", "fp8", "compressed-tensors"):
        if name in said:
            return name
    return "int8" if "int8" in said or "w8a8" in said else said


def options(
    text: str, allowed: Mapping[str, bool], refused: Mapping[str, str], *, param: str = "extra"
) -> tuple[list[str], list[Objection]]:
    """Return the options of `text` as arguments, and objections to those that may not be given.

    Args:
        text: as on a command line: ``--seed 7 --enforce-eager``.
        allowed: options by name, and whether each takes a value.
        refused: options by name, and why they are not the operator's.
        param: which setting `text` is.
    """
    try:
        parts = shlex.split(text)
    except ValueError:
        return [], [Objection(param, "It is no command line: a quote is left open.", "Close it.")]
    taken: list[str] = []
    found: list[Objection] = []
    at = 0
    while at < len(parts):
        name, separator, value = parts[at].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        at += 1
        wants = allowed.get(name)
        if wants is None:
            found.append(_not_allowed(name, refused, allowed, param))
            while at < len(parts) and not parts[at].startswith("--"):
                at += 1
        elif not wants:
            taken.append(name)
            if separator:
                found.append(Objection(param, f"{name} takes no value.", f"Write {name} alone."))
        elif separator:
            taken += [name, value]
        elif at < len(parts) and not parts[at].startswith("--"):
            taken += [name, parts[at]]
            at += 1
        else:
            found.append(Objection(param, f"{name} needs a value.", f"Write {name} VALUE."))
    return taken, found


def _not_allowed(name: str, refused: Mapping[str, str], allowed: Mapping[str, bool], param: str) -> Objection:
    shown = name[:64]
    if name in refused:
        return Objection(param, f"{shown} may not be set: {refused[name]}.", "Leave it out.")
    return Objection(
        param, f"{shown} is not among the options that are known to be safe.", f"Use {', '.join(allowed)}."
    )

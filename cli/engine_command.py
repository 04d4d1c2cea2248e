"""`tidegate engine-command`: how an engine is started on given hardware, or why it must not be."""

import argparse
import json
import shlex
import sys

from catalog.hardware import HardwareProfile, Share, Vendor
from catalog.registry.types import Facts
from engine.arguments.command import command_line, convert
from engine.arguments.types import Family, Task


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "engine-command",
        help="print how an engine is started on given hardware",
        description="Print the environment, files and command line of an engine, or every reason against it with its "
        "remedy (then the exit code is 1). Nothing is started, and no installation is needed.",
    )
    command.add_argument("engine", choices=[family.value for family in Family])
    command.add_argument("model", help="the weights: a folder, or a GGUF file")
    command.add_argument("--name", default="model", help="what the engine is to call it (default: model)")
    command.add_argument("--context", type=int, default=8192, help="tokens that the model holds (default: 8192)")
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of engine_args; often")
    hardware = command.add_argument_group("hardware")
    hardware.add_argument("--vendor", choices=[vendor.value for vendor in Vendor], default=Vendor.NVIDIA.value)
    hardware.add_argument("--card", default="", help="A100, H100, L40S, …")
    hardware.add_argument("--memory-mib", type=int, default=81_920, help="of one whole card (default: 81920)")
    hardware.add_argument("--cards", type=int, default=1)
    hardware.add_argument("--share", choices=[share.value for share in Share], default=Share.WHOLE.value)
    hardware.add_argument("--units", type=int, default=0, help="of 2 GiB, of a shared card")
    weights = command.add_argument_group("weights", "What is read from them; without it memory is not checked.")
    weights.add_argument("--weights-bytes", type=int, default=0)
    weights.add_argument("--kv-bytes-per-token", type=int, default=0, help="in 16 bits, over all layers")
    weights.add_argument("--layers", type=int, default=0)
    weights.add_argument("--heads", type=int, default=0)
    weights.add_argument("--kv-heads", type=int, default=0)
    weights.add_argument("--quantisation", default="", help="awq, gptq, fp8, bfloat16, …")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print it; 1 when something speaks against it."""
    names = ("vendor", "card", "memory_mib", "cards", "share", "units")
    hardware = convert({name: getattr(options, name) for name in names}, HardwareProfile)
    facts = Facts(
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        kv_bytes_per_token=options.kv_bytes_per_token,
        quantisation=options.quantisation,
    )
    task = Task(
        model=options.model,
        served_name=options.name,
        context_max=options.context,
        hardware=hardware,
        weights_bytes=options.weights_bytes,
        facts=facts,
    )
    family = Family(options.engine)
    line = command_line(family, dict(map(_setting, options.set)), task)
    for objection in line.objections:
        print(f"tidegate: {objection}", file=sys.stderr)
    if line.objections:
        return 1
    for name, text in line.files.items():
        print(f"# {name}\n{text}")
    for note in line.notes:
        print(f"# {note}")
    print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in line.environment.items()))
    print(shlex.join((*PROGRAMS[family], *line.arguments)))
    return 0


PROGRAMS = {
    Family.VLLM: ("python", "-m", "vllm.entrypoints.openai.api_server"),
    Family.TENSORRT_LLM: ("trtllm-serve",),
    Family.LLAMA_CPP: ("llama-server",),
}


def _setting(text: str) -> tuple[str, object]:
    """Read ``seats=8`` or ``extra=--seed 7``: a JSON value, or else a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

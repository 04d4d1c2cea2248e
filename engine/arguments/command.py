"""From a deployment's `engine_args` to its engine's command line, whichever engine it is. Pure."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from core.errors import ErrorKind, PlatformError
from engine.arguments import llama_cpp, tensorrt_llm, vllm
from engine.arguments.types import CommandLine, Family, Task

T = TypeVar("T")


def command_line(family: Family, engine_args: Mapping[str, Any], task: Task) -> CommandLine:
    """Return the command line, with objections to whatever is wrong with it.

    Raises:
        PlatformError: kind invalid, when `engine_args` has members or values that the engine's arguments do not have.
    """
    if family is Family.VLLM:
        return vllm.command_line(convert(engine_args, vllm.VllmArguments), task)
    if family is Family.TENSORRT_LLM:
        return tensorrt_llm.command_line(convert(engine_args, tensorrt_llm.TensorrtArguments), task)
    return llama_cpp.command_line(convert(engine_args, llama_cpp.LlamaArguments), task)


def accepted(line: CommandLine) -> CommandLine:
    """Return the line when nothing speaks against it.

    Raises:
        PlatformError: kind invalid, with every reason and remedy.
    """
    if line.objections:
        raise invalid(" ".join(map(str, line.objections)))
    return line


def convert(engine_args: Mapping[str, Any], kind: type[T]) -> T:
    """Read `engine_args` as one engine's arguments, or a profile; kind invalid when they are none."""
    try:
        return msgspec.convert(dict(engine_args), kind)
    except msgspec.ValidationError as problem:
        raise invalid(str(problem)) from None


def invalid(message: str) -> PlatformError:
    return PlatformError("INVALID_ENGINE_ARGS", ErrorKind.INVALID, message, param="engine_args")

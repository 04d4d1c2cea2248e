"""`tidegate engine-command` prints a line that can be pasted, or why there is none."""

import shlex

import pytest

from cli.main import main


def test_the_line_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["engine-command", "vllm", "/models/a b", "--card", "A100", "--cards", "2", "--set", "extra=--seed 7"]
    assert main(arguments) == 0
    *exports, line = capsys.readouterr().out.splitlines()
    assert "export HF_HUB_OFFLINE=1" in exports
    words = shlex.split(line)
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/a b"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[-2:] == ["--seed", "7"]


def test_files_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine-command", "tensorrt-llm", "/models/a", "--card", "H100"]) == 0
    assert "# tensorrt-llm.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "tensor_parallel=3"], "3 by 1 ranks need 3 cards"),
        (["--set", "colour=1"], "unknown field"),
        (["--memory-mib", "0"], ">= 1"),
        (["--share", "time-sliced"], "Say how many."),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine-command", "vllm", "/models/a", *arguments]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out

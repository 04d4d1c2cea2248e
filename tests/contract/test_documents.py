"""The commands of README and docs, pasted into a bash of their own against `tidegate up`, as a reader does it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fault.real_platform import ROOT, Platform

BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN_ADDRESS = "http://127.0.0.1:8080"
PATIENCE_S = 400
CURL = """#!/bin/sh
exec {curl} --write-out '%{{stderr}}%{{http_code}} %{{method}} %{{url}}\\n' "$@" 2>>{log}
"""
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the documents' commands are curl's")


def blocks(document: str, begin: str = "", end: str = "") -> str:
    """Return all commands between two headings of a document."""
    text = (ROOT / document).read_text(encoding="utf-8")
    text = text[text.index(begin) : text.index(end) if end else len(text)]
    found = BLOCK.findall(text)
    assert found, f"{document} has no commands to paste any more"
    return "\n".join(found)


def readme() -> str:
    return blocks("README.md", "## People, keys and limits", "## Test it")


def money() -> str:
    """Return the commands of docs/money.md after those it builds on; the last ones need usage that went wrong."""
    # A month that is not over cannot be closed, and a user may have no hledger; both are said so by the commands.
    text = re.sub(
        r"^tidegate ledger close .*$|&& hledger .*$",
        "",
        blocks("docs/money.md", "## Prices", "## Quarantine"),
        flags=re.MULTILINE,
    )
    return f'{readme()}\nKEY="$DEMO_KEY"\n{text}'


def paste(commands: str, platform: Platform, folder: Path) -> list[str]:
    """Run commands in a bash that ends at the first failure; return status, method and address of each answer."""
    log, shim = folder / "answers", folder / "bin" / "curl"
    shim.parent.mkdir()
    shim.write_text(CURL.format(curl=shutil.which("curl"), log=log), encoding="utf-8")
    shim.chmod(0o755)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".tidegate").symlink_to(platform.home)
    facts = platform.facts
    given = {
        "OPERATOR": facts["admin_token"],
        "PASSWORD": facts["tenant_password"],
        "DEMO_KEY": facts["api_key"],
        "TIDEGATE_HOME": str(platform.home),
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euc", commands.replace(SHOWN_ADDRESS, facts["base_url"])],
        cwd=folder,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    return log.read_text(encoding="utf-8").splitlines()


@pytest.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    platform = Platform(tmp_path)
    try:
        await platform.start()
        yield platform
    finally:
        platform.stop()


@needs_curl
@pytest.mark.timeout(PATIENCE_S)
async def test_the_commands_of_the_readme_and_of_the_metrics_work_when_they_are_pasted(
    platform: Platform, tmp_path: Path
) -> None:
    answers = paste(f"{readme()}\n{blocks('docs/metrics.md')}", platform, tmp_path)
    refused = [answer for answer in answers if not answer.startswith("2")]
    assert len(answers) > 30
    assert [answer.split()[0] for answer in refused] == ["429"], refused  # the third call, as the README says


@needs_curl
@pytest.mark.soak
@pytest.mark.timeout(PATIENCE_S)
async def test_the_commands_about_money_work_when_they_are_pasted(platform: Platform, tmp_path: Path) -> None:
    answers = paste(money(), platform, tmp_path)
    refused = [answer for answer in answers if not answer.startswith("2")]
    assert len(answers) > 60
    assert [answer.split()[0] for answer in refused] == ["429"], refused

"""Become one gateway worker on PORT, with the running services of `bench.services`: `python -m bench.gateway PORT`."""

import json
import os
import sys

from bench.services import STATE


def main(port: str) -> None:
    variables = json.loads(STATE.read_text(encoding="utf-8"))["environment"]
    os.execve(  # noqa: S606 - no shell
        sys.executable,
        [sys.executable, "-m", "cli.main", "gateway"],
        os.environ | variables | {"TIDEGATE_GATEWAY__PORT": port},
    )


if __name__ == "__main__":
    main(sys.argv[1])

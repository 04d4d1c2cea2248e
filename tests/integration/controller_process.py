"""A controller as a process of its own, for tests that kill it: settings from the environment, `argv[1]` says ready."""

import sys
from pathlib import Path

from core.settings import Settings
from knative import controller

if __name__ == "__main__":
    controller.run(Settings.load(), lambda: Path(sys.argv[1]).touch())

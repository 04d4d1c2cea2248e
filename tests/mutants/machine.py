"""One run of the money machine by the code of this folder, on services that run already; ends with 1 when it fails.

Reads from its input, as JSON: the URLs of the database, Valkey's socket, and the seed. What failed is its last line.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path

from core.settings import Database
from tests.property.billing.test_books import EXAMPLES, STEPS, drive


def main() -> int:
    given = json.load(sys.stdin)
    database = Database.model_validate(given["database"])
    with tempfile.TemporaryDirectory(prefix="tg-machine-") as folder:
        try:
            drive(
                database,
                Path(given["valkey"]),
                examples=EXAMPLES,
                steps=STEPS,
                number=given["seed"],
                folder=Path(folder),
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it has found the fault
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" in frame.filename]
            where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "?"
            first = (str(error).splitlines() or [""])[0][:60]
            sys.stdout.write(f"{where}: {type(error).__name__} {first}".rstrip() + "\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

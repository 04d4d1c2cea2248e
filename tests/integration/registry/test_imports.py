"""Imports from a folder, a real S3 server, and a hub."""

import hashlib
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from obstore.store import S3Store

from catalog.registry import intakes, manifest, store, versions, work
from catalog.registry.types import Asked, RegisteredVersion, Source, SourceKind
from core import db
from core.errors import PlatformError
from core.settings import Objects
from engine import model_files, prepare
from tests.factories import registry as make
from tests.factories.object_server import FakeHub, serve

GGUF = make.gguf(filling=bytes(range(256)) * 40_000)  # 10 MB: several parts of a multipart upload
FILES = {"m.gguf": GGUF, "README.md": b"# tide\n"}
FOLDER = {**FILES, ".git/config": b"x", "train.py": b"x", "empty.json": b""}


async def asked(desk: work.Desk, model_id: UUID, source: Source, asked_: Asked | None = None) -> UUID:
    async with db.transaction(desk.sessions) as session:
        return await intakes.create_import(
            session,
            model_id,
            source,
            asked_ or Asked(),
            number=0,
            limits=desk.settings.registry,
            now=desk.clock.now(),
        )


async def outcome(desk: work.Desk, intake_id: UUID) -> RegisteredVersion | str:
    """The version that an intake became, or why not."""
    async with db.transaction(desk.sessions) as session:
        intake, _ = await intakes.get(session, intake_id)
        return intake.error if intake.version_id is None else await versions.get(session, intake.version_id)


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


async def test_a_folder_is_imported_once_however_often_it_is_asked_for(sessions: db.Sessions, tmp_path: Path) -> None:
    desk = make.desk_at(make.settings_at(tmp_path / "home"), sessions, None, tmp_path)
    source = Source(SourceKind.FOLDER, str(write(tmp_path / "in", FOLDER)))
    model_id, made = await make.model(sessions), []
    for _ in range(2):
        intake_id = await asked(desk, model_id, source)
        assert await make.worked(desk, intake_id) == "done"
        made.append(await outcome(desk, intake_id))
    assert isinstance(made[0], RegisteredVersion)
    assert made[0] == made[1]
    assert made[0].size_bytes == sum(len(content) for content in FILES.values())
    assert made[0].provenance["kind"] == "folder"
    async with db.transaction(sessions) as session:
        assert {file.path for file in await versions.files_of(session, made[0].id)} == set(FILES)


async def test_a_folder_outside_of_those_allowed_is_not_read(sessions: db.Sessions, tmp_path: Path) -> None:
    """Neither by its path, nor by a link in a folder that is."""
    allowed = write(tmp_path / "allowed", {"README.md": b"x"})
    (allowed / "m.gguf").symlink_to(write(tmp_path / "other", {"m.gguf": GGUF}) / "m.gguf")
    desk = make.desk_at(make.settings_at(tmp_path / "home"), sessions, None, allowed)
    model_id = await make.model(sessions)
    for location, why in ((tmp_path / "other", "may read"), (allowed, "leads out")):
        intake_id = await asked(desk, model_id, Source(SourceKind.FOLDER, str(location)))
        assert await make.worked(desk, intake_id) == "failed"
        assert why in str(await outcome(desk, intake_id))


async def test_a_source_that_changes_while_it_is_read_is_refused(sessions: db.Sessions, tmp_path: Path) -> None:
    """Between hashing and moving."""
    desk, mover = make.desk_at(make.settings_at(tmp_path / "home"), sessions, None, tmp_path), work.Mover()
    folder = write(tmp_path / "in", {"m.gguf": GGUF})
    intake_id = await asked(desk, await make.model(sessions), Source(SourceKind.FOLDER, str(folder)))
    while await work.work(mover, desk, intake_id, seconds=0):
        async with db.transaction(sessions) as session:
            intake, _ = await intakes.get(session, intake_id)
        if intake.state == "moving":
            write(folder, {"m.gguf": GGUF[:-1] + b"!"})
    assert await make.worked(desk, intake_id, mover) == "failed"
    assert "another SHA-256" in str(await outcome(desk, intake_id))
    assert [path for path in (tmp_path / "home/objects").rglob("*") if path.is_file()] == []


async def test_a_prefix_in_s3_is_imported_into_s3_and_served_from_it(
    sessions: db.Sessions, tmp_path: Path, objects: Objects, s3: S3Store
) -> None:
    for path, content in {**FOLDER, "sub/x.json": b"{}"}.items():
        await store.put(s3, f"in/{path}", content)
    desk = make.desk_at(make.settings_at(tmp_path, objects=objects.model_dump()), sessions)
    source = Source(SourceKind.S3, f"{objects.url}/in", include=("*.gguf", "README.md"))
    intake_id = await asked(desk, await make.model(sessions), source, Asked(licence="MIT"))
    assert await make.worked(desk, intake_id) == "done"
    made = await outcome(desk, intake_id)
    assert isinstance(made, RegisteredVersion)
    folder = store.version_folder(made.model_id, 1, made.sha256)
    stored = {found["path"]: found["size"] async for found in store.listed(s3, folder)}
    names = {**{path: len(content) for path, content in FILES.items()}, manifest.MANIFEST_FILE: len(made.manifest)}
    assert stored == {f"{folder}/{path}": size for path, size in names.items()}
    prepare.prepare(made.source, made.sha256, tmp_path, objects)
    found = model_files.locate(made.source, made.sha256, tmp_path)
    assert (found.ready, found.path.read_bytes()) == (True, GGUF)


async def test_a_fetch_from_s3_that_was_cut_goes_on(
    sessions: db.Sessions, tmp_path: Path, objects: Objects, s3: S3Store
) -> None:
    desk = make.desk_at(make.settings_at(tmp_path, objects=objects.model_dump()), sessions)
    version_id = await make.uploaded(desk, await make.model(sessions), {"m.gguf": GGUF[:5000]})
    async with db.transaction(sessions) as session:
        made = await versions.get(session, version_id)
    folder = tmp_path / "models" / made.sha256
    folder.mkdir(parents=True)
    (folder / ".m.gguf.part").write_bytes(GGUF[:1234])
    prepare.prepare(made.source, made.sha256, tmp_path, objects)
    assert (folder / "m.gguf").read_bytes() == GGUF[:5000]
    assert not (folder / ".m.gguf.part").exists()


async def test_a_flipped_byte_never_appears_in_s3(
    sessions: db.Sessions, tmp_path: Path, objects: Objects, s3: S3Store
) -> None:
    settings = make.settings_at(tmp_path, objects=objects.model_dump(), registry={"part_bytes": 8_388_608})
    desk = make.desk_at(settings, sessions)
    intake_id = await make.opened(desk, await make.model(sessions), {"m.gguf": GGUF})
    await make.send(desk, intake_id, {"m.gguf": GGUF[:-1] + b"!"})
    assert await make.finish(desk, intake_id) == "failed"
    assert [found["path"] async for found in store.listed(s3, "")] == []


async def test_weights_swapped_in_the_bucket_do_not_start(
    sessions: db.Sessions, tmp_path: Path, objects: Objects, s3: S3Store
) -> None:
    desk = make.desk_at(make.settings_at(tmp_path, objects=objects.model_dump()), sessions)
    version_id = await make.uploaded(desk, await make.model(sessions), {"m.gguf": GGUF[:5000]})
    async with db.transaction(sessions) as session:
        made = await versions.get(session, version_id)
    key = f"{store.version_folder(made.model_id, 1, made.sha256)}/m.gguf"
    await store.put(s3, key, GGUF[:4999] + b"!")
    with pytest.raises(PlatformError, match="no engine is started"):
        prepare.prepare(made.source, made.sha256, tmp_path, objects)
    assert not (tmp_path / "models" / made.sha256 / "m.gguf").exists()


async def hub_import(
    sessions: db.Sessions, home: Path, hub: FakeHub, *, include: tuple[str, ...] = (), **registry: Any
) -> RegisteredVersion | str:
    runner, url = await serve(hub)
    try:
        hosts = [host.replace("HUB", url.removeprefix("http://")) for host in registry.pop("hub_file_hosts", ())]
        hub.files_at = hub.files_at.replace("HUB", url)
        desk = make.desk_at(
            make.settings_at(home, registry={"hub_url": url, "hub_file_hosts": hosts, **registry}), sessions
        )
        source = Source(SourceKind.HUB, "org/tide", include=include)
        intake_id = await asked(desk, await make.model(sessions, f"m{len(hub.contents)}"), source)
        mover = work.Mover()
        while await work.work(mover, desk, intake_id):
            pass
        return await outcome(desk, intake_id)
    finally:
        await runner.cleanup()


async def test_a_repository_of_a_hub_is_imported_at_its_commit(sessions: db.Sessions, tmp_path: Path) -> None:
    hub = FakeHub(FOLDER, frozenset({"m.gguf"}), token="hf_x")
    made = await hub_import(sessions, tmp_path, hub, hub_token="hf_x")
    assert isinstance(made, RegisteredVersion), made
    assert made.provenance == {"kind": "hub", "source": "org/tide", "revision": hub.commit}
    assert made.licence == "apache-2.0"
    assert {path for path, _ in hub.asked[1:]} == {f"/org/tide/resolve/{hub.commit}/{path}" for path in FILES}
    reads = [path for path, _ in hub.asked if path.endswith(".gguf")]
    assert len(reads) == 1  # the hub said its hash


async def test_a_download_that_breaks_off_goes_on_from_there(sessions: db.Sessions, tmp_path: Path) -> None:
    hub = FakeHub({"m.gguf": GGUF}, frozenset({"m.gguf"}), breaks_after=4_000_000)
    made = await hub_import(sessions, tmp_path, hub)
    assert isinstance(made, RegisteredVersion), made
    assert made.sha256 == hashlib.sha256(GGUF).hexdigest()
    assert hub.ranges[0] == ""
    assert all(wanted.startswith("bytes=") for wanted in hub.ranges[1:])
    assert len(hub.ranges) >= 3


async def test_a_redirect_to_a_named_host_is_followed_without_our_token(sessions: db.Sessions, tmp_path: Path) -> None:
    other, url = await serve(FakeHub({"m.gguf": GGUF}))
    try:
        hub = FakeHub({"m.gguf": GGUF}, frozenset({"m.gguf"}), token="hf_x", files_at=url)
        named = [url.removeprefix("http://")]
        made = await hub_import(sessions, tmp_path, hub, hub_token="hf_x", hub_file_hosts=named)
    finally:
        await other.cleanup()
    assert isinstance(made, RegisteredVersion), made
    assert [sent for path, sent in hub.asked if path.startswith("/cdn")] == []


async def test_a_redirect_elsewhere_is_refused_and_nothing_is_called_there(
    sessions: db.Sessions, tmp_path: Path
) -> None:
    elsewhere = FakeHub({"m.gguf": GGUF})
    other, url = await serve(elsewhere)
    try:
        hub = FakeHub({"m.gguf": GGUF}, frozenset({"m.gguf"}), files_at=url)
        why = await hub_import(sessions, tmp_path, hub)
    finally:
        await other.cleanup()
    assert "HUB_FILE_HOSTS" in str(why)
    assert elsewhere.asked == []


async def test_the_token_does_not_leave_the_hub(sessions: db.Sessions, tmp_path: Path) -> None:
    files = FakeHub({"m.gguf": GGUF})
    other, url = await serve(files)
    try:
        hub = FakeHub({"m.gguf": GGUF}, frozenset({"m.gguf"}), token="hf_x", files_at=url)
        await hub_import(sessions, tmp_path, hub, hub_token="hf_x", hub_file_hosts=[url.removeprefix("http://")])
    finally:
        await other.cleanup()
    assert files.asked == [("/cdn/m.gguf", "")]


@pytest.mark.parametrize(
    ("hub", "why"),
    [
        (FakeHub({"m.gguf": GGUF}, token="other"), "does not give this repository"),
        (FakeHub({"train.py": b"x"}), "no files of weights"),
        (FakeHub({"a b.gguf": GGUF}), "no path of a version"),
        (FakeHub({"a.gguf": GGUF, "b.gguf": GGUF}), "one model"),
        (FakeHub({"m.gguf": b"no model at all"}), "no usable GGUF"),
    ],
)
async def test_what_a_hub_has_that_is_no_version_is_refused(
    sessions: db.Sessions, tmp_path: Path, hub: FakeHub, why: str
) -> None:
    assert why in str(await hub_import(sessions, tmp_path, hub))
    assert list((tmp_path / "objects").rglob("*.gguf")) == []

"""Uploads into the registry, on a real Postgres and a store in a folder."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from api.inference.cold import _deprecation
from catalog import deployments, models
from catalog.registry import intakes, manifest, store, tasks, versions, work
from catalog.registry.types import Asked, IntakeState
from catalog.types import DeploymentKind, EngineKind, NewDeployment
from core import db
from core.clock import ManualClock
from core.errors import PlatformError
from tests.factories import registry as make
from tests.factories.catalog import SEALING_KEY

GGUF = make.gguf(filling=bytes(1000))
FILES = {
    "config.json": b'{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 99}',
    "a/model.safetensors": make.safetensors({"w": ("BF16", [4, 8], 2)}),
}


@pytest.fixture
def desk(sessions: db.Sessions, tmp_path: Path) -> work.Desk:
    return make.desk_at(make.settings_at(tmp_path), sessions)


async def state_of(desk: work.Desk, intake_id: UUID) -> tuple[str, str]:
    async with db.transaction(desk.sessions) as session:
        intake, _ = await intakes.get(session, intake_id)
    return intake.state.value, intake.error


async def test_an_uploaded_file_is_a_version_that_says_what_it_is(desk: work.Desk, tmp_path: Path) -> None:
    version_id = await make.uploaded(desk, await make.model(desk.sessions), {"m.gguf": GGUF}, Asked(make_current=True))
    async with db.transaction(desk.sessions) as session:
        made, files = await versions.get(session, version_id), await versions.files_of(session, version_id)
        assert (await models.list_versions(session, made.model_id))[0].sha256 == made.sha256
        assert await versions.pinned(session, made.reference) == version_id
    sha256 = hashlib.sha256(GGUF).hexdigest()
    assert (made.reference, made.licence, made.context_max) == (f"tide@1:{sha256}", "mit", 512)
    # 2 layers x 2 KV heads x 16 numbers x keys and values x 2 bytes
    assert (made.facts.kv_bytes_per_token, made.facts.quantisation, made.facts.vocabulary) == (256, "Q4_K_M", 3)
    assert versions.is_authentic(made, files, desk.keys)
    folder = tmp_path / "objects" / store.version_folder(made.model_id, 1, sha256)
    assert (folder / "m.gguf").read_bytes() == GGUF
    assert (folder / manifest.MANIFEST_FILE).read_text() == made.manifest
    assert list((tmp_path / "objects" / "uploads").rglob("*-*")) == []


async def test_several_files_are_one_version_whose_hash_is_of_their_list(desk: work.Desk) -> None:
    version_id = await make.uploaded(desk, await make.model(desk.sessions), FILES, Asked(licence="MIT"))
    async with db.transaction(desk.sessions) as session:
        made = await versions.get(session, version_id)
    lines = [
        f'{{"path":"{path}","sha256":"{hashlib.sha256(FILES[path]).hexdigest()}","size":{len(FILES[path])}}}'
        for path in sorted(FILES)
    ]
    assert made.sha256 == hashlib.sha256(f"[{','.join(lines)}]".encode()).hexdigest()
    assert (made.facts.parameters, made.facts.quantisation, made.context_max) == (32, "bf16", 99)


async def test_a_flipped_byte_is_refused_and_nothing_of_it_stays(desk: work.Desk, tmp_path: Path) -> None:
    intake_id = await make.opened(desk, await make.model(desk.sessions), {"m.gguf": GGUF})
    flipped = bytearray(GGUF)
    flipped[-1] ^= 1
    await make.send(desk, intake_id, {"m.gguf": bytes(flipped)})
    assert await make.finish(desk, intake_id) == "failed"
    assert "another SHA-256" in (await state_of(desk, intake_id))[1]
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []
    async with db.transaction(desk.sessions) as session:
        assert await versions.list_all(session) == []


async def test_a_part_altered_on_its_way_is_refused_at_once(desk: work.Desk) -> None:
    intake_id = await make.opened(desk, await make.model(desk.sessions), {"m.gguf": GGUF})
    said = hashlib.sha256(GGUF[: make.PART]).hexdigest()
    with pytest.raises(PlatformError, match="altered on its way"):
        await intakes.receive(
            desk.sessions,
            desk.objects,
            intake_id,
            0,
            start=0,
            content=GGUF[: make.PART - 1] + b"!",
            sha256=said,
            now=desk.clock.now(),
        )
    await make.send(desk, intake_id, {"m.gguf": GGUF})
    assert await make.finish(desk, intake_id) == "done"


async def test_two_uploads_of_one_version_one_wins_and_nothing_is_mixed(desk: work.Desk, tmp_path: Path) -> None:
    """They send in turns, a part each; both hold the number 1."""
    model_id = await make.model(desk.sessions)
    contents = [{"m.gguf": make.gguf(filling=bytes([n]) * (make.PART * 2))} for n in (1, 2)]
    first, second = [await make.opened(desk, model_id, content, number=1) for content in contents]
    for start in range(0, len(contents[0]["m.gguf"]), make.PART):
        for intake_id, content in zip((first, second), contents, strict=True):
            part = content["m.gguf"][start : start + make.PART]
            now = desk.clock.now()
            await intakes.receive(
                desk.sessions, desk.objects, intake_id, 0, start=start, content=part, sha256="", now=now
            )
    states = [await make.finish(desk, second), await make.finish(desk, first)]
    assert states == ["done", "failed"]
    assert "Version 1 of tide is there" in (await state_of(desk, first))[1]
    async with db.transaction(desk.sessions) as session:
        (made,) = await versions.list_all(session)
    stored = tmp_path / "objects" / store.version_folder(model_id, 1, made.sha256) / "m.gguf"
    assert stored.read_bytes() == contents[1]["m.gguf"]


async def test_the_same_weights_twice_are_one_version(desk: work.Desk, tmp_path: Path) -> None:
    model_id = await make.model(desk.sessions)
    contents = {"m.gguf": GGUF}
    first, second = [await make.opened(desk, model_id, contents) for _ in range(2)]
    for intake_id in (first, second):
        await make.send(desk, intake_id, contents)
    assert [await make.finish(desk, intake_id) for intake_id in (second, first)] == ["done", "done"]
    async with db.transaction(desk.sessions) as session:
        (made,) = await versions.list_all(session)
        results = [(await intakes.get(session, intake_id))[0].version_id for intake_id in (first, second)]
        assert results == [made.id, made.id]
    assert len(list((tmp_path / "objects" / "models").rglob("m.gguf"))) == 1
    with pytest.raises(PlatformError, match="are version"):
        await make.opened(desk, model_id, contents)


async def test_the_same_part_sent_by_two_counts_once(desk: work.Desk) -> None:
    intake_id = await make.opened(desk, await make.model(desk.sessions), {"m.gguf": GGUF})
    await make.send(desk, intake_id, {"m.gguf": GGUF})
    with pytest.raises(PlatformError) as told:
        await intakes.receive(
            desk.sessions, desk.objects, intake_id, 0, start=0, content=GGUF, sha256="", now=desk.clock.now()
        )
    assert (told.value.code, told.value.fields) == ("OFFSET_WRONG", {"received_bytes": len(GGUF)})


async def test_an_incomplete_upload_is_not_completed(desk: work.Desk) -> None:
    intake_id = await make.opened(desk, await make.model(desk.sessions), {"m.gguf": GGUF})
    with pytest.raises(PlatformError, match="has 0 of"):
        await make.finish(desk, intake_id)


async def test_there_are_only_so_many_uploads_at_once(sessions: db.Sessions, tmp_path: Path) -> None:
    desk = make.desk_at(make.settings_at(tmp_path, registry={"uploads_max": 1}), sessions)
    model_id = await make.model(sessions)
    await make.opened(desk, model_id, {"m.gguf": GGUF})
    with pytest.raises(PlatformError, match="Complete or cancel one first"):
        await make.opened(desk, model_id, {"m.gguf": GGUF})


async def test_an_upload_that_nobody_completes_is_given_up_and_deleted(sessions: db.Sessions, tmp_path: Path) -> None:
    from core.tasks import TaskContext

    clock = ManualClock()
    desk = make.desk_at(make.settings_at(tmp_path), sessions, clock)
    intake_id = await make.opened(desk, await make.model(sessions), {"m.gguf": GGUF})
    await make.send(desk, intake_id, {"m.gguf": GGUF})
    context = TaskContext(desk.settings, sessions, clock)
    clock.advance(6 * 86_400)
    await tasks.sweep(context)
    assert (await state_of(desk, intake_id))[0] == IntakeState.RECEIVING
    clock.advance(86_400)
    await tasks.sweep(context)
    assert await state_of(desk, intake_id) == ("cancelled", "It was not complete in time.")
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []


async def test_a_process_that_dies_while_moving_is_followed_by_another(desk: work.Desk, tmp_path: Path) -> None:
    """The first holds the lease for 30 s; what it had moved is not moved again."""
    clock = ManualClock()
    desk.clock = clock
    model_id = await make.model(desk.sessions)
    intake_id = await make.opened(desk, model_id, FILES)
    await make.send(desk, intake_id, FILES)
    async with db.transaction(desk.sessions) as session:
        await intakes.complete(session, intake_id, now=clock.now())
    assert await work.work(work.Mover(), desk, intake_id, seconds=0)
    other = work.Mover()
    assert not await work.work(other, desk, intake_id)  # the first may still be at it
    assert (await state_of(desk, intake_id))[0] == "moving"
    clock.advance(31)
    assert await make.worked(desk, intake_id, other) == "done"


async def test_a_new_signing_key_signs_manifests_anew(sessions: db.Sessions, tmp_path: Path) -> None:
    from core.tasks import TaskContext

    desk = make.desk_at(make.settings_at(tmp_path), sessions)
    version_id = await make.uploaded(desk, await make.model(sessions), {"m.gguf": GGUF})
    secrets = {**make.KEYS, "signing": "33" * 32}
    turned = make.settings_at(tmp_path, secrets={**secrets, "previous_signing": [make.KEYS["signing"]]})
    await tasks.sign_anew(TaskContext(turned, sessions, desk.clock))
    alone = manifest.keys_of(make.settings_at(tmp_path, secrets=secrets).secrets)
    async with db.transaction(sessions) as session:
        made, files = await versions.get(session, version_id), await versions.files_of(session, version_id)
    assert versions.is_authentic(made, files, alone)
    assert not versions.is_authentic(made, files, desk.keys)
    assert not versions.is_authentic(made, files[:0], alone)


async def test_a_deprecated_version_is_served_and_callers_see_it(desk: work.Desk) -> None:
    version_id = await make.uploaded(desk, await make.model(desk.sessions), {"m.gguf": GGUF}, Asked(make_current=True))
    new = NewDeployment(
        name="tide",
        version_id=version_id,
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.LLAMA_CPP,
        upstream_model="tide",
        endpoints=frozenset({"chat"}),
    )
    at = datetime(2027, 1, 1, tzinfo=UTC)
    async with db.transaction(desk.sessions) as session:
        await deployments.create(session, new, sealing_key=SEALING_KEY, now=desk.clock.now())
        assert _deprecation((await models.load_served(session))["tide"], 0) == {}
        await versions.deprecate(session, version_id, at=at, note="use tide-2")
        served = (await models.load_served(session))["tide"]
    told = {"deprecated_at": "2027-01-01T00:00:00+00:00", "deprecation_note": "use tide-2"}
    at_us = int(at.timestamp()) * 1_000_000
    assert _deprecation(served, at_us - 1) == {**told, "deprecated": False}
    assert _deprecation(served, at_us) == {**told, "deprecated": True}

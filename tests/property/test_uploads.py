"""However an upload is cut, repeated and gone on with: what is registered is what was meant, or nothing."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.registry import intakes, store, versions
from core import db
from core.errors import PlatformError
from core.ids import new_uuid
from tests.factories import registry as make

PART = make.PART
HEAD = make.gguf()


@dataclass(frozen=True)
class Try:
    """One connection: begins where the sender thinks it must, and breaks after so many bytes of a part."""

    file: int
    behind: int  # parts that the sender goes back, because it lost the answers to them
    sent: int  # bytes of the part that arrive


TRIES = st.lists(
    st.builds(Try, st.integers(0, 1), st.integers(0, 1), st.one_of(st.just(PART), st.integers(0, PART))), max_size=6
)
SIZES = st.sampled_from([1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 7])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tries=TRIES, size=SIZES)
async def test_an_upload_cut_at_any_byte_resumes(
    sessions: db.Sessions, tmp_path: Path, tries: list[Try], size: int
) -> None:
    desk = make.desk_at(make.settings_at(tmp_path), sessions)
    name = f"m-{new_uuid().hex}"
    contents = {"m.gguf": HEAD, "tokens.txt": (name.encode() * (size // 34 + 1))[:size]}
    model_id = await make.model(sessions, name)
    intake_id = await make.opened(desk, model_id, contents)
    for cut in tries:
        async with db.transaction(sessions) as session:
            file = (await intakes.get(session, intake_id))[1][cut.file]
        start = max(0, file.received_bytes - cut.behind * PART)
        whole = contents[file.path][start : start + PART]
        part = whole[: cut.sent]
        accepted = False
        with contextlib.suppress(PlatformError):
            now = desk.clock.now()
            await intakes.receive(
                sessions, desk.objects, intake_id, cut.file, start=start, content=part, sha256="", now=now
            )
            accepted = True
        # taken exactly when it is whole and begins where the file ended
        assert accepted == (len(part) == len(whole) > 0 and start == file.received_bytes)
    await make.send(desk, intake_id, contents)
    assert await make.finish(desk, intake_id) == "done"
    async with db.transaction(sessions) as session:
        (made,) = await versions.list_all(session, name)
    folder = tmp_path / "objects" / store.version_folder(model_id, made.number, made.sha256)
    assert {path: (folder / path).read_bytes() for path in contents} == contents

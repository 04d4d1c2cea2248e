"""Copies of spools for a backup: every event that was on disk, however the writer and the poster go on."""

from pathlib import Path
from uuid import UUID

import pytest

from billing import spool_format as fmt
from billing.price_table import VersionPrices
from billing.spool_copy import read_spools
from billing.spool_reader import SpoolReader
from billing.types import UsageEvent
from core.ids import new_uuid
from core.money import Currency
from tests.factories import billing as make
from tests.factories.billing_world import write

PRICES = VersionPrices(UUID(int=1), Currency.USD, make.items(make.PRICES))


def events(count: int) -> list[UsageEvent]:
    tenant_id = new_uuid()
    return [make.event(tenant_id, make.schedule(PRICES, tenant_id)) for _ in range(count)]


def copied(source: Path, target: Path) -> int:
    """Copy as a restored backup has it; return how many events it said there are."""
    count = 0
    for file in read_spools(source):
        (target / file.spool).mkdir(parents=True, exist_ok=True)
        (target / file.spool / file.name).write_bytes(file.content)
        count += file.events
    return count


def read_all(folder: Path) -> list[UUID]:
    reader, found = SpoolReader(folder), []
    while batch := reader.read(1000):
        found += [event.id for event in batch]
    return found


async def test_a_copy_has_every_event_of_every_spool(tmp_path: Path) -> None:
    one, two = events(40), events(3)
    await write(tmp_path / "spool" / "r1", one, segment_bytes=2048)
    await write(tmp_path / "spool" / "r2", two)
    assert copied(tmp_path / "spool", tmp_path / "copy") == 43
    assert read_all(tmp_path / "copy" / "r1") == [event.id for event in one]
    assert read_all(tmp_path / "copy" / "r2") == [event.id for event in two]


async def test_what_is_posted_is_not_offered_again(tmp_path: Path) -> None:
    made = events(40)
    await write(tmp_path / "spool" / "r", made, segment_bytes=2048)
    reader = SpoolReader(tmp_path / "spool" / "r")
    posted = reader.read(25)
    reader.acknowledge()
    copied(tmp_path / "spool", tmp_path / "copy")
    assert read_all(tmp_path / "copy" / "r") == [event.id for event in made[len(posted) :]]


@pytest.mark.parametrize("torn", [1, 7, 60])
async def test_a_frame_half_written_is_left_out_and_the_next_writer_goes_on(tmp_path: Path, torn: int) -> None:
    made = events(3)
    folder = tmp_path / "spool" / "r"
    await write(folder, made)
    segment = folder / fmt.segment_name(1)
    segment.write_bytes(segment.read_bytes() + fmt.encode(events(1)[0])[:torn] + bytes(500))
    assert copied(tmp_path / "spool", tmp_path / "copy") == 3
    later = events(2)
    await write(tmp_path / "copy" / "r", later)
    assert read_all(tmp_path / "copy" / "r") == [event.id for event in made + later]
    assert not list((tmp_path / "copy" / "r").glob("damaged-*"))

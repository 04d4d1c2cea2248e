"""What may be a password, and how it is kept."""

import asyncio
import threading

import pytest

from core.errors import ErrorKind, PlatformError
from tenants import passwords
from tenants.passwords import Cost, Hasher

GOOD = "tides-turn-at-dusk-again"
ANN = {"email": "ann.lee@example.com", "name": "Ann Lee"}
PHRASE = "lantern ebb quay moss wind tar kelp rope oak "
CHEAP = Cost(memory_kib=64, passes=1)


@pytest.mark.parametrize(
    "password",
    [
        "",
        "hk3!Wz9#qLp",  # 11 characters
        "k" * 257,
        "password1234",  # in every list of leaked passwords
        "qwertyuiop12345",
        "iloveyou1234",
        "aaaaaaaaaaaaaaaa",
        "abcdefghijklmnop",
        "ann.lee@example.com",
        "ANN.LEE@example.com",
        "Ann Lee Ann Lee",
        "tidegate1234",
        "annlee-tidegate",
    ],
)
def test_a_bad_password_is_refused_without_being_repeated(password: str) -> None:
    with pytest.raises(PlatformError) as caught:
        passwords.check(password, **ANN)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "password")
    assert not password or password not in caught.value.message


@pytest.mark.parametrize(
    "password",
    [
        GOOD,
        "hk3!Wz9#qLp7",
        "\u043b\u0435\u0442\u043e\u043f\u0438\u0441\u044c \u0432\u0435\u0442\u0435\u0440",
        (PHRASE * 7)[:256],
    ],
)
def test_a_good_one_passes(password: str) -> None:
    passwords.check(password, **ANN)


async def test_a_hash_is_salted_and_matches_its_password_alone() -> None:
    hasher = Hasher(CHEAP)
    one, two = await hasher.new(GOOD, **ANN), await hasher.new(GOOD, **ANN)
    assert one != two
    assert one.startswith("$argon2id$")
    assert GOOD not in one
    assert await hasher.matches(one, GOOD)
    assert not await hasher.matches(one, GOOD + " ")
    assert not await hasher.matches(one, "")


async def test_a_hash_presented_as_password_is_wrong() -> None:
    hasher = Hasher(CHEAP)
    stored = await hasher.new(GOOD, **ANN)
    assert not await hasher.matches(stored, stored)


@pytest.mark.parametrize("stored", ["", "$argon2id$nonsense", "plain text"])
async def test_without_a_hash_nothing_matches(stored: str) -> None:
    assert not await Hasher(CHEAP).matches(stored, GOOD)
    assert not await Hasher(CHEAP).matches(stored, "nobody has this password")
    assert not await Hasher(CHEAP).matches(stored, stored)


async def test_the_same_letters_of_another_keyboard_are_the_same_password() -> None:
    hasher = Hasher(CHEAP)
    stored = await hasher.new("\u00c5ngstr\u00f6m-\u00fcber-Fjord", **ANN)  # composed
    assert await hasher.matches(stored, "A\u030angstro\u0308m-u\u0308ber-Fjord")  # decomposed


async def test_a_change_of_cost_shows_in_old_hashes_alone() -> None:
    old, new = Hasher(CHEAP), Hasher(Cost(memory_kib=128, passes=2))
    stored = await old.new(GOOD, **ANN)
    assert not old.outdated(stored)
    assert new.outdated(stored)
    assert await new.matches(stored, GOOD)
    assert not new.outdated(await new.again(GOOD))


def test_the_default_cost_is_what_owasp_names() -> None:
    assert "$m=19456,t=2,p=1$" in asyncio.run(Hasher().again(GOOD))


async def test_work_is_in_two_threads_and_the_queue_is_bounded() -> None:
    hasher, gate, running = Hasher(CHEAP), threading.Event(), []

    def work() -> None:
        running.append(threading.current_thread().name)
        gate.wait(30)

    tasks = [asyncio.create_task(hasher._in_thread(work)) for _ in range(passwords.WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(PlatformError) as caught:
        await hasher.matches("", GOOD)
    assert (caught.value.kind, caught.value.retry_after_s) == (ErrorKind.UNAVAILABLE, 2)
    gate.set()
    await asyncio.gather(*tasks)
    assert len(set(running)) <= passwords.THREADS
    assert not await hasher.matches("", GOOD)  # free again
    hasher.close()

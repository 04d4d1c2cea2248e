"""API keys on a real database: owners, secrets that overlap, filters, revocation in bulk, peppers."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from core import db
from core.clock import ManualClock, SystemClock
from core.errors import PlatformError
from core.ids import new_uuid
from tenants import api_keys, key_secrets, members, operators, people, principals, projects
from tenants.credentials import Peppers, digest, pepper_id
from tenants.key_types import KeyFilter, KeyPolicy, KeyState
from tenants.types import KeyLimits, KeyOwner, Principal, Role, Scope, Status
from tests.factories.tenants import PEPPER, PEPPERS, Customer, changed, customer, operator

NEXT = bytes(range(32, 64))


async def _all(sessions: db.Sessions) -> dict[bytes, Principal]:
    async with db.transaction(sessions) as session:
        return await principals.load_all(session)


async def _refusal(sessions: db.Sessions, made: Customer) -> str:
    return (await _all(sessions))[made.digest].refusal


async def _person(sessions: db.Sessions, made: Customer, *, project: bool = False) -> UUID:
    """Somebody who is a developer of the tenant, or of its one project."""
    async with db.transaction(sessions) as session:
        person = await people.create(session, email=f"{uuid4().hex}@example.com")
        of_project = made.project.id if project else None
        await members.add(session, made.tenant.id, person.id, Role.DEVELOPER, project_id=of_project)
    return person.id


async def _account(sessions: db.Sessions, made: Customer, project_id: UUID | None = None) -> UUID:
    account_id = new_uuid()
    async with db.transaction(sessions) as session:
        await session.execute(
            text(
                "INSERT INTO service_account (id, tenant_id, project_id, name, role) "
                "VALUES (:i, :t, :p, :n, 'developer')"
            ),
            {"i": account_id, "t": made.tenant.id, "p": project_id or made.project.id, "n": account_id.hex},
        )
    return account_id


async def _own(sessions: db.Sessions, made: Customer, owner: KeyOwner) -> None:
    async with db.transaction(sessions) as session:
        await api_keys.update(
            session,
            made.tenant.id,
            made.key.id,
            name="owned",
            owner=owner,
            limits=made.key.limits,
            policy=KeyPolicy(SystemClock().now()),
        )


async def _run(sessions: db.Sessions, statement: str, **values: object) -> None:
    async with db.transaction(sessions) as session:
        await session.execute(text(statement), values)


# ---- who owns a key


PERSON_GOES = (
    "UPDATE person SET status = 'suspended' WHERE id = :owner",
    "UPDATE person SET status = 'deleted', deleted_at = now() WHERE id = :owner",
    "UPDATE member SET status = 'suspended' WHERE person_id = :owner",
    "DELETE FROM member WHERE person_id = :owner",
)


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("statement", PERSON_GOES)
async def test_a_key_dies_with_what_its_person_may(sessions: db.Sessions, statement: str, project: bool) -> None:
    made, other = await customer(sessions), await customer(sessions)
    person = await _person(sessions, made, project=project)
    await _own(sessions, made, KeyOwner(person_id=person))
    assert await _refusal(sessions, made) == ""
    await _run(sessions, statement, owner=person)
    found = await changed(sessions, "person", person)
    assert {key: value and value.refusal for key, value in found.items()} == {made.digest: "OWNER_SUSPENDED"}
    assert await _refusal(sessions, other) == ""


async def test_a_key_dies_with_its_service_account(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    account = await _account(sessions, made)
    await _own(sessions, made, KeyOwner(service_account_id=account))
    assert await _refusal(sessions, made) == ""
    await _run(sessions, "UPDATE service_account SET status = 'deleted' WHERE id = :owner", owner=account)
    found = await changed(sessions, "service_account", account)
    assert [value and value.refusal for value in found.values()] == ["OWNER_SUSPENDED"]


async def test_only_somebody_of_the_project_can_own_its_key(sessions: db.Sessions) -> None:
    made, other = await customer(sessions), await customer(sessions)
    stranger, foreign = await _person(sessions, other), await _account(sessions, other)
    for owner in (KeyOwner(person_id=stranger), KeyOwner(person_id=uuid4()), KeyOwner(service_account_id=foreign)):
        with pytest.raises(PlatformError) as caught:
            await _own(sessions, made, owner)
        assert caught.value.kind == "invalid"
    with pytest.raises(PlatformError, match="one owner"):
        await _own(sessions, made, KeyOwner(stranger, foreign))


async def test_who_comes_later_with_the_address_of_a_deleted_person_has_none_of_their_keys(
    sessions: db.Sessions,
) -> None:
    made = await customer(sessions)
    first = await _person(sessions, made)
    await _run(sessions, "UPDATE person SET email = 'a@example.com' WHERE id = :id", id=first)
    await _own(sessions, made, KeyOwner(person_id=first))
    await _run(sessions, "UPDATE person SET status = 'deleted', deleted_at = now() WHERE id = :id", id=first)
    async with db.transaction(sessions) as session:
        second = await people.create(session, email="A@example.com")
        await members.add(session, made.tenant.id, second.id, Role.OWNER)
    assert await _refusal(sessions, made) == "OWNER_SUSPENDED"
    async with db.transaction(sessions) as session:
        theirs = KeyFilter(owner_person_id=second.id)
        assert await api_keys.list_keys(session, made.tenant.id, after=None, limit=9, wanted=theirs) == ()


async def test_a_key_that_manages_has_the_present_rights_of_its_owner(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        assert not (await api_keys.rights_of(session, made.tenant.id, made.key.id)).any
    await _own(sessions, made, KeyOwner(service_account_id=await _account(sessions, made)))
    async with db.transaction(sessions) as session:
        rights = await api_keys.rights_of(session, made.tenant.id, made.key.id)
    assert rights.of_project == {made.project.id: frozenset({Role.DEVELOPER})}
    person = await _person(sessions, made)
    await _own(sessions, made, KeyOwner(person_id=person))
    for role in (Role.ADMIN, Role.VIEWER):
        await _run(sessions, "UPDATE member SET role = :role WHERE person_id = :id", role=role.value, id=person)
        async with db.transaction(sessions) as session:
            assert (await api_keys.rights_of(session, made.tenant.id, made.key.id)).roles == {role}


async def test_a_key_is_good_for_no_more_than_the_present_role_of_its_owner(sessions: db.Sessions) -> None:
    """Whichever way its owner came to be less, and back again: what the key was made for is kept."""
    made = await customer(sessions, KeyLimits(scopes=frozenset({Scope.INFERENCE, Scope.BATCH, Scope.USAGE_READ})))
    person, account = await _person(sessions, made), await _account(sessions, made)
    await _own(sessions, made, KeyOwner(person_id=person))
    by_role = {
        Role.VIEWER: set(),
        Role.FINANCE: {"usage.read"},
        Role.DEVELOPER: {"inference", "batch", "usage.read"},
        Role.OWNER: {"inference", "batch", "usage.read"},
    }
    for role, scopes in by_role.items():
        await _run(sessions, "UPDATE member SET role = :role WHERE person_id = :id", role=role.value, id=person)
        (known,) = (await changed(sessions, "person", person)).values()
        async with db.transaction(sessions) as session:
            fresh = await principals.find(session, PEPPERS, made.secret)
        assert known is not None
        assert known == fresh
        assert known.scopes == scopes
        assert known.refusal == ""
    await _own(sessions, made, KeyOwner(service_account_id=account))
    await _run(sessions, "UPDATE service_account SET role = 'finance' WHERE id = :id", id=account)
    (known,) = (await changed(sessions, "service_account", account)).values()
    assert known is not None
    assert known.scopes == {"usage.read"}


async def test_a_second_role_in_the_keys_project_counts_and_one_elsewhere_does_not(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    person = await _person(sessions, made)
    await _own(sessions, made, KeyOwner(person_id=person))
    async with db.transaction(sessions) as session:
        elsewhere = await projects.create(session, made.tenant.id, name="elsewhere")
        await members.add(session, made.tenant.id, person, Role.DEVELOPER, project_id=elsewhere.id)
    viewer = "UPDATE member SET role = 'viewer' WHERE person_id = :id AND project_id IS NULL"
    await _run(sessions, viewer, id=person)
    assert (await _all(sessions))[made.digest].scopes == set()
    async with db.transaction(sessions) as session:
        await members.add(session, made.tenant.id, person, Role.DEVELOPER, project_id=made.project.id)
    assert (await _all(sessions))[made.digest].scopes == {"inference", "usage.read"}


async def test_nobody_makes_a_key_that_is_good_for_more_than_its_owner(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    person = await _person(sessions, made)
    await _run(sessions, "UPDATE member SET role = 'finance' WHERE person_id = :id", id=person)
    with pytest.raises(PlatformError, match="does not allow inference") as caught:
        await _own(sessions, made, KeyOwner(person_id=person))
    assert (caught.value.code, caught.value.param) == ("SCOPE_NOT_ALLOWED", "scopes")


async def test_the_reason_nearest_to_the_key_is_told(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    person = await _person(sessions, made)
    await _own(sessions, made, KeyOwner(person_id=person))
    steps = (
        ("UPDATE tenant SET status = 'suspended' WHERE id = :t", "TENANT_SUSPENDED"),
        ("UPDATE project SET status = 'suspended' WHERE tenant_id = :t", "PROJECT_SUSPENDED"),
        ("UPDATE member SET status = 'suspended' WHERE tenant_id = :t", "OWNER_SUSPENDED"),
        ("UPDATE api_key SET status = 'suspended' WHERE tenant_id = :t", "KEY_SUSPENDED"),
        ("UPDATE api_key SET expires_at = now() WHERE tenant_id = :t", "KEY_EXPIRED"),
        ("UPDATE api_key SET revoked_at = now() WHERE tenant_id = :t", "KEY_REVOKED"),
    )
    for statement, code in steps:
        await _run(sessions, statement, t=made.tenant.id)
        assert await _refusal(sessions, made) == code


async def test_a_key_is_suspended_until_it_is_resumed_and_revoked_for_good(sessions: db.Sessions) -> None:
    made, clock = await customer(sessions), SystemClock()
    for status, refusal in (
        (Status.SUSPENDED, "KEY_SUSPENDED"),
        (Status.SUSPENDED, "KEY_SUSPENDED"),
        (Status.ACTIVE, ""),
    ):
        async with db.transaction(sessions) as session:
            await api_keys.set_status(session, made.tenant.id, made.key.id, status, clock=clock)
        found = await changed(sessions, "api_key", made.key.id)
        assert [value and value.refusal for value in found.values()] == [refusal]
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=clock)
        with pytest.raises(PlatformError) as caught:
            await api_keys.set_status(session, made.tenant.id, made.key.id, Status.ACTIVE, clock=clock)
    assert (caught.value.code, caught.value.kind) == ("KEY_REVOKED", "conflict")


# ---- what may be given


NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def _end(wanted: datetime | None, before: KeyLimits | None = None, days: int = 90) -> datetime | None:
    return api_keys.allowed(KeyLimits(expires_at=wanted), KeyPolicy(NOON, days), before).expires_at


def test_a_key_ends_when_the_platform_says_at_the_latest() -> None:
    latest = datetime(2027, 3, 1, 12, tzinfo=UTC)  # 90 days from the 1st of December: 30 + 31 + 28 and one
    assert _end(None) == latest
    assert _end(latest) == latest
    assert _end(NOON + timedelta(days=1)) == NOON + timedelta(days=1)
    with pytest.raises(PlatformError, match=r"90 days at most here: until 2027-03-01 12:00 UTC"):
        _end(latest + timedelta(seconds=1))
    assert _end(None, days=0) is None
    assert _end(latest, KeyLimits(expires_at=NOON)) == latest  # moved by an update
    assert _end(None, KeyLimits()) == latest  # made before there was a maximum, changed since
    old = KeyLimits(expires_at=datetime(2030, 1, 1, tzinfo=UTC))
    assert _end(old.expires_at, old) == latest
    past = KeyLimits(expires_at=NOON - timedelta(days=1))
    assert _end(past.expires_at, past) == past.expires_at  # an expired key may be renamed, and stays expired
    with pytest.raises(PlatformError, match="expired already"):
        _end(NOON)


async def test_nobody_gives_more_than_their_role_lets_them_also_later(sessions: db.Sessions) -> None:
    made = await customer(sessions, KeyLimits(scopes=frozenset({Scope.MANAGE})))
    developer = KeyPolicy(SystemClock().now(), scopes=frozenset({Scope.INFERENCE, Scope.BATCH, Scope.USAGE_READ}))
    with pytest.raises(PlatformError) as caught:
        async with db.transaction(sessions) as session:
            await api_keys.update(
                session,
                made.tenant.id,
                made.key.id,
                name="renamed",
                owner=made.key.owner,
                limits=made.key.limits,
                policy=developer,
            )
    assert (caught.value.code, caught.value.kind) == ("SCOPE_NOT_ALLOWED", "forbidden")
    with pytest.raises(PlatformError) as caught:
        async with db.transaction(sessions) as session:
            await api_keys.create(
                session,
                made.tenant.id,
                made.project.id,
                name="x",
                pepper=PEPPER,
                limits=made.key.limits,
                policy=developer,
            )
    assert caught.value.code == "SCOPE_NOT_ALLOWED"
    for scopes in ({Scope.MANAGE, Scope.INFERENCE}, {Scope.MANAGE, Scope.BATCH}):
        with pytest.raises(PlatformError, match="cannot call models"):
            await customer(sessions, KeyLimits(scopes=frozenset(scopes)))


# ---- secrets


async def _rotate(sessions: db.Sessions, made: Customer, overlap: timedelta, now: datetime, days: int = 0) -> bytes:
    async with db.transaction(sessions) as session:
        _, secret = await api_keys.rotate(
            session, made.tenant.id, made.key.id, pepper=PEPPER, overlap=overlap, policy=KeyPolicy(now, days)
        )
    return digest(PEPPER, secret)


async def test_both_secrets_work_during_the_overlap_and_only_the_new_one_after(sessions: db.Sessions) -> None:
    made, clock = await customer(sessions), SystemClock()
    now = clock.now()
    second = await _rotate(sessions, made, timedelta(days=1), now)
    known = await _all(sessions)
    assert {known[made.digest].key_id, known[second].key_id} == {made.key.id}
    assert (known[made.digest].refusal, known[second].refusal) == ("", "")
    assert known[made.digest].expires_at_us == int((now + timedelta(days=1)).timestamp() * 1_000_000)
    assert known[second].expires_at_us == 0
    third = await _rotate(sessions, made, timedelta(days=30), now + timedelta(hours=1))  # within the overlap
    known = await _all(sessions)
    assert (known[made.digest].refusal, known[second].refusal, known[third].refusal) == ("KEY_REVOKED", "", "")
    fourth = await _rotate(sessions, made, timedelta(0), now + timedelta(hours=2))
    known = await _all(sessions)
    assert [known[d].refusal for d in (second, third, fourth)] == ["KEY_REVOKED", "KEY_REVOKED", ""]
    async with db.transaction(sessions) as session:
        key = await api_keys.get(session, made.tenant.id, made.key.id)
    assert [secret.last4 for secret in key.secrets][-1] == made.secret[-4:]
    assert key.last4 == key.secrets[0].last4


async def test_the_first_end_of_key_and_secret_counts(sessions: db.Sessions) -> None:
    now = SystemClock().now()
    made = await customer(sessions, KeyLimits(expires_at=now + timedelta(days=2)))
    second = await _rotate(sessions, made, timedelta(days=5), now)
    ends = {key: value.expires_at_us for key, value in (await _all(sessions)).items()}
    end_us = int((now + timedelta(days=2)).timestamp() * 1_000_000)
    assert ends == {made.digest: end_us, second: end_us}


async def test_what_cannot_be_rotated(sessions: db.Sessions) -> None:
    made, now = await customer(sessions), SystemClock().now()
    for overlap in (timedelta(seconds=-1), timedelta(days=30, seconds=1)):
        with pytest.raises(PlatformError, match="0 seconds to 30 days"):
            await _rotate(sessions, made, overlap, now)
    limited = await customer(sessions, KeyLimits(expires_at=now + timedelta(hours=1)))
    with pytest.raises(PlatformError) as caught:
        await _rotate(sessions, limited, timedelta(0), now + timedelta(hours=2))
    assert (caught.value.code, caught.value.kind) == ("KEY_EXPIRED", "conflict")
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    with pytest.raises(PlatformError) as caught:
        await _rotate(sessions, made, timedelta(0), now)
    assert (caught.value.code, caught.value.kind) == ("KEY_REVOKED", "conflict")


async def test_a_rotated_key_comes_under_the_platforms_maximum(sessions: db.Sessions) -> None:
    made, now = await customer(sessions), SystemClock().now()
    await _rotate(sessions, made, timedelta(0), now, days=30)
    async with db.transaction(sessions) as session:
        key = await api_keys.get(session, made.tenant.id, made.key.id)
    assert key.limits.expires_at == now + timedelta(days=30)


# ---- finding and ending many


async def _named(sessions: db.Sessions, made: Customer, name: str, limits: KeyLimits | None = None) -> UUID:
    async with db.transaction(sessions) as session:
        key, _ = await api_keys.create(
            session, made.tenant.id, made.project.id, name=name, pepper=PEPPER, limits=limits
        )
    return key.id


async def _found(sessions: db.Sessions, made: Customer, wanted: KeyFilter) -> set[str]:
    async with db.transaction(sessions) as session:
        return {
            key.name for key in await api_keys.list_keys(session, made.tenant.id, after=None, limit=99, wanted=wanted)
        }


async def test_keys_are_found_by_every_part_of_a_filter(sessions: db.Sessions) -> None:
    made, other, now = await customer(sessions), await customer(sessions), SystemClock().now()
    person, account = await _person(sessions, made), await _account(sessions, made)
    await _own(sessions, made, KeyOwner(person_id=person))
    serving = await _named(sessions, made, "Serving 100%")
    await _named(sessions, made, "soon", KeyLimits(expires_at=now + timedelta(days=3)))
    gone = await _named(sessions, made, "gone")
    await _run(sessions, "UPDATE api_key SET owner_service_account_id = :a WHERE id = :k", a=account, k=serving)
    await _run(sessions, "UPDATE api_key SET last_used_at = now() WHERE id = :k", k=serving)
    await _run(sessions, "UPDATE api_key SET created_at = now() - interval '90 days' WHERE id = :k", k=gone)
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, gone, clock=SystemClock())
        await api_keys.set_status(session, made.tenant.id, serving, Status.SUSPENDED, clock=SystemClock())
    everything = {"owned", "Serving 100%", "soon", "gone"}
    for wanted, names in (
        (KeyFilter(), everything),
        (KeyFilter(project_id=made.project.id), everything),
        (KeyFilter(project_id=other.project.id), set()),
        (KeyFilter(owner_person_id=person), {"owned"}),
        (KeyFilter(owner_service_account_id=account), {"Serving 100%"}),
        (KeyFilter(state=KeyState.ACTIVE), {"owned", "soon"}),
        (KeyFilter(state=KeyState.SUSPENDED), {"Serving 100%"}),
        (KeyFilter(state=KeyState.REVOKED), {"gone"}),
        (KeyFilter(name="SERVING"), {"Serving 100%"}),
        (KeyFilter(name="0%"), {"Serving 100%"}),
        (KeyFilter(name="s%n"), set()),
        (KeyFilter(prefix=made.secret[:7], last4=made.secret[-4:]), {"owned"}),
        (KeyFilter(prefix="tg_%"), set()),
        (KeyFilter(last4="zz_z"), set()),
        (KeyFilter(expiring_before=now + timedelta(days=7)), {"soon"}),
        (KeyFilter(unused_since=now - timedelta(days=30)), {"gone"}),
        (KeyFilter(owner_person_id=person, state=KeyState.REVOKED), set()),
    ):
        assert await _found(sessions, made, wanted) == names, wanted
    assert await _found(sessions, other, KeyFilter(owner_person_id=person)) == set()


async def _revoke_all(sessions: db.Sessions, made: Customer, wanted: KeyFilter, expected: int | None) -> list[str]:
    async with db.transaction(sessions) as session:
        done = await api_keys.revoke_matching(
            session, made.tenant.id, wanted, now=SystemClock().now(), expected=expected
        )
    return [key.name for key in done.keys]


async def test_many_are_revoked_only_in_the_number_that_was_looked_at(sessions: db.Sessions) -> None:
    made, other = await customer(sessions), await customer(sessions)
    for name in ("ci 1", "ci 2"):
        await _named(sessions, made, name)
    wanted = KeyFilter(name="ci")
    assert await _revoke_all(sessions, made, wanted, None) == ["ci 1", "ci 2"]
    assert await _found(sessions, made, KeyFilter(state=KeyState.REVOKED)) == set()  # only looked at
    await _named(sessions, made, "ci 3")
    with pytest.raises(PlatformError) as caught:
        await _revoke_all(sessions, made, wanted, 2)
    assert (caught.value.code, caught.value.kind, caught.value.fields) == ("COUNT_CHANGED", "conflict", {"count": 3})
    assert await _revoke_all(sessions, made, wanted, 3) == ["ci 1", "ci 2", "ci 3"]
    refusals = {value.refusal for value in (await _all(sessions)).values() if value.tenant_id == made.tenant.id}
    assert refusals == {"", "KEY_REVOKED"}
    assert await _revoke_all(sessions, made, wanted, None) == []  # what is revoked is not revoked again
    with pytest.raises(PlatformError, match="every key"):
        await _revoke_all(sessions, made, KeyFilter(), None)
    assert await _refusal(sessions, other) == ""


# ---- peppers


async def test_a_secret_met_under_an_old_pepper_is_stored_under_the_new_one_too(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    turned = Peppers(NEXT, (PEPPER,))
    async with db.transaction(sessions) as session:
        assert await principals.find(session, Peppers(NEXT), made.secret) is None
        before = await key_secrets.pepper_use(session, turned)
        found = await principals.find(session, turned, made.secret)
        after = await key_secrets.pepper_use(session, turned)
        again = await principals.find(session, Peppers(NEXT), made.secret)
    assert found is not None
    assert again == found
    names = (pepper_id(NEXT), pepper_id(PEPPER))
    assert [(use.name, use.current, use.api_keys) for use in before] == [(names[0], True, 0), (names[1], False, 1)]
    assert [(use.name, use.current, use.api_keys) for use in after] == [(names[0], True, 1), (names[1], False, 0)]
    async with db.transaction(sessions) as session:
        old_only = await principals.load_all(session, PEPPERS.ids)  # a gateway that was not restarted yet
        both, new_only = await principals.load_all(session, turned.ids), await principals.load_all(session, names[:1])
    fresh = digest(NEXT, made.secret)
    assert (set(old_only), set(both), set(new_only)) == ({made.digest}, {made.digest, fresh}, {fresh})
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    assert {value.refusal for value in (await _all(sessions)).values()} == {"KEY_REVOKED"}


async def test_both_digests_of_a_secret_end_together(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        assert await key_secrets.rehash(session, {made.digest: digest(NEXT, made.secret)}, pepper_id(NEXT)) == 1
        assert await key_secrets.rehash(session, {made.digest: digest(NEXT, made.secret)}, pepper_id(NEXT)) == 0
        assert await key_secrets.rehash(session, {b"?" * 32: b"!" * 32}, pepper_id(NEXT)) == 0
    third = await _rotate(sessions, made, timedelta(0), SystemClock().now())
    refusals = {key: value.refusal for key, value in (await _all(sessions)).items()}
    assert refusals == {made.digest: "KEY_REVOKED", digest(NEXT, made.secret): "KEY_REVOKED", third: ""}


async def test_an_operator_token_outlives_its_pepper_when_it_was_used(sessions: db.Sessions) -> None:
    made, token = await operator(sessions)
    async with db.transaction(sessions) as session:
        assert await operators.find(session, Peppers(NEXT), token) is None
        assert await operators.find(session, Peppers(NEXT, (PEPPER,)), token) == made
        assert await operators.find(session, Peppers(NEXT), token) == made
        use = await key_secrets.pepper_use(session, Peppers(NEXT, (PEPPER,)))
        await operators.revoke_tokens(session, made.id)
        assert await operators.find(session, Peppers(NEXT), token) is None
    assert [(found.current, found.operator_tokens) for found in use] == [(True, 1), (False, 0)]


async def test_control_calls_note_the_last_use_once_a_minute(sessions: db.Sessions) -> None:
    made, clock = await customer(sessions), ManualClock(datetime(2026, 12, 1, tzinfo=UTC))
    seen = []
    for seconds in (0, 59, 2):
        clock.advance(seconds)
        async with db.transaction(sessions) as session:
            await api_keys.note_use(session, made.tenant.id, made.key.id, clock.now())
        async with db.transaction(sessions) as session:
            seen.append((await api_keys.get(session, made.tenant.id, made.key.id)).last_used_at)
    first = datetime(2026, 12, 1, tzinfo=UTC)
    assert seen == [first, first, first + timedelta(seconds=61)]

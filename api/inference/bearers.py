"""What this process knows of OIDC tokens and of the people who call with them.

A verified token becomes an entry of the directory like a key, under a digest of its own, and follows the same changes.
Keys of providers are fetched in the background; a token whose key or person is new here waits for one bounded look-up,
which all such requests share.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from api.inference import errors
from api.inference.directory import Directory
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import IdKind, parse_id
from tenants import bearers
from tenants.bearers import Access, BearerProvider, Identity
from tenants.oidc.claims import groups_of
from tenants.oidc.clients import Clients
from tenants.oidc.errors import token_refused
from tenants.oidc.tokens import Unverified, check_bearer, glance, open_signed

TOKENS_MAX = 50_000
PEOPLE_MAX = 20_000
LOOK_UP_S = 3.0
LOADS_MAX = 3  # when what is read changes while it is read
BATCH = 500  # people read anew at a time
STEP_S = 5.0
NO_ACCESS = "NO_ACCESS"
KINDS = frozenset({"person", "member", "identity_provider", "project", "tenant", "tenant_limits", "plan"})

_log = structlog.get_logger("gateway")


class Verified(msgspec.Struct, frozen=True):
    """A token whose signature and claims hold until then. `groups` is None when it tells none."""

    identity: Identity
    groups: frozenset[str] | None
    until_us: int


class Entry(msgspec.Struct, frozen=True):
    """A token as the directory has it: with the project that its requests name."""

    verified: Verified
    project_id: UUID | None


class Bearers:
    """Tokens and people as this process knows them. Everything in it can be found again."""

    def __init__(self, directory: Directory, sessions: Sessions, clients: Clients, pepper: bytes) -> None:
        self._directory = directory
        self._sessions = sessions
        self._clients = clients
        self._pepper = pepper
        self._providers: dict[UUID, BearerProvider] = {}
        self._tokens: dict[bytes, Verified] = {}
        self._entries: dict[bytes, Entry] = {}
        self._people: dict[Identity, Access] = {}
        self._loading: dict[Identity, asyncio.Task[None]] = {}
        self._looking: set[asyncio.Task[bytes]] = set()
        self._changes = 0

    # ---- a request

    def known(self, token: str, project: bytes) -> bytes | None:
        """Return the digest under which the directory has this token; None when something must be looked up first.

        Raises:
            PlatformError: 401 for a token that is not valid, 403, 404 or 400 for one that may not call so.
        """
        digest = self._digest(token, project)
        entry, principal = self._entries.get(digest), self._directory.principals.get(digest)
        if entry is not None and principal is not None and principal.refusal != NO_ACCESS:
            self._in_force(entry.verified)
            return digest
        verified = self._tokens.get(self._digest(token)) or self._verify(token)
        if verified is None:
            return None
        self._in_force(verified)
        access = self._people.get(verified.identity)
        if access is None:
            return None
        return self._enter(digest, Entry(verified, _project(project)), access)

    async def find(self, token: str, project: bytes) -> bytes:
        """Return the digest under which the directory has this token now, after a look-up where one is needed.

        Raises:
            PlatformError: as `known`; 503 when keys or people cannot be looked up now.
        """
        found = self.known(token, project)
        if found is not None:
            return found
        seen = glance(token)
        provider = self._provider(seen)
        if self._digest(token) not in self._tokens:
            await self._clients.keys(provider.issuer).find(seen.kid, seen.algorithm)
            self._verify(token)
        verified = self._tokens.get(self._digest(token))
        if verified is not None and verified.identity not in self._people:
            await self._load(verified.identity)
        found = self.known(token, project)
        if found is None:
            raise errors.unavailable("Your token cannot be checked now. Try again shortly.")
        return found

    def look_up(self, token: str, project: bytes) -> None:
        """Begin to find a token, for whoever asks again."""
        task = asyncio.create_task(self.find(token, project))
        self._looking.add(task)
        task.add_done_callback(self._looked_up)

    def _looked_up(self, task: "asyncio.Task[bytes]") -> None:
        self._looking.discard(task)
        if not task.cancelled():
            task.exception()

    def _verify(self, token: str) -> Verified | None:
        """Check a token with the keys in memory; None when its key is not among them."""
        seen = glance(token)
        provider = self._provider(seen)
        if seen.kid is None:
            raise token_refused("it names no key")
        key = self._clients.keys(provider.issuer).peek(seen.kid, seen.algorithm)
        if key is None:
            return None
        claims = open_signed(token, key, seen.algorithm)
        leeway_s = self._clients.settings.leeway_s
        now_s = self._clients.clock.now_us() // 1_000_000
        check_bearer(claims, issuer=provider.issuer, audience=provider.audience, now_s=now_s, leeway_s=leeway_s)
        until_us = int((claims["exp"] + leeway_s) * 1_000_000)
        verified = Verified((provider.id, claims["sub"]), groups_of(claims, provider.groups_claim), until_us)
        if len(self._tokens) >= TOKENS_MAX:
            self._forget_all()
        self._tokens[self._digest(token)] = verified
        return verified

    def _provider(self, seen: Unverified) -> BearerProvider:
        """Return whose token it claims to be, by issuer and audience; nothing of it is believed yet."""
        of_issuer = [provider for provider in self._providers.values() if provider.issuer == seen.issuer]
        if not of_issuer:
            raise token_refused("its issuer is not known here")
        found = next((provider for provider in of_issuer if provider.audience in seen.audiences), None)
        if found is None:
            raise token_refused("it is for another audience")
        return found

    def _in_force(self, verified: Verified) -> None:
        if verified.until_us <= self._clients.clock.now_us():
            raise token_refused("it has expired")
        if verified.identity[0] not in self._providers:
            raise token_refused("its issuer is not known here")

    def _enter(self, digest: bytes, entry: Entry, access: Access) -> bytes:
        verified = entry.verified
        principal = bearers.choose(access, self._providers[verified.identity[0]], verified.groups, entry.project_id)
        if len(self._entries) >= TOKENS_MAX:
            self._forget_all()
        self._entries[digest] = entry
        self._directory.principals[digest] = principal
        return digest

    def _digest(self, token: str, project: bytes | None = None) -> bytes:
        text = token.encode("utf-8", "surrogatepass")
        kept = text if project is None else text + b"\0" + project
        return hashlib.blake2b(kept, digest_size=32, key=self._pepper, person=b"tg-bearer").digest()

    # ---- people

    async def _load(self, identity: Identity) -> None:
        """Read where somebody may call, once for all who wait."""
        task = self._loading.get(identity)
        if task is None:
            task = self._loading[identity] = asyncio.create_task(self._read(identity))
            task.add_done_callback(lambda done: self._loaded(identity, done))
        await asyncio.shield(task)

    def _loaded(self, identity: Identity, task: "asyncio.Task[None]") -> None:
        del self._loading[identity]
        if not task.cancelled():
            task.exception()  # told to those who wait; with none left, to nobody

    async def _read(self, identity: Identity) -> None:
        """What changes while it is read is read again: the news of it may have come before there was an entry."""
        try:
            async with asyncio.timeout(LOOK_UP_S):
                for _ in range(LOADS_MAX):
                    changes = self._changes
                    async with transaction(self._sessions) as session:
                        found = await bearers.load_access(session, [identity])
                    if changes == self._changes:
                        if len(self._people) >= PEOPLE_MAX:
                            self._forget_all()
                        self._people.update(found)
                        return
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            _log.warning("bearer.unreadable", error=type(error).__name__)
            raise errors.unavailable("Your token cannot be checked now. Try again shortly.") from error

    # ---- configuration, told by the follower

    async def load(self) -> None:
        """Read the providers."""
        async with transaction(self._sessions) as session:
            found = await bearers.load_providers(session)
        self._providers = {provider.id: provider for provider in found}

    async def follow(self, changes: Mapping[str, Iterable[UUID | None]]) -> None:
        """Take in changes by kind: who is concerned is read anew, and refused from now on where that says so."""
        concerned = {kind: list(entities) for kind, entities in changes.items() if kind in KINDS}
        if not concerned:
            return
        self._changes += 1
        if "identity_provider" in concerned:
            await self.load()
            self._forget(concerned["identity_provider"])
        touched: set[Identity] = set()
        async with transaction(self._sessions) as session:
            for kind, entities in concerned.items():
                for entity_id in entities:
                    touched |= await bearers.touched_by(session, kind, entity_id, self._people)
            listed = list(touched)
            for start in range(0, len(listed), BATCH):
                self._people.update(await bearers.load_access(session, listed[start : start + BATCH]))
        self._enter_again(touched)

    def _enter_again(self, touched: set[Identity]) -> None:
        principals = self._directory.principals
        for digest, entry in list(self._entries.items()):
            identity = entry.verified.identity
            known = principals.get(digest)
            if identity not in touched or known is None:
                continue
            try:
                self._enter(digest, entry, self._people[identity])
            except PlatformError:  # told by `known` from now on; this is for what waits in a queue
                principals[digest] = msgspec.structs.replace(known, refusal=NO_ACCESS)

    # ---- time

    async def run(self) -> None:
        """Keep the keys of providers fresh, and forget tokens whose time is over."""
        while True:
            for issuer in {provider.issuer for provider in self._providers.values()}:
                ring = self._clients.keys(issuer)
                if ring.due:
                    await ring.refresh()
            self.sweep(self._clients.clock.now_us())
            await asyncio.sleep(STEP_S)

    def sweep(self, now_us: int) -> None:
        """Forget tokens that have expired."""
        self._tokens = {digest: kept for digest, kept in self._tokens.items() if kept.until_us > now_us}
        for digest in [digest for digest, entry in self._entries.items() if entry.verified.until_us <= now_us]:
            del self._entries[digest]
            self._directory.principals.pop(digest, None)

    async def close(self) -> None:
        await self._clients.close()

    def _forget(self, provider_ids: Iterable[UUID | None]) -> None:
        """Forget the tokens of providers that changed: what was checked may not hold any more."""
        gone = set(provider_ids)
        self._tokens = {digest: kept for digest, kept in self._tokens.items() if kept.identity[0] not in gone}
        for digest in [digest for digest, entry in self._entries.items() if entry.verified.identity[0] in gone]:
            del self._entries[digest]
            self._directory.principals.pop(digest, None)

    def _forget_all(self) -> None:
        """Begin anew: more tokens or people than are kept."""
        for digest in self._entries:
            self._directory.principals.pop(digest, None)
        self._entries.clear()
        self._tokens.clear()
        self._people.clear()


def _project(header: bytes) -> UUID | None:
    """The project in the header OpenAI-Project; None without one."""
    text = header.decode("latin-1").strip()
    return parse_id(IdKind.PROJECT, text) if text else None

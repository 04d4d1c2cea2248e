"""Ids: a UUIDv7 inside, a typed prefix outside (`ten_0190…`)."""

from datetime import UTC, datetime
from enum import StrEnum
from uuid import UUID, SafeUUID

import uuid_utils

from core.errors import ErrorKind, PlatformError

_new, _set, _UNKNOWN = object.__new__, object.__setattr__, SafeUUID.unknown


class IdKind(StrEnum):
    """The prefix says what an id names."""

    TENANT = "ten"
    PROJECT = "prj"
    PLAN = "pln"
    LIMIT = "lim"
    LIMIT_CHANGE = "lch"
    LIMIT_REQUEST = "lrq"
    ENTITLEMENT = "ent"
    ENTITLEMENT_CHANGE = "ech"
    API_KEY = "key"
    OPERATOR = "opr"
    PERSON = "per"
    MEMBER = "mem"
    SERVICE_ACCOUNT = "sva"
    INVITE = "inv"
    SESSION = "ses"
    IDENTITY_PROVIDER = "idp"
    MODEL = "mdl"
    MODEL_VERSION = "mver"
    MODEL_INTAKE = "itk"
    DEPLOYMENT = "dep"
    ROLLOUT = "rol"
    WAKE = "wak"
    REPLICA = "rep"
    GENERATION = "gen"
    PRICE_BOOK = "pbk"
    PRICE_VERSION = "pver"
    ACCOUNT = "acc"
    TRANSACTION = "txn"
    ADJUSTMENT = "adj"
    AUDIT_RECORD = "aud"
    CROSSING = "crs"
    CREDIT_ALERT = "cal"
    RERATING = "rrt"


class MintedUUID(UUID):
    """A UUID that keeps its digits: of a request they are asked for again and again."""

    __slots__ = ("hex",)

    def __reduce__(self) -> tuple[type[UUID], tuple[str]]:
        return UUID, (self.hex,)


def new_uuid() -> UUID:
    """Return a fresh UUIDv7, made without the checks of `UUID`'s own constructor, which cost more than the id."""
    minted, value = uuid_utils.uuid7(), _new(MintedUUID)
    _set(value, "int", minted.int)
    _set(value, "hex", minted.hex)
    _set(value, "is_safe", _UNKNOWN)
    return value


def format_id(kind: IdKind, value: UUID) -> str:
    """Return the id as users see it: prefix, underscore, 32 hex digits."""
    return f"{kind.value}_{value.hex}"


def parse_id(kind: IdKind, text: str) -> UUID:
    """Return the UUID in `text`.

    Raises:
        PlatformError: kind not_found, since an id of another shape names nothing.
    """
    prefix, _, digits = text.partition("_")
    if prefix == kind.value and len(digits) == 32 and digits.isascii() and digits.isalnum():
        try:
            return UUID(hex=digits)
        except ValueError:
            pass
    noun = kind.name.lower().replace("_", " ")
    raise PlatformError(
        "NOT_FOUND",
        ErrorKind.NOT_FOUND,
        f"There is no {noun} {text[:64]!r}. Ids look like {kind.value}_ and 32 hex digits.",
    )


def parse_any_id(text: str) -> UUID:
    """Return the UUID of an id whatever it names, with or without its prefix.

    Raises:
        PlatformError: kind not_found, since an id of another shape names nothing.
    """
    digits = text.rpartition("_")[2]
    if len(digits) == 32 and digits.isascii() and digits.isalnum():
        try:
            return UUID(hex=digits)
        except ValueError:
            pass
    raise PlatformError("NOT_FOUND", ErrorKind.NOT_FOUND, f"There is nothing with the id {text[:64]!r}.")


def uuid7_time(value: UUID) -> datetime:
    """Return the instant a UUIDv7 was made (RFC 9562: its first 48 bits are Unix milliseconds)."""
    return datetime.fromtimestamp((value.int >> 80) / 1000, UTC)

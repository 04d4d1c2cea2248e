"""Money's nouns that others meet."""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

import msgspec
from msgspec.structs import force_setattr

from core.money import Currency
from core.tiers import Tier
from core.usage import NO_USAGE, TokenUsage
from core.waits import Wait


class PriceStep(msgspec.Struct, frozen=True, gc=False):
    """Unit prices of a request with more than `above` input tokens in total, whatever of them was cached."""

    above: int
    input: int
    cached_input: int
    cache_write: int
    output: int
    reasoning: int


class PriceSchedule(msgspec.Struct, frozen=True, gc=False):
    """Unit prices of one model and tier for one tenant, frozen at admission. Pico per token; `request` per call.

    `minimum` is what a call costs at least. `steps` rise in `above`; the last one that a request's input exceeds prices
    all of it. The dearest prices are of the unit prices without a step, made here once for every hold.
    """

    price_version_id: UUID
    currency: Currency
    tier: Tier
    input: int
    cached_input: int
    cache_write: int
    output: int
    reasoning: int
    request: int = 0
    minimum: int = 0
    steps: tuple[PriceStep, ...] = ()
    dearest_input: int = 0
    dearest_output: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "dearest_input", max(self.input, self.cached_input, self.cache_write))
        force_setattr(self, "dearest_output", max(self.output, self.reasoning))


class PriceBook(msgspec.Struct, frozen=True):
    """The one list of a currency, or a plan's prices that differ from it; the prices are in its versions."""

    id: UUID
    name: str
    currency: str
    created_at: datetime
    for_plan: bool = False


class PriceVersion(msgspec.Struct, frozen=True):
    """One version of a list: a draft, or published and then the same for ever; the hash is over every fact of it."""

    id: UUID
    book_id: UUID
    state: str
    note: str
    created_at: datetime
    effective_at: datetime | None
    published_at: datetime | None
    content_sha256: bytes | None


class Outcome(StrEnum):
    """How a generation ended; the billing rule hangs on it (billing.md §1.11)."""

    COMPLETED = "completed"  # billed: all of it
    CLIENT_ABORT = "client_abort"  # billed: prompt and what was generated until the abort reached the engine
    UPSTREAM_ERROR = "upstream_error"  # not billed; before or in the middle of the answer
    TIMEOUT = "timeout"  # not billed
    PREEMPTED = "preempted"  # not billed
    REPEAT = "repeat"  # not billed: another generation with the same idempotency key is; only the poster says so


class CountSource(StrEnum):
    """Who counted the tokens."""

    ENGINE = "engine"
    GATEWAY = "gateway"  # output deltas relayed, prompt tokens estimated or counted by the engine
    OPERATOR = "operator"  # a person, of an event that had been in quarantine


class UsageEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One generation as it is billed: what the gateway writes to its spool and the poster posts, exactly once.

    The id is minted by the gateway (UUIDv7). `amount_pico` is what `pricing.charge` gave at `price_version_id`; the
    poster rates again and puts an event that differs into quarantine. New fields go last, with a default.
    """

    id: UUID
    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    model_id: UUID
    version_id: UUID
    deployment_id: UUID
    model: str
    endpoint: str  # chat, completions, embeddings
    tier: Tier
    currency: Currency
    price_version_id: UUID
    outcome: Outcome
    http_status: int
    amount_pico: int
    admitted_at_us: int
    ended_at_us: int
    usage: TokenUsage = NO_USAGE
    count_source: CountSource = CountSource.ENGINE
    stream: bool = False
    queue_us: int = 0
    ttft_us: int = 0
    upstream_id: str = ""
    quarantine: str = ""  # why it must not be billed automatically, e.g. a negative part in the engine's usage
    raw_usage: str = ""  # the engine's own usage object, when it went to quarantine
    idempotency: bytes = b""  # digest of idempotency key, whose it is, and body, 16 bytes; empty without one
    preemptions: int = 0  # how often its place went to a higher tier
    waste_tokens: int = 0  # of its prompt, in the engine calls that were ended for it: the platform's, never charged
    waste_us: int = 0  # how long those calls ran
    wait: Wait | None = None  # why it waited for its place; None when it did not


class Meter(StrEnum):
    """What has a unit price."""

    INPUT = "input"
    CACHED_INPUT = "cached_input"  # the input price where none is given
    CACHE_WRITE = "cache_write"  # the input price where none is given
    OUTPUT = "output"
    REASONING = "reasoning"  # the output price where none is given
    REQUEST = "request"  # per request; 0 where none is given
    MIN_CHARGE = "min_charge"  # what a request costs at least; 0 where none is given


PER_REQUEST = frozenset({Meter.REQUEST, Meter.MIN_CHARGE})


class PriceItem(msgspec.Struct, frozen=True, order=True):
    """One unit price in whole pico: per token, or per request for the meters `PER_REQUEST`."""

    model_id: UUID
    tier: Tier
    meter: Meter
    unit_price_pico: int
    tenant_id: UUID | None = None  # set: this tenant's own price, instead of the list's
    above_tokens: int = 0  # of a long-context step: holds for requests with more input tokens than this


class PriceDiscount(msgspec.Struct, frozen=True, order=True):
    """A tenant's percentage off the list of one model and tier, in millionths; publication makes prices of it."""

    tenant_id: UUID
    model_id: UUID
    tier: Tier
    off_ppm: int


class BillingMode(StrEnum):
    """How a tenant pays."""

    PREPAID = "prepaid"  # out of credit bought before
    POSTPAID = "postpaid"  # by invoice, up to a limit


class Balance(msgspec.Struct, frozen=True):
    """What a tenant may still spend by the ledger; holds and unposted usage are not in it. Pico."""

    tenant_id: UUID
    currency: Currency
    mode: BillingMode
    available_pico: int
    credit_limit_pico: int
    version: int


class Transfer(msgspec.Struct, frozen=True):
    """`amount` pico from the credited to the debited account."""

    debit: UUID
    credit: UUID
    amount: int


class Transaction(msgspec.Struct, frozen=True):
    """Transfers that are one business event, posted together."""

    id: UUID
    tenant_id: UUID
    kind: str  # top_up, usage, grant, expiry, reversal
    currency: Currency
    transfers: tuple[Transfer, ...]
    idempotency_key: str | None = None
    body_sha256: bytes | None = None
    actor: str = ""
    note: str = ""
    reverses_tx: UUID | None = None
    effective_at: datetime | None = None  # when it happened; None: now
    usage_sha256: bytes | None = None  # of usage: over the digests of the events it posts

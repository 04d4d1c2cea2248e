"""Stages one and two of `pipeline.serve`: who calls, and what they get. Reads memory only."""

from datetime import UTC, datetime, timedelta

from api import networks
from api.inference import errors
from api.inference.conversation import conversation_of
from api.inference.directory import Directory, Offer, engine_fields, may_use
from api.inference.gateway import Gateway
from api.inference.limits import LimitLines
from api.inference.ports import Admission
from api.inference.request import Call
from billing.types import PriceSchedule
from catalog.arms import takes_canary
from catalog.types import DeploymentKind, ServedModel
from core.errors import ErrorKind, PlatformError
from core.tiers import Tier
from engine.usage import CHOICES_UNCOUNTED
from tenants import credentials, quotas
from tenants.api_keys import well_formed
from tenants.entitlements import USUAL_WEIGHT
from tenants.principals import UNREADABLE
from tenants.types import Principal

SCOPE = "inference"
NAMES_SHOWN = 50
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_REFUSALS = {
    "KEY_REVOKED": (ErrorKind.UNAUTHENTICATED, "This API key was revoked. Use another one."),
    "KEY_EXPIRED": (ErrorKind.UNAUTHENTICATED, "This API key has expired. Use another one."),
    "KEY_SUSPENDED": (ErrorKind.FORBIDDEN, "This API key is suspended."),
    "OWNER_SUSPENDED": (ErrorKind.FORBIDDEN, "The owner of this API key is suspended or no member any more."),
    "MEMBER_SUSPENDED": (ErrorKind.FORBIDDEN, "You are suspended in this organisation."),
    "NO_ACCESS": (ErrorKind.FORBIDDEN, "You may not call here any more."),
    "PROJECT_SUSPENDED": (ErrorKind.FORBIDDEN, "The project of this API key is suspended."),
    "TENANT_SUSPENDED": (ErrorKind.FORBIDDEN, "The tenant of this API key is suspended."),
    "TENANT_CLOSED": (ErrorKind.FORBIDDEN, "The tenant of this API key is closed."),
    UNREADABLE: (ErrorKind.UNAVAILABLE, "The settings of this API key cannot be read now. The operators were told."),
}


def authenticate(directory: Directory, digest: bytes, now_us: int, client_ip: str) -> Principal:
    """Return who calls.

    Raises:
        PlatformError: 401 for a key that is unknown, revoked or expired; 403 for one that may not call here.
    """
    principal = directory.principals.get(digest)
    if principal is None and not directory.loaded:
        raise errors.unavailable("This gateway does not know its keys yet. Try again shortly.")
    if principal is None:
        raise PlatformError("INVALID_API_KEY", ErrorKind.UNAUTHENTICATED, "This API key is not known.")
    if principal.refusal:
        raise refusal(principal.refusal)
    if principal.expires_at_us and principal.expires_at_us <= now_us:
        raise refusal("KEY_EXPIRED")
    if SCOPE not in principal.scopes:
        raise PlatformError(
            "SCOPE_MISSING",
            ErrorKind.FORBIDDEN,
            f"This API key may not do this: it, or the role of its owner, lacks the scope {SCOPE!r}.",
        )
    if principal.allowed_networks and not networks.contain(principal.allowed_networks, client_ip):
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "This API key may not be used from this address.")
    return principal


def refusal(code: str) -> PlatformError:
    """The error of a key that is known and may not call."""
    kind, message = _REFUSALS.get(code, (ErrorKind.FORBIDDEN, "This API key may not call."))
    return PlatformError(code, kind, message)


def older_digest(gateway: Gateway, key: str, digest: bytes) -> bytes:
    """Return the digest under which a key is known that is not by its current one, and have it stored anew.

    Empty when it is not known, but may be new: `new_keys` looks for it.

    Raises:
        PlatformError: 401, it is no key of ours.
    """
    for pepper in gateway.previous_peppers:
        older = credentials.digest(pepper, key)
        if older in gateway.directory.principals:
            gateway.rehash(older, digest)
            return older
    if gateway.new_keys is None or not well_formed(key):
        raise missing_key(key)
    return b""


async def new_digest(gateway: Gateway, key: str) -> bytes:
    """Return the digest by which a key that the follower has not brought yet is known now.

    Raises:
        PlatformError: 401, there is no such key; 503, that cannot be found out now.
    """
    assert gateway.new_keys is not None  # noqa: S101 - `older_digest` asked
    digest = await gateway.new_keys.find(key, credentials.digest(gateway.pepper, key))
    if not digest:
        raise missing_key(key)
    return digest


def missing_key(key: str) -> PlatformError:
    """The refusal of a request whose key cannot be one of ours."""
    if not key:
        message = "Send an API key: 'Authorization: Bearer tg_…'."
    elif not well_formed(key):
        message = "This is not an API key of this platform, or it has a typo."
    else:
        message = "This API key is not known."
    return PlatformError("INVALID_API_KEY", ErrorKind.UNAUTHENTICATED, message)


def missing_metrics_token() -> PlatformError:
    """The refusal of whoever asks for figures without the token of those who run the platform."""
    return PlatformError(
        "METRICS_TOKEN_MISSING",
        ErrorKind.UNAUTHENTICATED,
        "Send the gateway's metrics token (gateway.metrics_token in its settings): 'Authorization: Bearer …'.",
    )


def resolve(
    directory: Directory, admission: Admission, principal: Principal, call: Call, now_us: int, *, name: str = ""
) -> Offer:
    """Return the model's deployment, the tier, and the price, which this request keeps whatever is published meanwhile.

    `name`: of another model than the call's.

    Raises:
        PlatformError: 404 with the models the key may use, 403 for tier or model, 400 for an endpoint it lacks.
    """
    name = name or call.model
    key = (principal.key_id.int, name, call.tier, call.endpoint)
    offer = directory.offers.get(key)
    if offer is None or now_us >= offer.until_us or offer.principal is not principal:
        if name in directory.rollouts:
            offer = _of_rollout(directory, admission, principal, call, now_us, name)
        else:
            offer = _resolve(directory, admission, principal, call, now_us, find_model(directory, principal, name))
            directory.remember(key, offer)
    if call.max_tokens > offer.model.context_max:
        raise errors.invalid(
            f"The parameter {call.max_tokens_name!r} is at most {offer.model.context_max} for this model.",
            call.max_tokens_name,
        )
    if call.choices > 1 and offer.model.engine in CHOICES_UNCOUNTED:
        raise errors.invalid("This model gives one answer to one prompt at a time: leave 'n' at 1.", "n")
    if not call.text_only and offer.model.kind is DeploymentKind.LOCAL:  # what we start ourselves reads text
        raise errors.invalid("This model reads text only: send content parts of the type 'text'.", "messages")
    return offer


def _of_rollout(  # noqa: PLR0917 - all of `resolve`
    directory: Directory, admission: Admission, principal: Principal, call: Call, now_us: int, name: str
) -> Offer:
    """Return the offer of the version that serves this conversation; offers are kept by version."""
    model, arms = find_model(directory, principal, name), directory.rollouts[name]
    if takes_canary(arms, principal.tenant_id, conversation_of(call)):
        model = arms.canary
    version = f"{name} {model.version_id.hex}"  # no public name has a space
    key = (principal.key_id.int, version, call.tier, call.endpoint)
    offer = directory.offers.get(key)
    if offer is None or now_us >= offer.until_us or offer.principal is not principal:
        offer = _resolve(directory, admission, principal, call, now_us, model)
        directory.remember(key, offer)
    return offer


def _resolve(  # noqa: PLR0917 - all of `resolve`
    directory: Directory, admission: Admission, principal: Principal, call: Call, now_us: int, model: ServedModel
) -> Offer:
    if call.endpoint not in model.endpoints and call.endpoint != "tokenize":
        served = ", ".join(sorted(model.endpoints))
        raise errors.invalid(f"The model {model.name!r} does not serve {call.endpoint}; it serves {served}.", "model")
    tier = principal.tier_default if call.tier is None else call.tier
    if tier > principal.tier_max:
        raise PlatformError(
            "TIER_NOT_ALLOWED",
            ErrorKind.FORBIDDEN,
            f"This API key may not use the tier {tier.label!r}.",
            param="service_tier",
        )
    schedule, until_us = _price(directory, principal, model, tier, now_us)
    now = EPOCH + timedelta(microseconds=now_us)
    demands = quotas.demands(principal, model, now)
    until_us = min(until_us, quotas.until_us(principal, now))
    payer = principal.tenant_id.hex if call.endpoint != "tokenize" else ""  # which costs nothing
    own_name = model.model_name or model.name
    prepared = admission.prepare(
        demands,
        model,
        payer,
        owner=principal.tenant_id.hex,
        weight=directory.entitlements.weight(principal.tenant_id, principal.plan_id, own_name) / USUAL_WEIGHT,
        entitlements=directory.promised_of(own_name),
    )
    fields = engine_fields(principal, model, tier, call.endpoint)
    facts = (
        *(principal.tenant_id, principal.project_id, principal.key_id),
        *(model.model_id, model.version_id, model.deployment_id, model.name),
        *(call.endpoint, tier, schedule.currency, schedule.price_version_id),
    )
    return Offer(principal, model, tier, schedule, until_us, prepared, fields, LimitLines(prepared.named), facts)


def _price(
    directory: Directory, principal: Principal, model: ServedModel, tier: Tier, now_us: int
) -> tuple[PriceSchedule, int]:
    """The prices in force, and when others take their place; a tier without a published price is refused."""
    prices = directory.prices
    if prices is not None:
        currency, book = principal.currency, principal.price_book_id
        found = prices.schedule(model.model_id, tier, currency, principal.tenant_id, now_us, plan_book=book)
        if found is not None:
            return found, prices.next_change_us(currency, now_us, book)
    raise PlatformError(
        "TIER_NOT_PRICED",
        ErrorKind.FORBIDDEN,
        f"The model {model.name!r} has no price for the tier {tier.label!r}.",
        param="service_tier",
    )


def find_model(directory: Directory, principal: Principal, name: str) -> ServedModel:
    """Return the model of this public name, when there is one and the principal may use it."""
    model = directory.models.get(name)
    if model is not None and may_use(principal, name):
        return model
    if model is not None:
        raise PlatformError(
            "MODEL_NOT_ALLOWED",
            ErrorKind.FORBIDDEN,
            f"This API key may not use the model {name[:100]!r}.",
            param="model",
        )
    names = [found.name for found in directory.usable(principal)[:NAMES_SHOWN]]
    listed = ", ".join(names) or "none"
    raise PlatformError(
        "MODEL_NOT_FOUND",
        ErrorKind.NOT_FOUND,
        f"There is no model {name[:100]!r}. This API key may use: {listed}.",
        param="model",
        fields={"models": names},
    )

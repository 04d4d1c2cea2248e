"""The commands of a caller, encoded once for as long as its demands and the server's life hold."""

from core.demand import Demand, DemandKind
from scheduler import commands
from scheduler.commands import acquire_call
from scheduler.fail_static import FailStatic
from scheduler.types import Grant, Packed, Prepared
from scheduler.waiting import PRESS_AFTER, Press

MICRO = 1_000_000


def check(demands: tuple[Demand, ...], owner: str, weight: float) -> None:
    """Raises ValueError for what no script could count by."""
    if not weight > 0:
        raise ValueError("A weight is positive.")
    for demand in demands:
        if any(letter in demand.counter for letter in " |=\r\n"):
            raise ValueError(f"A counter's name may not be {demand.counter!r}.")
        if demand.kind is DemandKind.RATE and demand.window_s < 1:
            raise ValueError("A rate has a window of at least 1 s.")
        if demand.kind is DemandKind.CAP and not demand.enforced:
            raise ValueError("A cap that lets everything pass is none.")
        if demand.kind in {DemandKind.RATE, DemandKind.CONCURRENCY}:
            commands.record_of(demand)
    if any(letter.isspace() for letter in owner):
        raise ValueError("An owner's name has no white space.")


def pack(prepared: Prepared, cap: Demand, static: FailStatic, *, epoch: bytes, replica: str) -> Packed:
    """Encode them, and keep them with `prepared`. `cap`: of all deployments."""
    tenant = prepared.tenant
    names = tuple(demand.counter for demand in prepared.named)
    budgets = tuple(demand.counter for demand in prepared.spends if demand.enforced)
    caps = (cap, *prepared.caps)
    text, keys = commands.form_text(prepared, caps), commands.packed_names(prepared, caps)
    form = commands.form_id(text)
    packed = Packed(
        epoch=epoch,
        names=keys,
        form=form,
        text=text,
        acquire=commands.acquire_prefix(keys, form, prepared.owner, epoch=epoch, replica=replica),
        acquire_first=commands.acquire_prefix(keys, form, prepared.owner, epoch=epoch, replica=replica, text=text),
        release=commands.release_prefix(tenant, keys, epoch=epoch, replica=replica),
        share=static.share((prepared.model.deployment_id, tenant, names, budgets)),
    )
    prepared.packed = packed
    return packed


def encode(grant: Grant, wait_s: float) -> bytes:
    """Encode the call of `acquire`, with the form when the server may not know it."""
    packed, tokens = grant.packed, (grant.input_tokens, grant.output_tokens)
    prefix = packed.acquire if packed.known else packed.acquire_first
    call = acquire_call(prefix, grant.key, grant.tier, grant.hold, wait_s * MICRO, *tokens)
    return call if packed.known else commands.with_form(call, packed.text)


def press(grant: Grant) -> Press | None:
    """When to say that it has waited long, and how."""
    part = PRESS_AFTER.get(grant.tier)
    if part is None:
        return None
    return part, commands.press_call(grant.prepared.model.deployment_id.hex, epoch=grant.packed.epoch)

"""The what-if on the wire, as operators and members ask for it."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.deps import Act
from api.limits import Amount, LevelName, MetricName, ModelName, ModeName
from api.schemas import Count, Input, Instant, Output
from api.services import Services
from api.what_if import Fact, Preview, preview, span
from catalog import models
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.money import PICO_PER_NANO
from tenants import limits, proposals
from tenants.limit_merge import SPENDS
from tenants.proposals import Proposal
from tenants.types import Limit, LimitAuthor, LimitLevel, LimitMetric, LimitMode, LimitSlot, Tenant
from tenants.what_if import EPOCH, Tally

HOURS_MAX = 5000
LIMITS_MAX = 500
PROPOSALS_MAX = 50
_TOKENS = frozenset({LimitMetric.INPUT_TOKENS_PER_MINUTE, LimitMetric.OUTPUT_TOKENS_PER_MINUTE})


class ProposedLimit(Input):
    """A limit to try, instead of the one for the same level, metric, model and mode."""

    level: LevelName = LimitLevel.TENANT
    metric: MetricName
    amount: Amount | None = Field(description="As in a limit; null tries it without.")
    mode: ModeName = LimitMode.HARD
    model: ModelName = ""
    project_id: Annotated[str | None, Field(max_length=64, description="With level project: that one alone.")] = None
    key_id: Annotated[str | None, Field(max_length=64, description="With level key: that one alone.")] = None


class WhatIfIn(Input):
    """What to try, and on which traffic: by default the last seven days."""

    limits: Annotated[list[ProposedLimit], Field(min_length=1, max_length=PROPOSALS_MAX)]
    since: Instant | None = None
    until: Instant | None = None


class Counted(Output):
    """Requests: how many, refused by limits in fact, refused under the proposed ones, and how the two differ."""

    requests: Count
    refused_in_fact: Count
    refused: Count
    newly_refused: Count = Field(description="Served in fact; would have been refused.")
    newly_served: Count = Field(description="Refused in fact; would have been served.")


class WhatIfHour(Counted):
    """One model of one tenant in one hour."""

    tenant_id: str
    model: str
    hour: datetime


class WhatIfLimit(Output):
    """What one limit would have stopped; a soft or dark one stops nothing, and counts what passed it."""

    tenant_id: str
    level: LevelName
    metric: MetricName
    amount: int | str
    mode: ModeName
    model: str
    requests: Count


class WhatIfFact(Output):
    """What met a limit in fact; `mode` hard: and was refused."""

    code: str
    level: str
    metric: str
    model: str
    mode: str
    requests: Count


class WhatIfOut(Output):
    """The answer, what it rests on, and where it is a guess."""

    since: datetime = Field(description="Later than asked for where there was too much to replay.")
    until: datetime
    tenants: Count
    tenants_left_out: Count = Field(description="Of the plan's, for want of room.")
    total: Counted
    refused_with_present_limits: Count = Field(
        description="The same replay under the limits in force: how far it differs from `refused_in_fact` is its error."
    )
    refused_otherwise: Count = Field(description="For money or capacity in fact; not replayed.")
    known_by_minute: Count = Field(description="Requests of which only sums by the minute are left.")
    limits: list[WhatIfLimit]
    in_fact: list[WhatIfFact]
    hours: list[WhatIfHour]
    hours_left_out: Count
    notes: list[str]


async def proposals_of(
    session: AsyncSession,
    body: WhatIfIn,
    *,
    tenant_id: UUID | None = None,
    plan_id: UUID | None = None,
    author: LimitAuthor = LimitAuthor.OPERATOR,
) -> list[Proposal]:
    """Return what the body proposes, for a tenant or a plan.

    Raises:
        PlatformError: invalid, not_found for projects, keys and models that are not there.
    """
    found = []
    for one in body.limits:
        project_id = None if one.project_id is None else parse_id(IdKind.PROJECT, one.project_id)
        key_id = None if one.key_id is None else parse_id(IdKind.API_KEY, one.key_id)
        fitting = {LimitLevel.PROJECT: key_id is None, LimitLevel.KEY: project_id is None}
        if not fitting.get(one.level, project_id is None and key_id is None) or (plan_id and (project_id or key_id)):
            message = "A limit names a project at level project, a key at level key, of a tenant and not of a plan."
            raise PlatformError("INVALID_REQUEST", ErrorKind.INVALID, message, param="limits")
        model = await models.own_name(session, one.model) if one.model else ""
        slot = LimitSlot(one.level, one.metric, one.mode, model, project_id, key_id, author, tenant_id, plan_id)
        amount = None if one.amount is None else limits.parse_amount(one.metric, one.amount)
        found.append(Proposal(slot, amount))
    await proposals.check(session, found)
    return found


async def answer(
    session: AsyncSession,
    services: Services,
    act: Act,
    body: WhatIfIn,
    *,
    tenants: Sequence[Tenant],
    wanted: Sequence[Proposal],
) -> WhatIfOut:
    """Replay, one question of a process at a time, and say what was asked in the audit trail.

    Raises:
        PlatformError: invalid range; unavailable while another question is being answered.
    """
    since, until = span(body.since, body.until, services.clock.now())
    if services.replays.locked():
        message = "Another what-if is being computed. Try again shortly."
        raise PlatformError("SERVICE_UNAVAILABLE", ErrorKind.UNAVAILABLE, message, retry_after_s=5)
    async with services.replays:
        found = await preview(session, tenants, wanted, since, until)
    act.details["limits"] = [one.model_dump(mode="json", exclude_defaults=True) for one in body.limits]
    act.details["since"], act.details["until"] = since.isoformat(), until.isoformat()
    hours = _hours(found)
    return WhatIfOut(
        since=max((one.since for one in found), default=since),
        until=until,
        tenants=len(found),
        tenants_left_out=len(tenants) - len(found),
        total=_counted(_sum([one.outcome.total for one in found])),
        refused_with_present_limits=sum(one.now.refused for one in found),
        refused_otherwise=sum(one.otherwise for one in found),
        known_by_minute=sum(one.by_minute for one in found),
        limits=_limits(found),
        in_fact=_in_fact(found),
        hours=hours[:HOURS_MAX],
        hours_left_out=max(0, len(hours) - HOURS_MAX),
        notes=_notes(found, since),
    )


def _sum(tallies: Sequence[Tally]) -> Tally:
    return Tally(
        *(sum(getattr(one, name) for one in tallies) for name in Tally.__struct_fields__),
    )


def _counted(tally: Tally) -> Counted:
    return Counted(**{name: getattr(tally, name) for name in Tally.__struct_fields__})


def _hours(found: Sequence[Preview]) -> list[WhatIfHour]:
    """Those with most that would change first."""
    hours = [
        WhatIfHour(
            tenant_id=format_id(IdKind.TENANT, one.tenant.id),
            model=model,
            hour=EPOCH + timedelta(microseconds=hour_us),
            **_counted(tally).model_dump(),
        )
        for one in found
        for (hour_us, model), tally in one.outcome.by_hour.items()
    ]
    return sorted(hours, key=lambda row: (-row.newly_refused - row.newly_served, row.hour, row.tenant_id, row.model))


def _limits(found: Sequence[Preview]) -> list[WhatIfLimit]:
    rows = [
        _limit(one.tenant.id, limit, requests)
        for one in found
        for limit, requests in (*one.outcome.refused_by.items(), *one.outcome.over.items())
    ]
    return sorted(rows, key=lambda row: (-row.requests, row.tenant_id, row.level, row.metric, row.model))[:LIMITS_MAX]


def _limit(tenant_id: UUID, limit: Limit, requests: int) -> WhatIfLimit:
    amount = limit.amount * PICO_PER_NANO if limit.metric in SPENDS else limit.amount
    return WhatIfLimit(
        tenant_id=format_id(IdKind.TENANT, tenant_id),
        level=limit.level,
        metric=limit.metric,
        amount=limits.amount_out(limit.metric, amount),
        mode=limit.mode,
        model=limit.model,
        requests=requests,
    )


def _in_fact(found: Sequence[Preview]) -> list[WhatIfFact]:
    sums: dict[Fact, int] = {}
    for one in found:
        for fact, requests in one.in_fact.items():
            sums[fact] = sums.get(fact, 0) + requests
    rows = [
        WhatIfFact(code=code, level=level, metric=metric, model=model, mode=mode, requests=requests)
        for (code, level, metric, model, mode), requests in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.requests, row.code, row.level, row.metric, row.model, row.mode))


def _notes(found: Sequence[Preview], since: datetime) -> list[str]:
    """Where the answer is a guess, in words."""
    notes = ["Calls of /v1/tokenize count for limits and leave no record, so they are not replayed."]
    if any(one.since > since for one in found):
        notes.append("There was more traffic than can be replayed at once: only the newest of it was.")
    if any(one.by_minute for one in found):
        notes.append(
            "Where single requests are no longer kept, or were too many, the sums of each minute were spread evenly "
            "over it; what ran at once then is not known and not limited here."
        )
    if any(one.outcome.total.refused_in_fact for one in found):
        notes.append("A refused request is taken to be like the mean of those served by the same model.")
    tried = {limit.metric for one in found for limit in (*one.outcome.refused_by, *one.outcome.over)}
    if tried & _TOKENS:
        notes.append("Tokens count as used. At the door an estimate counts until a request ends, and refuses earlier.")
    if tried & SPENDS:
        notes.append("Spend counts as charged. At the door the most a request may cost counts, and refuses earlier.")
    return notes

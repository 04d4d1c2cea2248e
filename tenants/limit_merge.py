"""Pure: which of the rules that could apply to a key do apply.

For each slot (level, metric, mode, model) the most particular rule stands: the one of this project or key, else the
tenant's for every project or key, else the plan's. What the tenant set for itself is chosen apart in the same way, and
the lower of the two holds: a tenant can narrow what operators allow, and never widen it.
"""

from collections.abc import Iterable, Mapping
from uuid import UUID

import msgspec

from core.money import nano_down
from tenants.types import Limit, LimitAuthor, LimitLevel, LimitMetric, LimitMode, LimitRule, LimitSlot

SPENDS = frozenset({LimitMetric.SPEND_PER_DAY, LimitMetric.SPEND_PER_MONTH, LimitMetric.SPEND_TOTAL})
_NARROWEST_FIRST = {LimitLevel.KEY: 0, LimitLevel.PROJECT: 1, LimitLevel.TENANT: 2}
_METRICS = {metric: place for place, metric in enumerate(LimitMetric)}
_MODES = {mode: place for place, mode in enumerate(LimitMode)}

_Place = tuple[LimitLevel, LimitMetric, LimitMode, str]


class Effective(msgspec.Struct, frozen=True):
    """A limit as the gateway enforces it, and the rule it comes from."""

    limit: Limit
    rule: LimitRule


def merge(rules: Iterable[LimitRule], project_id: UUID, key_id: UUID | None) -> tuple[Effective, ...]:
    """Return what holds for a key of a project, narrowest level first.

    Args:
        rules: of the tenant and of its plan; those of other projects and keys are passed over.
        project_id: the key's project.
        key_id: the key; None for one that has no rules of its own, as of a new key.
    """
    chosen: dict[tuple[_Place, LimitAuthor], LimitRule] = {}
    for rule in rules:
        slot = rule.slot
        if slot.project_id not in (None, project_id) or slot.key_id not in (None, key_id):
            continue
        place = (slot.level, slot.metric, slot.mode, slot.model), slot.author
        known = chosen.get(place)
        if known is None or _particular(slot) > _particular(known.slot):
            chosen[place] = rule
    lowest: dict[_Place, LimitRule] = {}
    for author in (LimitAuthor.OPERATOR, LimitAuthor.TENANT):
        for (slot_place, by), rule in chosen.items():
            other = lowest.get(slot_place)
            if by is author and (other is None or rule.amount < other.amount):
                lowest[slot_place] = rule
    return tuple(Effective(_limit(rule), rule) for rule in sorted(lowest.values(), key=_order))


def _particular(slot: LimitSlot) -> int:
    if slot.plan_id is not None:
        return 0
    return 1 if slot.project_id is None and slot.key_id is None else 2


def _order(rule: LimitRule) -> tuple[int, str, int, int]:
    slot = rule.slot
    return _NARROWEST_FIRST[slot.level], slot.model, _METRICS[slot.metric], _MODES[slot.mode]


def _limit(rule: LimitRule) -> Limit:
    slot = rule.slot
    amount = nano_down(rule.amount) if slot.metric in SPENDS else rule.amount
    return Limit(slot.level, slot.metric, amount, slot.mode, slot.model)


class UnreadableLimitError(Exception):
    """Some rule that may hold here cannot be read, and without it nobody knows what holds."""


class LimitBook:
    """Many rules, ready to be asked for many keys. Keys with the same limits get the same tuple: it is kept once."""

    def __init__(self, rules: Iterable[LimitRule] = ()) -> None:
        # by the narrowest id that a rule names, as a number: a UUID's own hash and comparison cost more
        self._of: dict[int, list[LimitRule]] = {}
        self._merged: dict[tuple[int, ...], tuple[Limit, ...]] = {}
        self._shared: dict[tuple[Limit, ...], tuple[Limit, ...]] = {}
        self._closed: set[int] = set()

        self.add(rules)

    def add(self, rules: Iterable[LimitRule]) -> None:
        """Take in more rules, before the first key is asked about."""
        for rule in rules:
            slot = rule.slot
            owner = slot.key_id or slot.project_id or slot.tenant_id or slot.plan_id
            if owner is not None:
                self._of.setdefault(owner.int, []).append(rule)

    def close(self, owner: UUID) -> None:
        """Say that a rule of this plan, tenant, project or key cannot be read."""
        self._closed.add(owner.int)

    def limits(self, plan_id: UUID, tenant_id: UUID, project_id: UUID, key_id: UUID) -> tuple[Limit, ...]:
        """Return what holds for this key.

        Raises:
            UnreadableLimitError: nobody knows.
        """
        of = self._of
        ids = plan_id.int, tenant_id.int, project_id.int, key_id.int
        if self._closed and not self._closed.isdisjoint(ids):
            raise UnreadableLimitError
        named = tuple([found for found in ids if found in of])
        merged = self._merged.get(named)
        if merged is None:
            rules = [rule for found in named for rule in of[found]]
            merged = tuple(effective.limit for effective in merge(rules, project_id, key_id))
            merged = self._merged[named] = self._shared.setdefault(merged, merged)
        return merged


def by_place(found: Iterable[Effective]) -> Mapping[tuple[LimitLevel, LimitMetric, str], Effective]:
    """Return the hard limits by level, metric and model."""
    return {
        (item.limit.level, item.limit.metric, item.limit.model): item
        for item in found
        if item.limit.mode is LimitMode.HARD
    }

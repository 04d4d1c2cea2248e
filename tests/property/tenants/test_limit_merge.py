"""Which rules hold: against the sentence that says it, read word by word over all rules."""

from datetime import UTC, datetime
from itertools import permutations
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from tenants.limit_merge import LimitBook, merge
from tenants.types import Limit, LimitAuthor, LimitLevel, LimitMetric, LimitMode, LimitRule, LimitSlot

PLAN, TENANT, PROJECTS, KEYS = UUID(int=1), UUID(int=2), (UUID(int=3), UUID(int=4)), (UUID(int=5), UUID(int=6))
AT = datetime(2026, 11, 30, tzinfo=UTC)
METRICS = (LimitMetric.REQUESTS_PER_MINUTE, LimitMetric.SPEND_PER_DAY)


def _slots() -> st.SearchStrategy[LimitSlot]:
    common = {
        "metric": st.sampled_from(METRICS),
        "mode": st.sampled_from((LimitMode.HARD, LimitMode.DARK)),
        "model": st.sampled_from(("", "m")),
    }
    levels, authors = st.sampled_from(LimitLevel), st.sampled_from(LimitAuthor)
    of_tenant = {**common, "author": authors, "tenant_id": st.just(TENANT)}
    return st.one_of(
        st.builds(LimitSlot, level=levels, plan_id=st.just(PLAN), **common),
        st.builds(LimitSlot, level=levels, **of_tenant),
        st.builds(LimitSlot, level=st.just(LimitLevel.PROJECT), project_id=st.sampled_from(PROJECTS), **of_tenant),
        st.builds(LimitSlot, level=st.just(LimitLevel.KEY), key_id=st.sampled_from(KEYS), **of_tenant),
    )


RULES = st.lists(st.tuples(_slots(), st.integers(0, 10**6)), unique_by=lambda pair: pair[0], max_size=24).map(
    lambda pairs: [LimitRule(UUID(int=9), slot, amount, AT) for slot, amount in pairs]
)


def _said(rules: list[LimitRule], level: LimitLevel, author: LimitAuthor, place: tuple[object, ...]) -> int | None:
    """The target's own rule, else the tenant's for the level, else the plan's."""
    mine = [
        rule
        for rule in rules
        if rule.slot.level is level
        and rule.slot.author is author
        and (rule.slot.metric, rule.slot.mode, rule.slot.model) == place
    ]
    own = [r for r in mine if r.slot.project_id == PROJECTS[0] or r.slot.key_id == KEYS[0]]
    wide = [r for r in mine if r.slot.tenant_id and not r.slot.project_id and not r.slot.key_id]
    plan = [r for r in mine if r.slot.plan_id]
    found = own or wide or plan
    return found[0].amount if found else None


@given(RULES)
def test_the_targets_rule_goes_before_the_tenants_and_that_before_the_plans(rules: list[LimitRule]) -> None:
    expected = set()
    for level in LimitLevel:
        for place in {(rule.slot.metric, rule.slot.mode, rule.slot.model) for rule in rules}:
            amounts = [_said(rules, level, author, place) for author in LimitAuthor]
            known = [amount for amount in amounts if amount is not None]
            if known:
                metric, mode, model = place
                counted = min(known) // 1000 if metric is LimitMetric.SPEND_PER_DAY else min(known)  # pico to nano
                expected.add(Limit(level, metric, counted, mode, model))
    assert {found.limit for found in merge(rules, PROJECTS[0], KEYS[0])} == expected


@given(RULES, st.randoms(use_true_random=False))
def test_the_order_of_rules_changes_nothing(rules: list[LimitRule], random: object) -> None:
    shuffled = list(rules)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merge(shuffled, PROJECTS[0], KEYS[0]) == merge(rules, PROJECTS[0], KEYS[0])


@given(RULES, _slots(), st.integers(0, 10**6))
def test_what_a_tenant_sets_for_itself_never_widens(rules: list[LimitRule], slot: LimitSlot, amount: int) -> None:
    operators = [rule for rule in rules if rule.slot.author is LimitAuthor.OPERATOR]
    allowed = {
        (f.limit.level, f.limit.metric, f.limit.mode, f.limit.model): f.limit.amount
        for f in merge(operators, PROJECTS[0], KEYS[0])
    }
    for found in merge(rules, PROJECTS[0], KEYS[0]):
        limit = found.limit
        assert limit.amount <= allowed.get((limit.level, limit.metric, limit.mode, limit.model), limit.amount)


@given(RULES)
def test_a_book_says_the_same_for_every_key_and_keeps_equal_limits_once(rules: list[LimitRule]) -> None:
    book = LimitBook(rules)
    found = {
        (project, key): book.limits(PLAN, TENANT, project, key) for project in PROJECTS for key in (*KEYS, UUID(int=7))
    }
    for (project, key), limits in found.items():
        assert limits == tuple(item.limit for item in merge(rules, project, key))
    for one, two in permutations(found.values(), 2):
        assert (one is two) == (one == two)


def test_narrowest_first() -> None:
    rules = [
        LimitRule(UUID(int=9), LimitSlot(level, LimitMetric.CONCURRENCY, model=model, plan_id=PLAN), 1, AT)
        for level in (LimitLevel.TENANT, LimitLevel.KEY, LimitLevel.PROJECT)
        for model in ("m", "")
    ]
    assert [(f.limit.level.value, f.limit.model) for f in merge(rules, PROJECTS[0], None)] == [
        ("key", ""),
        ("key", "m"),
        ("project", ""),
        ("project", "m"),
        ("tenant", ""),
        ("tenant", "m"),
    ]


def test_a_new_keys_limits_are_those_of_every_key() -> None:
    slot = LimitSlot(LimitLevel.KEY, LimitMetric.CONCURRENCY, tenant_id=TENANT, key_id=KEYS[0])
    assert merge([LimitRule(UUID(int=9), slot, 3, AT)], PROJECTS[0], None) == ()

"""Rating in SQL gives what `pricing.charge` gives, for any prices, steps and minimums."""

import asyncio
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from billing import pricing
from billing.rating_queries import SCHEDULES, amount_of, is_rated_at, schedule_values
from billing.types import Outcome, PriceSchedule, PriceStep
from core import db
from core.ids import new_uuid
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories.billing import MODEL

VERSION, TENANT = new_uuid(), new_uuid()
prices = st.integers(0, 10**7)
counts = st.one_of(st.integers(0, 12), st.integers(0, 300_000))
usages = st.builds(TokenUsage, counts, counts, counts, counts, counts)
unit = (prices,) * 5


@st.composite
def schedules(draw: st.DrawFn) -> PriceSchedule:
    aboves = sorted(draw(st.sets(st.one_of(st.integers(1, 30), st.integers(1, 600_000)), max_size=3)))
    return PriceSchedule(
        VERSION,
        Currency.USD,
        Tier.STANDARD,
        *draw(st.tuples(*unit)),
        request=draw(st.sampled_from((0, 10**6))),
        minimum=draw(st.sampled_from((0, 10**8, 10**11))),
        steps=tuple(PriceStep(above, *draw(st.tuples(*unit))) for above in aboves),
    )


_STATEMENT = f"""
    SELECT {amount_of("e")} FROM unnest(CAST(:outcome AS text[]), CAST(:fresh AS bigint[]),
        CAST(:cached_in AS bigint[]), CAST(:written AS bigint[]), CAST(:out AS bigint[]), CAST(:thought AS bigint[]))
        WITH ORDINALITY
        AS u (outcome, input_uncached, input_cached, input_cache_write, output, reasoning, place)
    CROSS JOIN LATERAL (SELECT u.*, CAST(:t AS uuid) AS tenant_id, CAST(:m AS uuid) AS model_id, 1 AS tier,
                               CAST(:v AS uuid) AS price_version_id) e
    JOIN (SELECT * FROM {SCHEDULES}) s ON {is_rated_at("e")} ORDER BY e.place
"""


def test_sql_rates_like_python(database_settings: Database) -> None:
    with asyncio.Runner() as runner:
        engine = db.create_engine(database_settings)
        sessions = db.create_sessions(engine)

        async def in_sql(s: PriceSchedule, used: Sequence[tuple[TokenUsage, Outcome]]) -> list[int]:
            values = {
                **schedule_values([(TENANT, MODEL, VERSION, s)]),
                "t": TENANT,
                "m": MODEL,
                "v": VERSION,
                "outcome": [outcome.value for _, outcome in used],
                "fresh": [one.input_uncached for one, _ in used],
                "cached_in": [one.input_cached for one, _ in used],
                "written": [one.input_cache_write for one, _ in used],
                "out": [one.output for one, _ in used],
                "thought": [one.reasoning for one, _ in used],
            }
            async with db.transaction(sessions) as session:
                return [int(value) for value in await session.scalars(text(_STATEMENT), values)]

        @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
        @given(schedules(), st.lists(st.tuples(usages, st.sampled_from(Outcome)), min_size=1, max_size=20))
        def check(s: PriceSchedule, used: list[tuple[TokenUsage, Outcome]]) -> None:
            assert runner.run(in_sql(s, used)) == [pricing.charge(one, s, outcome) for one, outcome in used]

        check()
        runner.run(engine.dispose())

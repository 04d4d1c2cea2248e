"""Faults somebody might make in `billing`: each is a file, text that stands there once, and what it becomes."""

from dataclasses import dataclass

MACHINE = "tests/property/billing/test_books.py"
ALERTS = "tests/property/billing/test_alerts.py"
SEALED = "tests/integration/billing/test_closing.py"
BOOKS = "tests/property/billing/test_books.py::test_the_books_follow_the_model"  # the machine, on a server of its own


@dataclass(frozen=True)
class Fault:
    """A mistake, and where else than in the state machine it may be found."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = (MACHINE,)


FAULTS = (
    # rating
    Fault(
        "cached tokens billed as input",
        "billing/pricing.py",
        "        + cached * unit.cached_input\n",
        "        + cached * unit.input\n",
    ),
    Fault(
        "a step begins a token early",
        "billing/pricing.py",
        "    for step in s.steps:\n        if input_tokens <= step.above:\n            break\n        unit = step\n",
        "    for step in s.steps:\n        if input_tokens < step.above:\n            break\n        unit = step\n",
    ),
    Fault(
        "who left before the first token is billed",
        "billing/pricing.py",
        "(outcome is not CLIENT_ABORT or usage.output_total == 0)",
        "outcome is not CLIENT_ABORT",
    ),
    Fault(
        "the minimum charged twice",
        "billing/posting.py",
        "Charge(int(row.amount) - lifted, ",
        "Charge(int(row.amount), ",
    ),
    Fault(
        "a tenant's own prices ignored",
        "billing/price_table.py",
        "return self.own(model_id, tier, tenant_id) or self._list.get((model_id, tier))",
        "return self._list.get((model_id, tier))",
    ),
    Fault(
        "a discount rounded half up",
        "billing/price_table.py",
        "(2 * rest > PPM or (2 * rest == PPM and whole % 2 == 1))",
        "(2 * rest >= PPM)",
    ),
    Fault(
        "the price version not frozen",
        "billing/posting.py",
        "                    event, self._prices.get(event.price_version_id), currencies",
        "                    event, max(self._prices.items(), default=(None, None))[1], currencies",
    ),
    # posting
    Fault(
        "an event is not looked for before it is posted",
        "billing/posting_queries.py",
        "        ON CONFLICT (tenant_id, id, day) DO NOTHING\n        RETURNING *\n",
        "        RETURNING *\n",
    ),
    Fault(
        "a rollup replaced instead of added to",
        "billing/posting_queries.py",
        'f"{c} = r.{c} + excluded.{c}"',
        'f"{c} = excluded.{c}"',
    ),
    Fault(
        "what was held for posted usage is kept held",
        "billing/posting.py",
        "requests.setdefault(event.tenant_id, []).append(event.id)",
        "requests.setdefault(event.tenant_id, [])",
    ),
    Fault(
        "one transaction for all months",
        "billing/posting.py",
        "assess.day_number(event.id), assess.month_number(event.admitted_at_us)",
        "assess.day_number(event.id), 0",
    ),
    Fault(
        "a repeat of a key is billed",
        "billing/idempotency.py",
        "    return [_free(event) if (event.tenant_id, event.id) in repeats else event for event in events]",
        "    return events",
    ),
    Fault(
        "a key of one tenant is the key of all",
        "billing/idempotency.py",
        "rows = seen.setdefault((event.tenant_id, event.idempotency), [])",
        "rows = [row for (_, digest), some in seen.items() if digest == event.idempotency for row in some]\n"
        "        seen.setdefault((event.tenant_id, event.idempotency), rows)",
    ),
    Fault(
        "a key counts a minute too long",
        "billing/idempotency.py",
        "WINDOW_US = 24 * 3600 * 1_000_000",
        "WINDOW_US = (24 * 3600 + 60) * 1_000_000",
    ),
    Fault(
        "quarantined usage is posted when it is offered again",
        "billing/posting_queries.py",
        "WHERE NOT EXISTS (SELECT FROM usage_quarantine q WHERE q.tenant_id = i.tenant_id AND q.id = i.id)) i",
        ") i",
        (MACHINE, "tests/integration/billing/test_quarantine.py"),
    ),
    Fault(
        "quarantined usage is billed as often as it is decided",
        "billing/quarantine.py",
        "    if not done:\n",
        "    if not done and billed_as is None:\n",
    ),
    # credit
    Fault(
        "what expires last burns first",
        "billing/posting_queries.py",
        "ORDER BY tenant_id, priority, expires_at NULLS LAST, account_id",
        "ORDER BY tenant_id, priority, expires_at DESC NULLS LAST, account_id",
    ),
    Fault(
        "paid credit burns before given",
        "billing/posting_queries.py",
        "ORDER BY tenant_id, priority, expires_at NULLS LAST, account_id",
        "ORDER BY tenant_id, -priority, expires_at NULLS LAST, account_id",
    ),
    Fault(
        "a lot pays in the minute it expires",
        "billing/ledger.py",
        "charge.minute < self.expires_at",
        "charge.minute <= self.expires_at",
    ),
    Fault(
        "a lot pays outside its models",
        "billing/ledger.py",
        "            and (self.models is None or charge.model_id in self.models)\n",
        "",
    ),
    Fault(
        "what given credit pays is not taken from what is unearned",
        "billing/ledger.py",
        "            transfers.append(Transfer(source.used, source.unearned, part))",
        "            pass",
    ),
    Fault(
        "the overrun is nobody's",
        "billing/ledger.py",
        "                taken[overrun, earned] = taken.get((overrun, earned), 0) + left\n",
        "                pass\n",
    ),
    Fault(
        "a single lot's expiry is not posted",
        "billing/lots.py",
        "    if transactions:\n        await ledger.post(session, transactions)",
        "    if len(transactions) > 1:\n        await ledger.post(session, transactions)",
    ),
    Fault(
        "expired paid credit becomes revenue of usage",
        "billing/lots.py",
        "code=ledger.BREAKAGE,",
        "code=ledger.REVENUE,",
    ),
    Fault(
        "paid credit expires although older usage is on a disk",
        "billing/lots.py",
        "    return not spools.blocking(await spools.all_of(session), until)",
        "    return not spools.blocking([], until)",
    ),
    Fault(
        "credit is taken back a minute early",
        "billing/lots.py",
        "EXPIRY_GRACE = timedelta(minutes=10)",
        "EXPIRY_GRACE = timedelta(minutes=9)",
    ),
    Fault(
        "a top-up that expires goes to the lot that does not",
        "billing/credits.py",
        "    if expires_at is None:\n        lot =",
        "    if True:\n        lot =",
    ),
    Fault(
        "another amount under a top-up's key is taken",
        "billing/credits.py",
        "    if before is not None and before.body_sha256 != body:",
        "    if before is not None and before.body_sha256 == b'':",
    ),
    Fault(
        "a reversal with the wrong sign",
        "billing/adjustment_kinds.py",
        "Transfer(row.credit_account, row.debit_account, int(row.amount))",
        "Transfer(row.debit_account, row.credit_account, int(row.amount))",
    ),
    Fault(
        "one person decides alone about a pico more",
        "billing/adjustments.py",
        'alone + values["amount"] > asked.alone_max_pico',
        'alone + values["amount"] > asked.alone_max_pico + 1',
    ),
    Fault(
        "the door counts credit that is for one model only",
        "billing/queries.py",
        "WHERE tenant_id = p.tenant_id AND models IS NULL AND tiers IS NULL",
        "WHERE tenant_id = p.tenant_id AND tiers IS NULL",
    ),
    Fault(
        "who pays in advance may still owe",
        "billing/queries.py",
        "ON u.account_id = p.unbilled_account AND p.mode = 'postpaid'",
        "ON u.account_id = p.unbilled_account",
    ),
    # what Valkey knows
    Fault(
        "posted usage is taken off twice",
        "billing/credit_figures.py",
        "  redis.call('SET', KEYS[1], struct.pack('<ddd', a, v, o - posted))\n",
        "  redis.call('SET', KEYS[1], struct.pack('<ddd', a, v, o - 2 * posted))\n",
    ),
    Fault(
        "an old figure replaces a newer one",
        "billing/credit_figures.py",
        "  if v < tonumber(ARGV[2]) then a, v = ARGV[1], ARGV[2] end",
        "  a, v = ARGV[1], ARGV[2]",
    ),
    Fault(
        "what a lost replica held is not given back",
        "billing/reconcile.py",
        "        await credit_figures.settle(client, tenant_id, None, requests)\n",
        "",
    ),
    # re-rating
    Fault(
        "a re-rating gives back to who paid first",
        "billing/rerating_rate.py",
        "    for source in sources:\n        part = min(wanted, source.left)",
        "    for source in reversed(sources):\n        part = min(wanted, source.left)",
    ),
    Fault(
        "a re-rating gives to expired promo",
        "billing/rerating_post.py",
        "to = source.account if source.open or source.used is None else source.used",
        "to = source.account",
    ),
    # proof and months
    Fault(
        "a closed month takes postings",
        "migrations/versions/2026-11-30-2230_add_periods_and_seals.py",
        "        NEW.period := greatest(date_trunc('month', NEW.effective_at AT TIME ZONE 'UTC')::date,\n"
        "                               (SELECT (max(month) + interval '1 month')::date FROM public.ledger_period));",
        "        NEW.period := date_trunc('month', NEW.effective_at AT TIME ZONE 'UTC')::date;",
        (SEALED, BOOKS),
    ),
    Fault(
        "a month closes although usage of it is on a disk",
        "billing/periods.py",
        "        if blocking and not override_reason:",
        "        if False:",
    ),
    Fault(
        "a seal leaves out the amounts",
        "billing/seal_queries.py",
        "c.tenant_id, t.currency, t.amount::text)",
        "c.tenant_id, t.currency)",
        (SEALED,),
    ),
    Fault(
        "sealing forgets what waits after the first page",
        "migrations/versions/2026-12-01-1130_queue_for_seals.py",
        "        INSERT INTO public.seal_queue (tx_id) SELECT id FROM written;",
        "        INSERT INTO public.seal_queue (tx_id) SELECT id FROM written LIMIT 1;",
        (BOOKS,),
    ),
    # alerts
    Fault(
        "a crossing is told as often as it is looked for",
        "billing/alert_queries.py",
        'made.update((await session.scalars(text(statement), {"tenant": tenant_id, **row})).all())',
        'await session.execute(text(statement), {"tenant": tenant_id, **row})\n        made.add(row["id"])',
        (ALERTS,),
    ),
)

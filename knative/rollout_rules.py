"""When a new version is taken back without being asked: simple statistics over both versions in one window. Pure.

Every rule waits for `Rules.samples` of both versions, and compares new with old:

- errors, and refusals that blame the caller: at least `FAILURES_MIN` of them, more than `errors` times what the old
  version's rate, or `RATE_FLOOR`, would give, and more by `DEVIATIONS` times the root of that;
- ttft, tpot: the 95th percentile above `ttft` or `tpot` times the old one's, and later by at least `LATER_S`;
- cost: the mean of an answer above `cost` times the old one's;
- tokens: the mean output of an answer above `tokens` times the old one's, or below that part of it.

The rules look again and again while a window grows, so a bound is met by chance more often than once: see
docs/rollouts.md for how often two equal versions are told apart.
"""

import math
from typing import Any

import msgspec

from catalog.rollout_types import Rules
from knative.arm_figures import Arm, Figures, count, percentile

FAILURES_MIN = 5
RATE_FLOOR = 0.01
DEVIATIONS = 3
LATER_S = 0.005
HIGH = 0.95


class Verdict(msgspec.Struct, frozen=True):
    """Which rule says that the new version is worse, in words."""

    rule: str
    words: str


def judge(rules: Rules, seen: Figures) -> Verdict | None:
    """Return the first rule that the new version breaks, or None."""
    new, old = seen.canary, seen.stable
    for failed in ("errors", "refused"):
        if found := _failures(failed, rules, new, old):
            return found
    for name, ratio, new_times, old_times in (
        ("ttft", rules.ttft, new.ttft, old.ttft),
        ("tpot", rules.tpot, new.tpot, old.tpot),
    ):
        if not ratio or min(count(new_times), count(old_times)) < rules.samples:
            continue
        was, now = percentile(old_times, HIGH), percentile(new_times, HIGH)
        if now > was * ratio and now - was >= LATER_S:
            return Verdict(name, f"{name} p95 is {now * 1000:.0f} ms, of the old version {was * 1000:.0f} ms")
    if min(new.answers, old.answers) < rules.samples:
        return None
    return _means(rules, new, old)


def _failures(name: str, rules: Rules, new: Arm, old: Arm) -> Verdict | None:
    failures: int = getattr(new, name)
    if not rules.errors or failures < FAILURES_MIN or min(new.requests, old.requests) < rules.samples:
        return None
    now, was = failures / new.requests, getattr(old, name) / old.requests
    expected = max(was, RATE_FLOOR) * new.requests
    if failures <= rules.errors * expected or failures - expected < DEVIATIONS * math.sqrt(expected):
        return None
    return Verdict(name, f"{now:.1%} of the requests end in {name}, of the old version's {was:.1%}")


def _means(rules: Rules, new: Arm, old: Arm) -> Verdict | None:
    now, was = new.cost_pico / new.answers, old.cost_pico / old.answers
    if rules.cost and was and now > was * rules.cost:
        return Verdict("cost", f"an answer costs {now / was:.2f} times what it costs with the old version")
    now, was = new.output_tokens / new.answers, old.output_tokens / old.answers
    if rules.tokens and was and not was / rules.tokens <= now <= was * rules.tokens:
        return Verdict("tokens", f"an answer has {now:.1f} tokens, with the old version {was:.1f}")
    return None


def shown(seen: Figures) -> dict[str, Any]:
    """Return the figures as they are written down with a decision."""
    return {"stable": _arm(seen.stable), "canary": _arm(seen.canary), "shadow": _shadow(seen)}


def _arm(arm: Arm) -> dict[str, Any]:
    answers = max(1, arm.answers)
    return {
        "requests": arm.requests,
        "errors": arm.errors,
        "refused": arm.refused,
        "answers": arm.answers,
        "ttft_ms_p95": round(percentile(arm.ttft, HIGH) * 1000, 1),
        "tpot_ms_p95": round(percentile(arm.tpot, HIGH) * 1000, 1),
        "mean_cost_pico": arm.cost_pico // answers,
        "mean_input_tokens": round(arm.input_tokens / answers, 1),
        "mean_output_tokens": round(arm.output_tokens / answers, 1),
    }


def _shadow(seen: Figures) -> dict[str, Any]:
    shadow = seen.shadow
    compared = max(1, shadow.compared)
    return {
        "copies": shadow.copies,
        "dropped": shadow.dropped,
        "failed": shadow.failed,
        "compared": shadow.compared,
        "exact": shadow.exact,
        "json": shadow.json,
        "json_equal": shadow.json_equal,
        "unlike": shadow.unlike,
        "mean_edit": round(shadow.edit_sum / compared, 4),
        "live_chars": shadow.live_chars,
        "shadow_chars": shadow.shadow_chars,
        "live_tokens": shadow.live_tokens,
        "shadow_tokens": shadow.shadow_tokens,
        "cost_pico": shadow.cost_pico,
    }

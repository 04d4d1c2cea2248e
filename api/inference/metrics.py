"""Own counters: plain lists on the hot path, text only when scraped. No tenant, no key."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from core.tiers import Tier
from core.usage import TokenUsage

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DELAY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)
GAP_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

Levels = Mapping[str, tuple[str, Mapping[str, float]]]  # name → label, level by its value
NO_LEVELS: Levels = MappingProxyType({})


class Histogram:
    """Counts by upper bound, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str = "") -> Iterable[str]:
        running = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            running += count
            yield f'{name}_bucket{{{labels}le="{bound:g}"}} {running}'
        count = running + self.counts[-1]
        suffix = f"{{{labels.rstrip(',')}}}" if labels else ""
        yield f'{name}_bucket{{{labels}le="+Inf"}} {count}'
        yield f"{name}_sum{suffix} {self.total:.6f}"
        yield f"{name}_count{suffix} {count}"


class Metrics:
    """All of one gateway process."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}  # endpoint, status
        self.refusals: dict[str, int] = {}  # error code
        self.spool_refusals = [0] * len(Tier)  # by tier: work whose usage could not have been kept
        self.outcomes: dict[str, int] = {}
        self.preemptions: dict[
            tuple[str, str], int
        ] = {}  # tier of the victim, for whom; "ended": it found no other place
        self.retries: dict[str, int] = {}  # to other replicas: sent, moved, over_budget, replicas_full
        self.fallbacks: dict[str, int] = {}  # why another model served: error code of the one that was asked for
        self.duration = Histogram(LATENCY_BUCKETS_S)
        self.ttft = Histogram(LATENCY_BUCKETS_S)
        self.gap = Histogram(GAP_BUCKETS_S)
        self.config_delay = Histogram(DELAY_BUCKETS_S)  # from a change of keys and the like to obeying it
        self.config_delay_max_s = 0.0
        self.input_tokens = self.cached_tokens = self.output_tokens = 0
        self.counters: dict[str, int] = {
            "connections_total": 0,
            "cold_requests_total": 0,
            "bad_requests_total": 0,
            "timeouts_total": 0,
            "spool_late_total": 0,
            "spool_failed_total": 0,
            "usage_quarantined_total": 0,
            "usage_counted_by_gateway_total": 0,
            "prompt_uncounted_total": 0,
            "log_lines_dropped_total": 0,
            "config_reloads_total": 0,
            "config_failures_total": 0,
            "config_unreadable_total": 0,  # rows left out, each time one is met
            "fallbacks_failed_total": 0,  # the other model had no place either
            "switched_while_waiting_total": 0,  # requests sent to the version that had replaced theirs meanwhile
            "streams_ended_total": 0,
            "rehashed_total": 0,
            "rehash_dropped_total": 0,
            "internal_errors_total": 0,
            "preempt_waste_tokens_total": 0,  # of prompts, in calls that were ended for a higher tier
            "idempotency_replayed_total": 0,
            "idempotency_refused_total": 0,
            "refusals_crowded_total": 0,
            "refusals_dropped_total": 0,
            "refusal_write_failures_total": 0,
        }

    def count(self, endpoint: str, status: int) -> None:
        key = (endpoint, status)
        requests = self.requests
        requests[key] = requests.get(key, 0) + 1

    def served(self, endpoint: str, status: int, took_s: float) -> None:
        """One inference request, however it ended."""
        key, duration = (endpoint, status), self.duration
        self.requests[key] = self.requests.get(key, 0) + 1
        duration.counts[bisect_left(duration.bounds, took_s)] += 1
        duration.total += took_s

    def billed(self, outcome: str, usage: TokenUsage, first_byte_s: float | None) -> None:
        """One generation; `first_byte_s` is None when none came."""
        outcomes, cached = self.outcomes, usage.input_cached
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        self.input_tokens += usage.input_uncached + cached + usage.input_cache_write
        self.cached_tokens += cached
        self.output_tokens += usage.output + usage.reasoning
        if first_byte_s is not None:
            ttft = self.ttft
            ttft.counts[bisect_left(ttft.bounds, first_byte_s)] += 1
            ttft.total += first_byte_s

    def add(self, name: str, step: int = 1) -> None:
        self.counters[name] += step

    def obeyed(self, delay_s: float) -> None:
        """A change is in force here so long after it was made."""
        self.config_delay.observe(delay_s)
        self.config_delay_max_s = max(self.config_delay_max_s, delay_s)

    def preempted(self, tier: str, by: Tier | None) -> None:
        """A request gave its place to tier `by`; None: it had found no other when its time was over."""
        key = tier, by.label if by is not None else "ended"
        self.preemptions[key] = self.preemptions.get(key, 0) + 1

    def _tokens(self) -> dict[str, int]:
        return {"input": self.input_tokens, "input_cached": self.cached_tokens, "output": self.output_tokens}

    def text(self, gauges: Mapping[str, float], by_label: Levels = NO_LEVELS, more: Iterable[str] = ()) -> str:
        """Prometheus exposition text. Gauges, plain and by a label, and the lines of `more` are read at the scrape."""
        lines: list[str] = ["# TYPE tidegate_gateway_requests_total counter"]
        lines.extend(
            f'tidegate_gateway_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.requests.items())
        )
        lines.append("# TYPE tidegate_gateway_preemptions_total counter")
        lines.extend(
            f'tidegate_gateway_preemptions_total{{tier="{tier}",reason="{reason}"}} {count}'
            for (tier, reason), count in sorted(self.preemptions.items())
        )
        for name, label, values in (
            ("refusals_total", "code", self.refusals),
            ("retries_total", "result", self.retries),
            ("fallbacks_total", "reason", self.fallbacks),
            ("spool_refusals_total", "tier", {tier.label: self.spool_refusals[tier] for tier in Tier}),
            ("generations_total", "outcome", self.outcomes),
            ("tokens_total", "kind", self._tokens()),
        ):
            lines.append(f"# TYPE tidegate_gateway_{name} counter")
            lines.extend(f'tidegate_gateway_{name}{{{label}="{key}"}} {value}' for key, value in sorted(values.items()))
        for name, histogram in (
            ("request_duration_seconds", self.duration),
            ("ttft_seconds", self.ttft),
            ("itl_seconds", self.gap),
            ("config_delay_seconds", self.config_delay),
        ):
            lines.append(f"# TYPE tidegate_gateway_{name} histogram")
            lines.extend(histogram.lines(f"tidegate_gateway_{name}"))
        for name, value in self.counters.items():
            lines.append(f"# TYPE tidegate_gateway_{name} counter")
            lines.append(f"tidegate_gateway_{name} {value}")
        for name, level in gauges.items():
            lines.append(f"# TYPE tidegate_gateway_{name} gauge")
            lines.append(f"tidegate_gateway_{name} {level:.15g}")
        for name, (label, levels) in by_label.items():
            lines.append(f"# TYPE tidegate_gateway_{name} gauge")
            lines.extend(f'tidegate_gateway_{name}{{{label}="{key}"}} {level:.15g}' for key, level in levels.items())
        lines.extend(more)
        return "\n".join(lines) + "\n"

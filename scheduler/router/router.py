"""Which replica answers a request, for all deployments of one gateway that have more than one. See `fleet`."""

from collections.abc import Callable, Mapping
from random import random as _random

import msgspec

from knative.types import DeploymentState
from scheduler.router.fleet import Choice, Decision, Fleet
from scheduler.router.prefixes import PrefixTable
from scheduler.router.replica import Figures

TABLE_BYTES = 32 * 1024 * 1024  # of all deployments together
FLEETS_MAX = 10_000
UNUSED_S = 600.0


class Seen(msgspec.Struct, frozen=True):
    """One replica in a report: what is known of it here, without any request's view."""

    replica: str
    phase: str
    why_not: str
    weight: float
    inflight: int
    elsewhere: int
    waiting: int
    kv_used: float
    heat_bytes: int
    sent: int
    first_byte_ms: int


class Report(msgspec.Struct, frozen=True):
    """How one gateway sees the replicas of one deployment, and its last decisions of which the reasons were kept."""

    gateway: str
    at_us: int
    figures_fresh: bool
    mean_bytes: int
    replicas: tuple[Seen, ...]
    decisions: tuple[Decision, ...]


class Router:
    """Fleets by deployment; nothing here awaits.

    Args:
        zone: where this gateway stands; empty: nobody is far.
        table_bytes: the bound of what is remembered of prompts.
        random: uniform in [0, 1).
    """

    def __init__(
        self, *, zone: str = "", table_bytes: int = TABLE_BYTES, random: Callable[[], float] = _random
    ) -> None:
        self._zone = zone
        self._random = random
        self._table = PrefixTable(table_bytes)
        self._fleets: dict[str, Fleet] = {}

    def pick(
        self,
        state: DeploymentState,
        prompt: bytes,
        begin: int,
        salt: str | None,
        now: float,
        *,
        besides: str = "",
    ) -> Choice:
        """Return the replica to ask among those of `state`, at least one; see `Fleet.pick`."""
        fleet = self._fleets.get(state.deployment)
        if fleet is None:
            fleet = self._add(state, now)
        elif fleet.state is not state:
            fleet.refresh(state, now)
        return fleet.pick(prompt, begin, salt, now, besides=besides)

    def _add(self, state: DeploymentState, now: float) -> Fleet:
        if len(self._fleets) >= FLEETS_MAX:
            self._fleets.clear()
        fleet = Fleet(state, self._table, zone=self._zone, random=self._random, now=now)
        self._fleets[state.deployment] = fleet
        return fleet

    @property
    def deployments(self) -> list[str]:
        """Those of which figures are of use here."""
        return list(self._fleets)

    def take_figures(self, deployment: str, figures: Mapping[str, Figures], now: float) -> None:
        """What the engines of a deployment said of themselves, read a moment ago, by replica."""
        if (fleet := self._fleets.get(deployment)) is not None:
            fleet.take_figures(figures, now)

    def look(self, now: float, silent_since: Callable[[str], float]) -> None:
        """Several times a second. `silent_since`: by address, monotonic; 0 of one that speaks or owes nothing."""
        for deployment, fleet in list(self._fleets.items()):
            if now - fleet.used_at >= UNUSED_S:
                del self._fleets[deployment]
            else:
                fleet.look(now, silent_since)

    def report(self, deployment: str, *, gateway: str, now: float, now_us: int) -> Report | None:
        """Return what operators may see; None of a deployment that is not routed here."""
        fleet = self._fleets.get(deployment)
        if fleet is None:
            return None
        seen = []
        for replica in fleet.replicas.values():
            shown = fleet.considered(replica, [])
            seen.append(
                Seen(
                    replica=replica.name,
                    phase=shown.phase,
                    why_not=shown.why_not,
                    weight=shown.weight,
                    inflight=shown.inflight,
                    elsewhere=shown.elsewhere,
                    waiting=shown.waiting,
                    kv_used=shown.kv_used,
                    heat_bytes=shown.heat_bytes,
                    sent=replica.picked,
                    first_byte_ms=round(replica.first_byte_s * 1000),
                )
            )
        return Report(
            gateway=gateway,
            at_us=now_us,
            figures_fresh=now < fleet.fresh_until,
            mean_bytes=round(fleet.mean),
            replicas=tuple(seen),
            decisions=tuple(fleet.samples),
        )

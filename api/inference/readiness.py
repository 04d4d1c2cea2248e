"""What `/ready` says: the truth about each thing the gateway leans on, and whether it can serve all the same."""

import msgspec

from api.inference.gateway import Gateway
from scheduler.admission import Admission


class Report(msgspec.Struct, frozen=True):
    """`serving` decides the status; `parts` are ``ok`` or say what is wrong."""

    serving: bool
    parts: dict[str, str]


class Readiness:
    """Postgres or Valkey away is told, but does not make a gateway unready: it goes on by what it knows."""

    def __init__(self, gateway: Gateway, admission: Admission) -> None:
        self._gateway = gateway
        self._admission = admission

    def __call__(self) -> Report:
        gateway = self._gateway
        directory = gateway.directory
        age_s = gateway.clock.monotonic() - directory.fresh_at
        fresh = age_s <= gateway.settings.cache_trust_s / 10
        parts = {
            "config": "ok" if directory.loaded else "loading",
            "postgres": "ok" if directory.loaded and fresh else "away",
            "valkey": "ok" if self._admission.ready else "away",
            "spool": "full" if gateway.spool.full else "ok",
            "process": "draining" if gateway.draining else "ok",
        }
        serving = directory.loaded and not gateway.spool.full and not gateway.draining
        return Report(serving, parts)

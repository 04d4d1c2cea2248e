"""What `/ready` says: the truth about each thing the gateway leans on, and whether it can serve all the same."""

import msgspec

from api.inference.directory import Directory
from api.inference.gateway import Gateway
from api.inference.ports import Spool
from core.tiers import Tier
from scheduler.admission import Admission


class Report(msgspec.Struct, frozen=True):
    """`serving` decides the status; `parts` are ``ok`` or say what is wrong."""

    serving: bool
    parts: dict[str, str]


def spool_part(spool: Spool) -> str:
    """``ok``, which tiers are refused, or ``full``."""
    refused = [tier.label for tier in Tier if spool.refuses(tier)]
    return "ok" if not refused else "full" if len(refused) == len(Tier) else f"refuses {', '.join(refused)}"


def _config_part(directory: Directory, age_s: float) -> str:
    if directory.from_disk:
        return f"from disk, {age_s:.0f} s old"
    return "ok" if directory.loaded else directory.disk_note or "loading"


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
            "config": _config_part(directory, age_s),
            "postgres": "ok" if directory.loaded and fresh and not directory.from_disk else "away",
            "valkey": "ok" if self._admission.ready else "away",
            "spool": spool_part(gateway.spool),
            "process": "draining" if gateway.draining else "ok",
        }
        serving = directory.loaded and not gateway.spool.refuses(Tier.PRIORITY) and not gateway.draining
        return Report(serving, parts)

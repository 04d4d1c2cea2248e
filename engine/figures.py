"""What an engine says of itself at ``/metrics``: one reading, whatever the engine. Parsing is pure.

Sources: vLLM's production metrics (``vllm:…``), llama.cpp's server (``llamacpp:…``). Only the lines that are needed are
parsed: a page has thousands, and reading all of them each second is what made others run out of memory.
"""

import asyncio
from collections.abc import Iterable

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from engine.health import connector

PAGE_BYTES_MAX = 4 * 1024 * 1024
_RUNNING = ("vllm:num_requests_running", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "llamacpp:requests_deferred")
_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio")
_PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
_ITL_SUM = ("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum")
_ITL_COUNT = ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count")
_WANTED = tuple(name for names in (_RUNNING, _WAITING, _KV_USED, _PREEMPTIONS, _ITL_SUM, _ITL_COUNT) for name in names)


class EngineFigures(msgspec.Struct, frozen=True):
    """One reading of one engine. Counters count since it started."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0  # part of its KV memory, 0 to 1; mean over its ranks
    preemptions: int = 0
    itl_sum_s: float = 0.0  # time between tokens, summed
    itl_count: int = 0


def parse(page: str) -> EngineFigures:
    """Return what the page says; what it does not say is 0. Ranks of one engine are summed.

    Raises:
        ValueError: a wanted line is no metric.
    """
    lines = "\n".join(line for line in page.splitlines() if line.startswith(_WANTED))
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)

    def of(names: Iterable[str]) -> list[float]:
        return next((found[name] for name in names if name in found), [])

    kv = of(_KV_USED)
    return EngineFigures(
        running=int(sum(of(_RUNNING))),
        waiting=int(sum(of(_WAITING))),
        kv_used=min(1.0, max(0.0, sum(kv) / len(kv))) if kv else 0.0,
        preemptions=int(sum(of(_PREEMPTIONS))),
        itl_sum_s=sum(of(_ITL_SUM)),
        itl_count=int(sum(of(_ITL_COUNT))),
    )


async def read(url: str, *, timeout_s: float) -> EngineFigures | None:
    """Ask one engine (``http://…`` or ``unix:/path``); None when it does not answer in time, or with nonsense."""
    transport, base = connector(url)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(connector=transport, timeout=timeout) as session,
            session.get(f"{base}/metrics", allow_redirects=False) as response,
        ):
            if response.status != 200:
                return None
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > PAGE_BYTES_MAX:
                    return None
            return parse(page.decode("utf-8", "replace"))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None

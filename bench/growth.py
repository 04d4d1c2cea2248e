"""How the scripts grow with the number of tenants: `python -m bench.growth`. A Valkey of its own, append-only file on.

Each caller asks once, then the next one does, so that what a call looks at is as cold as so many callers make it.
Acquires and releases come in batches apart, many in one write; of each batch the median time of a call inside the
server is read: time and not CPU, so on a busy machine it is what was not interrupted. The last column is CPU, sockets
and file included.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import uvloop

from bench import machine
from bench.admission import SETS, Bench
from cli.embedded import valkey as vk
from core.resp import RespClient

BATCH = 256
PERCENTILE = "latency_percentiles_usec_fcall:p50="


async def _median_us(own: RespClient) -> float:
    """Return the median of the calls since the last time."""
    found = (await own.call("INFO", "latencystats")).decode()
    await own.call("CONFIG", "RESETSTAT")
    return float(found.partition(PERCENTILE)[2].partition(",")[0])


async def measure(url: str, valkey_pid: int, limits: str, tenants: int, batches: int) -> tuple[float, float, float]:
    """Return the medians of acquire and release, and the CPU of a pair, in µs."""
    client, own = await RespClient.connect(url), await RespClient.connect(url)
    bench = Bench(client, own, SETS[limits])
    await bench.start(tenants, keys_of_tenant=1)
    acquire_us, release_us, cpu_s = [], [], 0.0
    for batch in range(2 * (tenants // BATCH + 1) + batches):
        await own.call("CONFIG", "RESETSTAT")
        before = machine.cpu_s([valkey_pid])
        grants = await bench.acquire(BATCH)
        acquired = await _median_us(own)
        await bench.release(grants)
        released = await _median_us(own)
        if batch >= 2 * (tenants // BATCH + 1):  # each caller has been here twice
            acquire_us.append(acquired)
            release_us.append(released)
            cpu_s += machine.cpu_s([valkey_pid]) - before
        await bench.post()
    await bench.admission.close()
    await client.close()
    await own.close()
    return statistics.median(acquire_us), statistics.median(release_us), cpu_s / batches / BATCH * 1e6


def _print_row(options: argparse.Namespace, tenants: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tg-bench-", dir="/tmp"))
    process = vk.start(folder, folder / "v.sock")
    try:
        vk.wait_ready(folder, folder / "v.sock", lambda: process.poll() is None)
        arguments = (f"unix://{folder / 'v.sock'}", process.pid, options.limits, tenants, options.batches)
        acquire_us, release_us, cpu_us = uvloop.run(measure(*arguments))
        print(f"| {tenants:,} | {acquire_us:.1f} | {release_us:.1f} | {cpu_us:.1f} |", flush=True)
    finally:
        vk.stop(process)
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--limits", default="usual", choices=list(SETS))
    options = parser.parse_args()
    print("| tenants | acquire p50 µs | release p50 µs | Valkey CPU µs a pair |\n|---|---|---|---|")
    for tenants in options.tenants:
        _print_row(options, tenants)


if __name__ == "__main__":
    main()

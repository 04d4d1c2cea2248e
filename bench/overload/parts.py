"""What is shown of real gateways under overload. Each part is bounded to five minutes and says what it saw as data."""

import asyncio
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from bench.overload import drive
from bench.overload.rig import Rig, platform
from core.clock import SystemClock
from core.resp import RespClient
from knative import publisher
from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.scraper import Scraper

Figures = dict[str, Any]
SHOWN = (
    *("goodput_tok_s", "value_goodput_s", "raw_tok_s", "in_slo_priority", "in_slo_standard", "in_slo_batch"),
    *("wasted_tok_s", "retries", "recovery_s", "client_late_p99_s", "in_flight_max"),
)


def _scored(rig: Rig, wanted: Any, outcomes: Any, sampled: dict[str, list[float]]) -> Figures:
    found = drive.score(rig, wanted, outcomes)
    shown: Figures = {name: found.get(name) for name in SHOWN}
    waiting = sampled["waiting"] or [0.0]
    return shown | {
        "results": found["results"],
        "refusals": found["refusals"],
        "engine_lag_s": max(sampled["lag"], default=None),
        "engine_waiting_max": max(waiting),
        "engine_waiting_p99": sorted(waiting)[int(0.99 * (len(waiting) - 1))],
        "gateways_rss_mb": [round(sampled["rss_mb"][0]), round(sampled["rss_mb"][-1])],
    }


def load(args: Namespace) -> Iterator[Figures]:
    """Open loop at each scale; `--only priority` for what that tier gets when it is alone."""
    for scale in map(float, args.scales.split(",")):
        with platform(args.yardsticks) as rig:
            options = ("--scale", str(scale), "--seed", str(args.seed), "--seconds", str(args.seconds))
            wanted = drive.schedule(rig, *options, only=args.only)
            outcomes, sampled = drive.drive(rig, wanted)
            yield {"scale": scale, "only": args.only} | _scored(rig, wanted, outcomes, sampled)


def burst(args: Namespace) -> Iterator[Figures]:
    """Five times the load for a while, on a load that nearly fills the engine."""
    start, length = args.seconds * 0.4, args.seconds * 0.15
    with platform(args.yardsticks) as rig:
        options = ("--scale", "0.9", "--seed", str(args.seed), "--seconds", str(args.seconds))
        wanted = drive.schedule(rig, *options, "--burst", f"{start // 10 * 10:.0f}:{length // 10 * 10:.0f}:5")
        outcomes, sampled = drive.drive(rig, wanted, drain_s=30)
        yield _scored(rig, wanted, outcomes, sampled)


def flood(args: Namespace) -> Iterator[Figures]:
    """Twelve times as much batch in the second half."""
    half = args.seconds / 2
    with platform(args.yardsticks) as rig:
        wanted = drive.schedule(rig, "--scale", "0.9", "--seed", str(args.seed), "--seconds", str(args.seconds))
        meta, rows = drive.read(wanted)
        late = [row for row in rows if row["tier"] == "batch" and row["time_s"] >= half]
        more = [
            {**row, "id": f"{row['id']}x{n}", "time_s": row["time_s"] + n / 3} for row in late for n in range(1, 12)
        ]
        drive.write(wanted, meta, sorted(rows + more, key=lambda row: row["time_s"]))
        outcomes, sampled = drive.drive(rig, wanted)
        before, calm = drive.first_tokens(wanted, outcomes, "priority", 10, half)
        after, flooded = drive.first_tokens(wanted, outcomes, "priority", half, args.seconds)
        yield _scored(rig, wanted, outcomes, sampled) | {
            "priority_answered": [calm, flooded],
            "priority_ttft_p95_s": [before, after],
            "ttft_p95_changed": after / before - 1,
        }


def hole(args: Namespace) -> Iterator[Figures]:
    """Three replicas; from the middle on one of them takes connections and says nothing, to anybody."""
    half = args.seconds / 2
    with platform(args.yardsticks, count=3) as rig, _published(rig):
        wanted = drive.schedule(rig, "--scale", "1.5", "--seed", str(args.seed), "--seconds", str(args.seconds))
        stopped = rig.engines[1].process
        outcomes, sampled = drive.drive(rig, wanted, at=[(half, lambda: stopped.send_signal(signal.SIGSTOP))])
        found: Figures = {}
        for tier in ("priority", "standard"):
            before, answered = drive.first_tokens(wanted, outcomes, tier, 10, half)
            after, later = drive.first_tokens(wanted, outcomes, tier, half, args.seconds)
            found[f"{tier}_ttft_p95_s"], found[f"{tier}_answered"] = [before, after], [answered, later]
            found[f"{tier}_ttft_p95_changed"] = after / before - 1
        yield _scored(rig, wanted, outcomes, sampled) | found


@contextmanager
def _published(rig: Rig) -> Iterator[None]:
    """Say that the engines are replicas of one deployment and read their figures, as the controller's processes do.

    The controller itself starts one engine a deployment; gateways, router and scraper know several.
    """
    import threading

    stop, ready = threading.Event(), threading.Event()

    async def run() -> None:
        client = await RespClient.connect(rig.environment["TIDEGATE_VALKEY__URL"])
        endpoints = tuple(Endpoint(f"r{n}", engine.url) for n, engine in enumerate(rig.engines))
        await publisher.publish(client, DeploymentState(rig.deployment, ReplicaState.READY, endpoints, epoch=1))
        scraper = Scraper(client, holder="bench", clock=SystemClock(), seats=256, registry=CollectorRegistry())
        reading = asyncio.create_task(scraper.run())
        ready.set()
        await asyncio.to_thread(stop.wait)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.close()

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    ready.wait(10)
    time.sleep(0.5)  # until every gateway has seen it
    try:
        yield
    finally:
        stop.set()
        thread.join()


def spike(args: Namespace) -> Iterator[Figures]:
    """Five hundred at once: on an engine that nobody has called yet, and again when its figures are known."""
    with platform(args.yardsticks) as rig:
        sizes = drive.read(drive.schedule(rig, "--scale", "1", "--seed", str(args.seed), "--seconds", "120"))[1]
        meta, calm = drive.read(drive.schedule(rig, "--scale", "0.9", "--seed", str(args.seed), "--seconds", "60"))
        for name, before in (("cold", []), ("warm", calm)):
            at = 60.0 if before else 1.0
            rows = [
                {**sizes[n % len(sizes)], "id": f"s{n}", "time_s": at + n / 2500, "tier": "standard", "retry": None}
                for n in range(500)
            ]
            wanted = drive.write(rig.folder / f"{name}.jsonl", {**meta, "seconds": at + 30}, [*before, *rows])
            outcomes, sampled = drive.drive(rig, wanted)
            yield {"figures": name} | _scored(rig, wanted, outcomes, sampled)


def streams(args: Namespace) -> Iterator[Figures]:
    """Two thousand streams that speak once a second, over and over: what the gateways hold does not grow."""
    seats = {"TIDEGATE_CONTROLLER__SEATS_PER_ENGINE": "4096"}
    options = (
        "--a",
        "1.0",
        "--b",
        "0",
        "--c",
        "0",
        "--kv-tokens",
        "10000000",
        "--max-seqs",
        "4096",
        "--chunk",
        "1000000",
    )
    rounds, tokens, every_s = 4, 40, 55.0
    with platform(args.yardsticks, engine_options=options, settings=seats) as rig:
        meta, rows = drive.read(drive.schedule(rig, "--scale", "1", "--seconds", "300"))
        one = {**rows[0], "tier": "priority", "prompt_tokens": 30, "output_tokens": tokens, "max_tokens": 64}
        asked = [
            {
                **one,
                "id": f"s{turn}-{n}",
                "time_s": turn * every_s + n / 200,
                "tenant": f"t{n % 20:02}",
                "timeout_s": 30,
            }
            for turn in range(rounds)
            for n in range(2000)
        ]
        wanted = drive.write(rig.folder / "streams.jsonl", {**meta, "seconds": rounds * every_s}, asked)
        outcomes, sampled = drive.drive(rig, wanted)
        rss, part = sampled["rss_mb"], len(sampled["rss_mb"]) // rounds
        yield _scored(rig, wanted, outcomes, sampled) | {
            "gateways_rss_mb_by_round": [round(max(rss[n * part : (n + 1) * part])) for n in range(rounds)]
        }


PARTS = {part.__name__: part for part in (load, burst, flood, hole, spike, streams)}

"""An OpenAI-compatible engine that computes nothing: for tests, load and a laptop without a model.

``python -m engine.simulator --uds /path.sock`` or ``--port N``. What it answers is decided by `engine.simulation`;
what it really generated for each request goes to its own log (``--log F``, one JSON object a line, never any text), so
that a bill can be compared with it. Faults can also be set for the whole process by ``POST /sim/defaults``.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
from aiohttp import web

from core.clock import Clock, SystemClock
from engine import simulation
from engine.simulation import Plan
from engine.simulator_answers import Answer, completion_body, embedding_body, stream_events

BODY_MAX_BYTES = 32_000_000
STALL_MAX_S = 3600.0
DONE = b"data: [DONE]"
STATUS_OF_FAULT = {"refuse": 500, "busy": 503}


class Options(msgspec.Struct, frozen=True):
    """How the process behaves when a request does not say otherwise."""

    plan: Plan = Plan()
    dialect: str = "openai"
    models: tuple[str, ...] = ("sim",)
    slots: int = 1024  # requests that generate at once; the others wait
    prefill_us: int = 0  # added to the first token for each uncached prompt token
    crowd_permille: int = 0  # each other running request makes the time between tokens so much longer
    load_ms: int = 0  # time until /health says ok
    log: str = ""
    fsync: bool = False


class Simulator:
    """Counters, seats and the log of one simulated engine."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self.options = options
        self.clock = clock
        self.plan = options.plan
        self.seats = asyncio.Semaphore(options.slots)
        self.running = self.waiting = self.sequence = 0
        self.prompt_total = self.generated_total = self.aborted_total = 0
        self.ready_at = clock.monotonic() + options.load_ms / 1000
        self._log = os.open(options.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if options.log else -1

    def record(self, answer: Answer, ended: str) -> None:
        """Append what was generated, once; one write, so that lines of several processes never mix."""
        if answer.recorded:
            return
        answer.recorded = True
        self.prompt_total += answer.generation.prompt_tokens
        self.generated_total += answer.generated
        self.aborted_total += ended == "aborted"
        if self._log < 0:
            return
        line = {
            "request_id": answer.request_id,
            "endpoint": answer.endpoint,
            "stream": answer.stream,
            "prompt_tokens": answer.generation.prompt_tokens,
            "cached_tokens": answer.generation.cached_tokens,
            "generated": answer.generated,
            "reasoning": min(answer.generation.reasoning_tokens * answer.generation.choices, answer.generated),
            "ended": ended,
            "ended_us": self.clock.now_us(),
            "pid": os.getpid(),
            "fields": answer.fields,
        }
        os.write(self._log, orjson.dumps(line) + b"\n")
        if self.options.fsync:
            os.fsync(self._log)

    async def take_seat(self) -> None:
        self.waiting += 1
        try:
            await self.seats.acquire()
        finally:
            self.waiting -= 1
        self.running += 1

    def leave_seat(self) -> None:
        self.running -= 1
        self.seats.release()

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)

    def gap_s(self, plan: Plan) -> float:
        """Return the time between two tokens with this many neighbours."""
        return plan.d / 1e6 * (1 + self.options.crowd_permille / 1000 * max(self.running - 1, 0))


SIMULATOR = web.AppKey("simulator", Simulator)


def error_response(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)


async def handle_generate(request: web.Request) -> web.StreamResponse:
    """Chat and text completions, streaming or not."""
    sim = request.app[SIMULATOR]
    try:
        body = orjson.loads(await request.read())
        generation = simulation.plan_generation(sim.plan, body)
    except (ValueError, TypeError, AttributeError) as problem:
        return error_response(400, f"The simulator cannot read this request: {problem}")
    sim.sequence += 1
    answer = Answer.of(request, body, generation, sim.sequence, sim.options.dialect)
    ended = "aborted"
    try:
        await sim.take_seat()
        try:
            response, ended = await generate(sim, request, answer)
        finally:
            sim.leave_seat()
        return response
    finally:
        sim.record(answer, ended)


async def generate(sim: Simulator, request: web.Request, answer: Answer) -> tuple[web.StreamResponse, str]:
    """Answer one seated request; returns the response and how it ended."""
    plan = answer.generation.plan
    if plan.fault in STATUS_OF_FAULT:
        return error_response(STATUS_OF_FAULT[plan.fault], "The simulator was told to fail."), "refused"
    if plan.fault == "close":
        cut(request)
        return web.Response(), "refused"
    if plan.fault == "garbage":
        return web.Response(body=b'{"choices":[', content_type="application/json"), "died"
    uncached = answer.generation.prompt_tokens - answer.generation.cached_tokens
    await pause((plan.t + uncached * sim.options.prefill_us) / 1e6)
    if answer.stream:
        return await stream(sim, request, answer)
    return await buffered(sim, request, answer)


async def buffered(sim: Simulator, request: web.Request, answer: Answer) -> tuple[web.StreamResponse, str]:
    generation = answer.generation
    for index in range(generation.tokens):
        if generation.plan.fault and index == generation.plan.at:
            await fail_midway(request, generation.plan)
            return error_response(500, "The simulator was told to fail."), "died"
        if index:
            await pause(sim.gap_s(generation.plan))
        answer.generated += generation.choices
    return web.json_response(body=orjson.dumps(completion_body(answer))), "completed"


async def stream(sim: Simulator, request: web.Request, answer: Answer) -> tuple[web.StreamResponse, str]:
    """Write the events of a streamed answer, one token of each choice at a time."""
    plan = answer.generation.plan
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if answer.request_id:
        response.headers["x-request-id"] = answer.request_id
    await response.prepare(request)
    step = 0
    for event, tokens in stream_events(answer):
        if tokens:
            if plan.fault and step == plan.at:
                if plan.fault == "error":
                    await response.write(simulation.encode_event({"error": {"message": "told to fail"}}, plan))
                    return response, "died"
                await fail_midway(request, plan)
                return response, "died"
            if step:
                await pause(sim.gap_s(plan))
            step += 1
            answer.generated += tokens
        if event.startswith(DONE):
            sim.record(answer, "completed")  # before anybody hears of it: whoever is killed now has said all of it
        for piece in simulation.pieces(event, plan.split):
            await response.write(piece)
            if plan.split:
                await asyncio.sleep(0)
    await response.write_eof()
    return response, "completed"


async def pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


async def fail_midway(request: web.Request, plan: Plan) -> None:
    """End the answer the bad way the plan names."""
    if plan.fault == "exit":
        os._exit(9)
    if plan.fault == "stall":
        await asyncio.sleep(STALL_MAX_S)
    cut(request)


def cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def handle_embeddings(request: web.Request) -> web.StreamResponse:
    sim = request.app[SIMULATOR]
    try:
        body = orjson.loads(await request.read())
        generation = simulation.plan_generation(sim.plan, body)
    except (ValueError, TypeError, AttributeError) as problem:
        return error_response(400, f"The simulator cannot read this request: {problem}")
    sim.sequence += 1
    answer = Answer.of(request, body, generation, sim.sequence, sim.options.dialect)
    if generation.plan.fault in STATUS_OF_FAULT:
        sim.record(answer, "refused")
        return error_response(STATUS_OF_FAULT[generation.plan.fault], "The simulator was told to fail.")
    await pause(generation.plan.t / 1e6)
    sim.record(answer, "completed")
    return web.json_response(body=orjson.dumps(embedding_body(answer, body)))


async def handle_tokenize(request: web.Request) -> web.StreamResponse:
    """The shapes of vLLM and llama.cpp at once: `tokens`, `count`, `max_model_len`."""
    body: Mapping[str, Any] = orjson.loads(await request.read())
    texts = simulation.prompt_texts(body) if "messages" in body else [str(body.get("prompt", body.get("content", "")))]
    count = sum(simulation.count_tokens(text) + (4 if "messages" in body else 0) for text in texts)
    return web.json_response({"tokens": list(range(count)), "count": count, "max_model_len": 32768})


async def handle_models(request: web.Request) -> web.StreamResponse:
    models = request.app[SIMULATOR].options.models
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "simulator"} for name in models]
    return web.json_response({"object": "list", "data": data})


async def handle_health(request: web.Request) -> web.StreamResponse:
    sim = request.app[SIMULATOR]
    if sim.clock.monotonic() < sim.ready_at:
        return error_response(503, "Loading.")
    return web.json_response({"status": "ok"})


async def handle_metrics(request: web.Request) -> web.StreamResponse:
    """The names of vLLM, which the scraper reads."""
    sim = request.app[SIMULATOR]
    values = {
        "vllm:num_requests_running": ("gauge", sim.running),
        "vllm:num_requests_waiting": ("gauge", sim.waiting),
        "vllm:prompt_tokens_total": ("counter", sim.prompt_total),
        "vllm:generation_tokens_total": ("counter", sim.generated_total),
        "sim:requests_aborted_total": ("counter", sim.aborted_total),
        "sim:requests_total": ("counter", sim.sequence),
    }
    lines = [f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in values.items()]
    return web.Response(text="".join(lines))


async def handle_defaults(request: web.Request) -> web.StreamResponse:
    """Change the plan of requests that do not steer themselves: a JSON object of `Plan` fields, {} resets it."""
    sim = request.app[SIMULATOR]
    values = orjson.loads(await request.read())
    sim.plan = msgspec.convert({**msgspec.to_builtins(sim.plan), **values}, Plan) if values else sim.options.plan
    return web.json_response(msgspec.to_builtins(sim.plan))


def create_app(options: Options, clock: Clock) -> web.Application:
    app = web.Application(client_max_size=BODY_MAX_BYTES)
    app[SIMULATOR] = sim = Simulator(options, clock)

    async def close_log(_: web.Application) -> None:
        sim.close()

    app.on_cleanup.append(close_log)
    app.router.add_post("/v1/chat/completions", handle_generate)
    app.router.add_post("/v1/completions", handle_generate)
    app.router.add_post("/v1/embeddings", handle_embeddings)
    app.router.add_post("/tokenize", handle_tokenize)
    app.router.add_get("/v1/models", handle_models)
    app.router.add_get("/health", handle_health)
    app.router.add_get("/metrics", handle_metrics)
    app.router.add_post("/sim/defaults", handle_defaults)
    return app


async def serve(
    options: Options, clock: Clock, *, uds: str = "", host: str = "127.0.0.1", port: int = 0
) -> web.AppRunner:
    """Start serving and return the runner; `await runner.cleanup()` ends it. Its address is in `runner.addresses`."""
    app = create_app(options, clock)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site: web.BaseSite = (
        web.UnixSite(runner, uds, backlog=4096) if uds else web.TCPSite(runner, host, port, backlog=4096)
    )
    await site.start()
    return runner


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, str, int, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m engine.simulator", description=__doc__)
    parser.add_argument("--uds", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--dialect", choices=("openai", "vllm", "llama.cpp"), default="openai")
    parser.add_argument("--plan", default="", help="defaults, e.g. 'n=64 t=20000 d=10000'")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--prefill-us", type=int, default=0)
    parser.add_argument("--crowd-permille", type=int, default=0)
    parser.add_argument("--load-ms", type=int, default=0)
    parser.add_argument("--log", default="")
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--lock", default="", help="the lock it holds, to be found by")
    parser.add_argument("--ready-file", type=Path)
    given = parser.parse_args(arguments)
    plan = simulation.parse_plan(Plan(), "", f"[[sim {given.plan}]]") if given.plan else Plan()
    options = Options(
        plan=plan,
        dialect=given.dialect,
        models=tuple(given.model) or ("sim",),
        slots=given.slots,
        prefill_us=given.prefill_us,
        crowd_permille=given.crowd_permille,
        load_ms=given.load_ms,
        log=given.log,
        fsync=given.fsync,
    )
    return options, given.uds, given.port, given.ready_file


async def main(arguments: list[str] | None = None) -> None:
    options, uds, port, ready_file = parse_arguments(arguments)
    runner = await serve(options, SystemClock(), uds=uds, port=port)
    address = runner.addresses[0]
    url = f"unix:{address}" if uds else f"http://{address[0]}:{address[1]}"
    if ready_file is not None:
        partial = ready_file.with_suffix(".partial")
        partial.write_text(url, encoding="utf-8")
        partial.replace(ready_file)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())

"""llama.cpp's HTTP server in a process of its own: ``python -m engine.llama_server --model F --listen A``.

It imports nothing of the platform, so that it starts in about a second. `--listen` is a unix socket's path (ending in
``.sock``) or ``host:port``. SIGTERM ends it at once: the controller drains before it sends one.
"""

import argparse
import os
import signal
from types import FrameType
from typing import Any


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.llama_server", description=__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--alias", required=True, help="the model's name in answers")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens per slot")
    parser.add_argument("--lock", default="", help="the lock it holds, to be found by")
    parser.add_argument("--parallel", type=int, default=4, help="slots: requests at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", choices=("q8_0", "f16"), default="q8_0", help="how the KV cache is kept")
    parser.add_argument("--embeddings", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def parameters(given: argparse.Namespace) -> Any:
    """Return xllamacpp's `CommonParams` for the arguments."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.n_ctx = given.context * given.parallel
    params.n_parallel = given.parallel
    params.cpuparams.n_threads = given.threads
    params.cpuparams_batch.n_threads = given.threads
    params.n_threads_http = given.parallel + 4  # streams hold a thread each; the rest answer /health
    if given.cache == "q8_0":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    params.embedding = given.embeddings
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.endpoint_metrics = True
    params.endpoint_slots = False  # it would show prompts
    params.endpoint_props = False
    params.ui = False
    params.warmup = False
    params.cache_ram_mib = 0  # prefixes are kept in the slots only: the process stays small
    params.cors_origins = ""  # no browser page may talk to it
    params.n_batch = params.n_ubatch  # what embeddings allow
    params.verbosity = 1  # errors only; never a prompt
    host, separator, port = given.listen.rpartition(":")
    if given.listen.endswith(".sock") or not separator:
        params.hostnames = [given.listen]
    else:
        params.hostnames, params.port = [host], int(port)
    return params


def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal handler's signature
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    given = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, end)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import xllamacpp

    server = xllamacpp.Server(parameters(given))
    while server is not None:
        signal.pause()


if __name__ == "__main__":
    main()

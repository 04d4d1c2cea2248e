"""llama.cpp's HTTP server in a process of its own: ``python -m engine.llama_server --model F --host A …``.

Its options are those of llama.cpp's own ``llama-server`` that `engine.arguments.llama_cpp` writes, and two of ours. It
imports nothing of the platform, so that it starts in about a second. `--host` is an address or a unix socket's path
(ending in ``.sock``). SIGTERM ends it at once: the controller drains before it sends one.
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
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ctx-size", type=int, required=True, help="tokens of all slots together")
    parser.add_argument("--parallel", type=int, default=4, help="slots: requests at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-type-k", choices=("q8_0", "f16"), default="q8_0", help="how the KV cache is kept")
    parser.add_argument("--cache-type-v", choices=("q8_0", "f16"), default="q8_0")
    parser.add_argument("--cache-reuse", type=int, default=0)
    parser.add_argument("--n-gpu-layers", type=int, default=0)
    for given in ("--metrics", "--no-slots", "--no-webui"):
        parser.add_argument(given, action="store_true", help="always so")
    parser.add_argument(
        "--embeddings", action=argparse.BooleanOptionalAction, default=True, help="ours: also embeddings"
    )
    parser.add_argument("--lock", default="", help="ours: the lock it holds, to be found by")
    return parser.parse_args(arguments)


def parameters(given: argparse.Namespace) -> Any:
    """Return xllamacpp's `CommonParams` for the arguments."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.n_ctx = given.ctx_size
    params.n_parallel = given.parallel
    params.cpuparams.n_threads = given.threads
    params.cpuparams_batch.n_threads = given.threads
    params.n_threads_http = given.parallel + 4  # streams hold a thread each; the rest answer /health
    if given.cache_type_k == "q8_0":
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    if given.cache_type_v == "q8_0":
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    if given.cache_reuse:
        params.n_cache_reuse = given.cache_reuse
    if given.n_gpu_layers:
        params.n_gpu_layers = given.n_gpu_layers
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
    params.hostnames = [given.host]
    if given.port:
        params.port = given.port
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

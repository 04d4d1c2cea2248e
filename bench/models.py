"""The models of the simulated engine. A name says how it answers: n chunks, d µs between two, t µs to the first."""

UPSTREAM_PORT = 9100  # where BENCH_DIR's simulator and its other gateways expect it

PLAIN = "sim"  # buffered answers at once; as a stream 16 chunks at once
BURST = "sim-n64"  # 64 chunks without delay, each one send()
PACED = "sim-n32-d10000-t20000"  # what BENCH_DIR's run asks for
SINGLY = "sim-n500-d10000"  # 100 chunks/s of a stream, so that each arrives alone
CHAT = "sim-n300-d50000"  # 20 tokens/s for 15 s, as a person reads
MODELS = (PLAIN, BURST, PACED, SINGLY, CHAT)

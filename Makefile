# The commands of this project; each makes the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install train test test-all parity bench lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ".[dev,tensorboard,sweeps]"
	touch $(STAMP)

train: install
	$(BIN)/python train.py experiment=quickstart $(ARGS)

test: install lint
	$(BIN)/python -m pytest $(ARGS)

test-all: install lint
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

parity: install
	$(BIN)/python scripts/parity.py

bench: install
	$(BIN)/python scripts/bench.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache

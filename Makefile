# The commands of this project; each makes the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS ?= --constraint constraints.txt # empty: the newest versions that pyproject.toml allows

.PHONY: install train doctor test test-all test-libraries parity dry-gpu bench gpu-check pictures docs mutations lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml engine/pyproject.toml constraints.txt
	@echo "Installing PyTorch and the other packages in $(VENV), once: this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) \
		--editable ./engine ".[dev,tensorboard,sweeps,report,dashboard]"
	touch $(STAMP)

train: install
	$(BIN)/python train.py experiment=quickstart $(ARGS)

# Checks of this machine for a run: ARGS="strategy=ddp trainer.devices=4"
doctor: install
	$(BIN)/python train.py doctor=true $(ARGS)

# Some minutes: what every change waits for. Two processes take the test files in turn, each with one thread.
test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# About an hour: every strategy, schedule and documented command. ARGS=tests/engine/parity runs a part.
test-all: install lint
	$(BIN)/python -m pytest -m "" $(ARGS)

# Other people's libraries. timm and litdata ask for torchvision, which would replace torch, and come without it.
test-libraries: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ./engine ".[hf]" boto3 obstore tifffile transformers monai
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps litdata timm
	$(BIN)/python -m pytest -m "" tests/engine/data/test_streaming_libraries.py tests/engine/run/test_libraries.py

parity: install
	$(BIN)/python -m engine.dev.parity

# The CUDA code path on a machine without a GPU. ARGS=--write keeps the new numbers of operations.
dry-gpu: install
	$(BIN)/python -m engine.dev.dry_gpu $(ARGS)

bench: install
	$(BIN)/python -m engine.dev.bench $(ARGS)

# On a machine with GPUs, some ten minutes: writes docs/benchmarks/gpu.md.
gpu-check: install
	$(BIN)/python -m engine.dev.gpu_check $(ARGS)

# The pictures of the docs, in some minutes; needs Chromium or Chrome. ARGS="--only schedules" makes one.
pictures: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable ./engine ".[pictures]"
	$(BIN)/python -m engine.dev.pictures $(ARGS)

# The pages of docs/ as a site with a search and the API, in site/; a broken link or anchor is an error.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable ./engine ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Small changes of pure logic that no unit test notices, in ten minutes: writes docs/benchmarks/mutations.md.
# ARGS=engine/onecurve/observe/steps.py examines one file.
mutations: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) ".[mutations]"
	OMP_NUM_THREADS=1 $(BIN)/python -m engine.dev.mutations $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache

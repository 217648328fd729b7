# Outrider: `make demo` and `make test` do all their own set-up; `make env` alone makes .venv.
# torch comes first and alone: a plain `pip install torch` brings a CUDA build of several GB. Elsewhere pick a build
# with PyTorch's install selector and pass its version, e.g. `make env TORCH=2.13.0`.
TORCH ?= 2.13.0
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on
# Warnings about the local pip configuration say nothing about this project. pipefail keeps pip's own exit code.
QUIET := 2>&1 | { grep -v -e "^WARNING: Location " -e "^Requirement already satisfied" -e "^Looking in " || true; }
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.PHONY: help env model demo test check clean

help:
	@echo "make demo   environment, SmolLM2-135M, and plain decoding against every method on real prompts"
	@echo "make test   environment, model, and every test"
	@echo "make check  format, lint, types, import contract, tests"
	@echo "make env    .venv only"

env: .venv/ready

.venv/ready: pyproject.toml zoo/pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "installing torch $(TORCH)"
	@$(PIP) "torch==$(TORCH)" $(QUIET)
	@echo "installing outrider and its tools"
	@$(PIP) -e ".[dev]" -e ./zoo $(QUIET)
	@$(BIN)/outrider --help > /dev/null
	@touch $@

model: env
	@$(BIN)/outrider models pull smollm2

NGRAM := {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}

TRAINED := $(foreach method,mtp gemma4_mtp eagle3 dflash dspark,--also '{"method": "$(method)"}')

demo: model
	$(BIN)/outrider generate smollm2 "Why is the sky blue?" --spec-method eagle3 --max-tokens 96
	$(BIN)/outrider bench smollm2 --speculative-config '$(NGRAM)' $(TRAINED) --dataset mixed --num-prompts 12 \
		--max-tokens 128 --repeats 2

test: model
	$(BIN)/python -m pytest

check: model
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

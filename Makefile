# Every target works in .venv, which is created and filled from constraints.txt when needed.
# A stamp inside .venv remembers what is installed, so that a second run starts at once.

PYTHON ?= python3
THREADS ?= 2
WORKERS ?= 2
SECONDS ?= 1800
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
# torch with its exact version in the same command: pip then never looks at other builds of it.
TORCH := $(shell grep -m1 '^torch==' constraints.txt)

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-oldest soak check format bench clean

help:  ## print the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Paceline and its pinned dependencies into $(VENV) (once; some minutes)"
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf,test]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) "$(TORCH)" -e ".[gguf,test,dev]"
	@touch $@

install: $(VENV)/.installed  ## create .venv and install the pinned versions

demo: $(VENV)/.installed  ## watch plain and speculative decoding of a real model (fetched once, 93 MB)
	@$(BIN)/paceline demo --pull $(ARGS)

test: $(VENV)/.installed-test  ## run the whole test suite (WORKERS=2 processes, a thread each)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

# A virtual environment of its own, with the oldest versions that pyproject.toml allows.
OLDEST := .venv-oldest

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check -q -c constraints-oldest.txt \
		"$(shell grep -m1 '^torch==' constraints-oldest.txt)" -e ".[test]"
	@touch $@

test-oldest: $(OLDEST)/.installed  ## the same with the oldest versions allowed, in .venv-oldest
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

soak: $(VENV)/.installed-test  ## serve under hostile load (SECONDS=1800, MODEL=folder, ARGS=--help)
	OMP_NUM_THREADS=$(THREADS) PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(BIN)/python -m soak --seconds $(SECONDS) $(if $(MODEL),--model $(MODEL)) $(ARGS)

check: $(VENV)/.installed-dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

format: $(VENV)/.installed-dev  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed  ## measure decoding beside transformers (ARGS=--quick for minutes)
	$(BIN)/python benchmarks/decoding.py $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis

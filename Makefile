# `make demo` and `make test` set up the virtual environment they share, .venv, the first time they run.
#
# PYTHON  the interpreter it is made with, 3.11 or newer
# TORCH   what pip is asked for as torch; a CPU build is enough (README.md says how to name one)
# ARGS    arguments of the demo, e.g. ARGS="--json FILE"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
ENVIRONMENT := integration_tests/environment
LISTS := $(ENVIRONMENT)/requirements.txt $(ENVIRONMENT)/packages.txt $(ENVIRONMENT)/vllm_metadata.py

.PHONY: demo test clean

demo: $(VENV)/serving
	$(BIN)/python -m integration_tests.demo $(ARGS)

test: $(VENV)/serving $(VENV)/development
	$(BIN)/python -m pytest tests integration_tests --ignore=integration_tests/gpu

clean:
	rm -rf $(VENV) build

# The files below are stamps: pip runs again only when a list of packages has changed.

$(VENV)/torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnloom needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/serving: $(VENV)/torch $(LISTS) pyproject.toml
	$(PIP) -r $(ENVIRONMENT)/requirements.txt
	$(PIP) --no-deps -r $(ENVIRONMENT)/packages.txt
	$(PIP) --editable .
	$(BIN)/python $(ENVIRONMENT)/vllm_metadata.py
	touch $@

$(VENV)/development: $(VENV)/torch pyproject.toml
	$(PIP) --editable '.[dev]'
	touch $@

# `make demo`, `make demo-sglang` and `make test` set up the virtual environments they need the first time they run:
# .venv with vLLM and the tools of development, .venv-sglang with SGLang.
#
# PYTHON  the interpreter it is made with, 3.11 or newer
# TORCH   what pip is asked for as torch; a CPU build is enough (README.md says how to name one)
# ARGS    arguments of a demo, e.g. ARGS="--json FILE"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
SGLANG := .venv-sglang
PIP := python -m pip --disable-pip-version-check install -qq
ENVIRONMENT := integration_tests/environment
LISTS := $(ENVIRONMENT)/requirements.txt $(ENVIRONMENT)/packages.txt $(ENVIRONMENT)/vllm_metadata.py
SGLANG_LISTS := $(ENVIRONMENT)/sglang/packages.txt $(ENVIRONMENT)/sglang/requirements.txt
# Where SGLang's processes find what a machine without a GPU needs.
SGLANG_PATH := integration_tests/sglang_cpu/workarounds

.PHONY: demo demo-sglang test clean

demo: $(VENV)/serving
	$(VENV)/bin/python -m integration_tests.demo $(ARGS)

demo-sglang: $(SGLANG)/serving
	PYTHONPATH=$(SGLANG_PATH) $(SGLANG)/bin/python -m integration_tests.demo --framework sglang $(ARGS)

test: $(VENV)/serving $(VENV)/development $(SGLANG)/serving
	$(VENV)/bin/python -m pytest tests integration_tests --ignore=integration_tests/gpu --ignore=integration_tests/sglang_cpu
	$(SGLANG)/bin/python -m pytest integration_tests/sglang_cpu

clean:
	rm -rf $(VENV) $(SGLANG) build

# The files below are stamps: pip runs again only when a list of packages has changed.

$(VENV)/torch $(SGLANG)/torch: %/torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnloom needs Python 3.11 or newer")'
	$(PYTHON) -m venv $*
	$*/bin/$(PIP) $(TORCH)
	touch $@

$(VENV)/serving: $(VENV)/torch $(LISTS) pyproject.toml
	$(VENV)/bin/$(PIP) -r $(ENVIRONMENT)/requirements.txt
	$(VENV)/bin/$(PIP) --no-deps -r $(ENVIRONMENT)/packages.txt
	$(VENV)/bin/$(PIP) --editable .
	$(VENV)/bin/python $(ENVIRONMENT)/vllm_metadata.py
	touch $@

# SGLang itself comes first: what it needs must not choose another Triton. pip lists what was left out on purpose.
$(SGLANG)/serving: $(SGLANG)/torch $(SGLANG_LISTS) pyproject.toml
	$(SGLANG)/bin/$(PIP) --no-deps -r $(ENVIRONMENT)/sglang/packages.txt
	$(SGLANG)/bin/$(PIP) -r $(ENVIRONMENT)/sglang/requirements.txt
	$(SGLANG)/bin/$(PIP) --editable . pytest
	touch $@

$(VENV)/development: $(VENV)/torch pyproject.toml
	$(VENV)/bin/$(PIP) --editable '.[dev]'
	touch $@

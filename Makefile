# Everything runs in .venv, which `make env` builds from the lock file. Needs Python 3.11 or newer, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEXT_STAMP := $(VENV)/.vllm-next
# Where PyTorch publishes its CPU builds; asked only if the package index at hand has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: help env vllm-next demo test check lint types contracts unit distributed engine recall seam-table matrix lock build clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

env: $(STAMP) ## Build .venv with a CPU build of vLLM, and this package

$(STAMP): requirements/cpu.lock pyproject.toml reference/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the CPU environment (about 3.3 GB, one to three minutes) ..."
	@# --no-deps: the lock file is complete, and plain resolution would pull in CUDA builds.
	$(PIP_INSTALL) -r requirements/cpu.lock || $(PIP_INSTALL) --extra-index-url $(TORCH_INDEX) -r requirements/cpu.lock
	$(PIP_INSTALL) --no-build-isolation --editable . --editable ./reference
	@touch $(STAMP)

vllm-next: $(NEXT_STAMP) ## Get the next vLLM release's Python source, to check the seam against (downloads 336 MB)

$(NEXT_STAMP): tests/contracts/vllm_next.py | $(STAMP)
	$(BIN)/python tests/contracts/vllm_next.py
	@touch $(NEXT_STAMP)

demo: env ## Serve a small model with and without KVPP on this CPU, and compare
	$(BIN)/vllm-kvpp demo

test: check unit distributed engine ## Run every check and every test

check: lint types contracts ## Run the checks that start nothing

lint: env ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env ## Check types
	$(BIN)/mypy

contracts: env vllm-next ## Check the import arrows, the documents, and the seam against this vLLM and the next
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/contracts

unit: env ## Run the tests of single parts
	$(BIN)/python -m pytest tests/unit tests/recall tests/reference -m 'not engine'

distributed: env ## Run the tests over several processes, without an engine
	$(BIN)/python -m pytest tests/distributed

engine: env ## Run the tests on a real vLLM engine (about half an hour)
	$(BIN)/python -m pytest tests/engine tests/reference -m engine

recall: env ## Measure the recall model's accuracy, and that every layer's cache matters
	$(BIN)/python recall_model/evaluate.py --dtype float32 --dtype bfloat16
	$(BIN)/python recall_model/check_layers.py

seam-table: env ## Print the two tables of docs/vllm-seam.md
	@$(BIN)/python -c 'from vllm_kvpp.vllm_seam.symbols import describe_table; print(describe_table())'
	@echo
	@$(BIN)/python -c 'from vllm_kvpp.vllm_seam.doctor_symbols import describe_doctor_table as show; print(show())'

matrix: env ## Write the tables of docs/support-matrix.md and docs/field-cases.md anew
	PYTHONPATH=tests/matrix $(BIN)/python tests/matrix/write_tables.py

lock: env ## Resolve the CPU environment anew; needs uv
	uv pip compile pyproject.toml --group cpu --group dev --python $(BIN)/python --no-annotate --no-header \
		--override requirements/overrides.txt --output-file requirements/cpu.lock
	sed -i '1i # Every package of the CPU environment. Made by `make lock`; installed by `make env` with --no-deps.' requirements/cpu.lock

build: env ## Build the wheel
	$(BIN)/python -m build --no-isolation --wheel

clean: ## Remove the environment and everything built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

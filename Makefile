# Every target installs what it needs into .venv first; EXTRAS=cuda,test,train adds the GPU's packages.
PYTHONS := python3.13 python3.12 python3 python
EXTRAS ?= test,train
PYTHON := .venv/bin/python

.PHONY: setup demo test test-long test-gpu lint

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@for p in $(PYTHONS); do \
	  if $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
	  then found=$$p; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "inkling-jax needs Python 3.12 or newer; none of these is: $(PYTHONS)" >&2; exit 1; \
	fi; \
	$$found -m venv --clear .venv
	$(PYTHON) -m pip install --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	$(PYTHON) -m inkling_jax.cli demo

test: setup
	$(PYTHON) -m pytest -n 2 -m 'not long'

test-long: setup
	$(PYTHON) -m pytest -n 2 -m long

test-gpu: setup
	JAX_PLATFORMS=cuda,cpu $(PYTHON) -m pytest -m gpu --summary scripts/results/gpu_tests.json

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

# Every target installs what it needs into .venv first; EXTRAS=cuda,test,train adds the GPU's packages.
PYTHONS := python3.13 python3.12 python3 python
EXTRAS ?= test,train
PYTHON := .venv/bin/python
WATCHED := planted moe_experts rel_attention conv_mix project qkv_prep router sampling draft_attention
SANITIZER := compute-sanitizer --error-exitcode 1 \
  $(foreach name,$(WATCHED),--kernel-name kernel_substring=$(name))

.PHONY: setup demo test test-long test-gpu sanitize-gpu lint

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
	$(PYTHON) -m pytest -n 2 --dist worksteal -m 'not long'

test-long: setup
	$(PYTHON) -m pytest -n 2 --dist worksteal -m long

test-gpu: setup
	JAX_PLATFORMS=cuda,cpu $(PYTHON) -m pytest -m gpu --summary scripts/results/gpu_tests.json

# Every buffer is an allocation of its own, so that a step over its end is seen.
sanitize-gpu: export XLA_PYTHON_CLIENT_ALLOCATOR = platform
sanitize-gpu: export CUDA_MODULE_LOADING = LAZY
sanitize-gpu: export JAX_PLATFORMS = cuda,cpu
sanitize-gpu: export PYTHONPATH = .:tests
sanitize-gpu: setup
	$(SANITIZER) $(PYTHON) scripts/sanitize_kernels.py --planted 2>&1 | grep 'Invalid __global__ write'
	$(SANITIZER) --log-file scripts/results/sanitizer.log $(PYTHON) scripts/sanitize_kernels.py

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

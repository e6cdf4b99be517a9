# make demo | test | test-gpu | lint | bench.  Everything that is needed is set up in .venv the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-jax-oldest test-gpu lint bench clean

$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt -e ".[torch,jax,test,dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/train_mhc.py $(ARGS)

test: $(VENV)/.ready
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)
	@if nvidia-smi -L > /dev/null 2>&1; then $(MAKE) test-gpu PYTHON=$(BIN)/python; fi

# The oldest JAX that is supported, in an environment without torch and without TileLang: kernels come from the cache
# that `make test` has filled.
$(VENV)-jax-oldest/.ready: pyproject.toml .ci/constraints-jax-oldest.txt
	$(PYTHON) -m venv $(VENV)-jax-oldest
	$(VENV)-jax-oldest/bin/python -m pip install -q --disable-pip-version-check -c .ci/constraints-jax-oldest.txt -e ".[jax-runtime]" pytest pytest-xdist
	touch $@

test-jax-oldest: $(VENV)-jax-oldest/.ready
	$(VENV)-jax-oldest/bin/python -m pytest -n $(WORKERS) $(addprefix tests/test_jax_,frontend.py transforms.py kernels.py sharding.py) $(ARGS)
	$(VENV)-jax-oldest/bin/python -m pytest -n $(WORKERS) $(addprefix tests/test_quant_,casts.py golden_kernels.py errors.py jax.py) -k jax $(ARGS)
	$(VENV)-jax-oldest/bin/python -m pytest -n $(WORKERS) $(addprefix tests/test_moe_,frontends.py errors.py jax.py) -k jax $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# Installs nothing: the interpreter that PYTHON names must have torch, jax, tilelang, jax-tvm-ffi and pytest.
test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)

bench: $(VENV)/.ready
	$(BIN)/python -m tk_core bench $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info out

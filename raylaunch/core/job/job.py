"""The schema of a job. Job files, overrides on the command line and the Python API all use these dataclasses.

If torchrun has a flag for a setting, the key is that flag with underscores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raylaunch.core.newtypes import StrEnum

_DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch.utils.data")
"""Modules that a DDP script needs. The node adds what `DistributedDataParallel()` imports, which takes seconds."""

_DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

PLACEMENTS = ("auto", "spread", "pack")
NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")
LOG_LAYOUTS = ("raylaunch", "torchrun")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
EVENT_LOG_HANDLERS = ("null", "console")
PROGRESS_KINDS = ("auto", "line", "off")
HANG_WORDS = ("auto", "off")
AUTO_PRELOAD = "auto"

_MAX_TITLE = 50
"""Characters of a title, which is the name of a folder. Linux allows 255 bytes, and a character may have four."""
_PLAIN = "._-+@%,= "
"""Characters of a title besides letters and digits: a shell takes none of them for more than a character or a space."""
_MAX_DIGITS = 18
"""Digits of a number in a text, such as `0:3`. Python refuses to read numbers of more than 4,300 digits."""


class StartMethod(StrEnum):
    """How workers are started (Python: `multiprocessing.set_start_method`)."""

    FORKSERVER = "forkserver"
    """They are forked from a process that has imported torch."""
    SPAWN = "spawn"
    """Each is a fresh interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """The program of each worker: exactly one of script, module, function and command."""

    script: str | None = None
    """A Python file, as in `torchrun train.py`."""
    module: str | None = None
    """A module, as in `torchrun -m train`."""
    function: str | None = None
    """`package.module:function`. raylaunch calls `init_process_group` before the function, and destroys the group after
    it."""
    command: str | None = None
    """A program on the PATH, as in `torchrun --no-python`."""
    args: list[Any] = field(default_factory=list)
    """Arguments. As under torchrun, `${local_rank}` in them is replaced by each worker's local rank."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, for a function only."""
    pass_local_rank: bool = False
    """Whether to put `--local-rank=N` before the arguments, as `torch.distributed.launch` did without `--use-env`."""

    @property
    def kind(self) -> str:
        """The name of the first of the four that is set; "" if none is."""
        return next((kind for kind in ENTRYPOINT_KINDS if getattr(self, kind) is not None), "")

    @property
    def target(self) -> str:
        """The value of the script, module, function or command."""
        return str(getattr(self, self.kind)) if self.kind else ""


ENTRYPOINT_KINDS = ("script", "module", "function", "command")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRule:
    """What is different on the nodes that a key of `nodes` matches."""

    nproc_per_node: int | None = None
    """Workers on these nodes; 0: do not use these nodes. Default: the same as on all other nodes."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables on these nodes, in addition to the job's `env`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Where the Ray cluster is, and which folder it copies to its nodes."""

    address: str = "auto"
    """The Ray cluster to use. `host:port`: the one there. `none`: this machine alone, without Ray. `local`: this
    machine, with a Ray that this process starts. `auto`: RAY_ADDRESS, else a cluster that runs on this machine, else
    `none`."""
    working_dir: str | None = None
    """A folder that Ray copies to every node. The workers run there; for nodes that share no file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. All times are in seconds, and a year at most."""

    entrypoint: Entrypoint = field(default_factory=Entrypoint)
    """What every worker runs."""
    name: str | None = None
    """Names the run folder. Default: the name of the entry point."""
    run_id: str | None = None
    """TORCHELASTIC_RUN_ID, and the last part of the run folder. Default: the time of the start."""
    nnodes: int | str = 1
    """The number of nodes: `N`, or `MIN:MAX`. With a range, the job starts when MAX nodes are ready, or `last_call`
    seconds after MIN nodes are. It restarts on the nodes that are there whenever one joins or leaves."""
    nproc_per_node: int | str = 1
    """Workers on each node: a number, `gpu` or `xpu` (one for each GPU), `cpu` (for each CPU), or `auto` (`gpu` on
    nodes with GPUs, else `cpu`)."""
    nprocs: int | None = None
    """Workers in all, as many on each node as fit there. Replaces `nproc_per_node`."""
    nodes: dict[str, NodeRule] = field(default_factory=dict)
    """What differs on some nodes. Keys are an address (`10.0.0.7`, `10.0.0.*`), a subnet of one of the node's
    interfaces (`10.1.0.0/16`) or a Ray label (`label:zone=a`). If several keys match a node, later ones override
    earlier ones."""
    gpus_per_worker: int | float | str = "auto"
    """GPUs that Ray reserves for each worker. A whole number, a part such as `0.5` for workers that share one, or
    `auto`: 1 if the nodes have enough GPUs, else 0."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves for each worker. From 2 on it is also how many threads OpenMP has in it
    (OMP_NUM_THREADS)."""
    placement: str = "auto"
    """Whether nodes of the job may share a Ray node. `spread`: each is on a Ray node of its own. `pack`: they may share
    one. `auto`: `pack` if there is only one machine, else `spread`."""
    max_restarts: int = 0
    """How many worker failures the whole job survives. Nodes that are lost do not count."""
    start_method: str = "forkserver"
    """`forkserver`: workers are forked from a process that has imported torch. `spawn`: each worker is a fresh
    interpreter."""
    preload: list[str] | str = "auto"
    """Modules that the fork server imports before it forks. With an empty list, each worker imports torch itself.
    `auto`: torch and what DDP needs of it and, for restarts, the installed modules that the script was seen to
    import."""
    backend: str | None = None
    """The backend of the process group that a function gets. `none`: it gets no process group. Default: nccl if each
    worker has a GPU of its own (`gpus_per_worker` is 1 or more), else gloo."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    role: str = "default"
    """ROLE_NAME of the workers. It is part of the prefix of their lines."""
    master_addr: str | None = None
    """MASTER_ADDR of the workers: an address or a host name of the node that has rank 0. A value that is neither is
    ignored, with a message. Default: that node's address."""
    master_port: int = 0
    """MASTER_PORT of the workers, the same for all attempts; 0: a free port, another one for each attempt."""
    virtual_local_rank: bool = False
    """Whether LOCAL_RANK is 0 for every worker and CUDA_VISIBLE_DEVICES names its own GPUs only."""
    numa_binding: str | None = None
    """Bind each worker to CPUs near its GPU: `node`, `socket`, `exclusive` or `core-complex`."""
    show: str = "0"
    """The ranks whose output is shown on the terminal: `0`, `0,3`, `all` or `none`. `raw` shows all ranks without a
    prefix, as torchrun does. The output of every rank is also written to files."""
    progress: str = "auto"
    """How the progress is shown. `auto`: on a terminal as a live line below the output, else as a line each minute.
    `line`: as a line each minute. `off`: not at all."""
    debug: int | None = None
    """A rank that gets the terminal, for `breakpoint()` and pdb. The others' output is not shown, hangs are not looked
    for, and collectives wait for days unless the script sets a timeout."""
    pty: bool = False
    """Whether stdout and stderr of rank 0 are a terminal, so that Rich and others draw as they do on one."""
    tee: int | str = 0
    """Streams whose lines are shown with a prefix: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in
    `0:3,1:2`."""
    redirects: int | str = 0
    """Streams that are not shown, unless `tee` names them. Values are as for `tee`."""
    local_ranks_filter: str = ""
    """Local ranks whose output is shown, as in `0,1`; empty: all. The other filters apply too."""
    duplicate_stdout_filters: list[str] = field(default_factory=list)
    """Lines of stdout that contain one of these texts are also written to `filtered_stdout.log` of the attempt."""
    duplicate_stderr_filters: list[str] = field(default_factory=list)
    """The same for stderr and `filtered_stderr.log`."""
    log_line_prefix_template: str | None = None
    """The prefix of lines that `tee` shows, with `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}`. Default:
    `[${role_name}${local_rank}]:`."""
    log_dir: str = "runs"
    """The folder in which run folders are created; `/dev/null`: no files are kept."""
    log_layout: str = "raylaunch"
    """How the folders of a run are named. `raylaunch`: `<log_dir>/<name>/<run_id>/attempt-N/rank-R/`. `torchrun`:
    torchrun's names, `<log_dir>/<run_id>_<random>/attempt_<N-1>/<R>/`."""
    report: bool = True
    """Whether `report.html` is written to the run folder at the end of the run."""
    logs_specs: str = "default"
    """torchrun's name for a class that decides where files go. Only `default` is possible."""
    event_log_handler: str = "null"
    """`console`: write torchelastic's events to stderr. `null`: do not."""
    signals_to_handle: list[str] = field(default_factory=lambda: list(_DEFAULT_SIGNALS))
    """Signals to the driver that end the run. The workers get the same signal. A signal that is ignored when raylaunch
    starts, as under `nohup`, stays ignored."""
    signals_to_forward: list[str] = field(default_factory=list)
    """Signals to the driver that all workers get, while the run continues. A worker that has not installed a handler
    yet gets the signal when it has, 10 s later at most."""
    deadline: str | None = None
    """When the run must be over; all ranks save before that. A duration (`3h50m`), a time of day (`18:30`), a time in
    ISO 8601, or `auto`: RAYLAUNCH_DEADLINE, else the end of the Slurm job."""
    grace: float = 0.0
    """Time from a signal to the end of the run; all ranks save before that. SIGUSR1 then ends the run, too. 0: workers
    get the signal at once. With `deadline: auto` the default is 30."""
    placement_timeout: float = 300.0
    """How long the first start waits for the cluster to provide the nodes. `.inf`: without a limit."""
    join_timeout: float = 600.0
    """How long the job waits for nodes when fewer than MIN are left. `.inf`: without a limit."""
    multiple_of: int = 1
    """WORLD_SIZE is always a multiple of this number. Nodes beyond the last multiple wait."""
    spares: int = 0
    """Nodes beyond MAX that are kept ready, and replace lost nodes at once."""
    preemption_notices: str = "off"
    """The cloud whose notices drain a node. With `aws`, `gcp` or `azure`, each node asks the metadata server of its
    machine every two seconds whether the machine will be taken away. `off`: none is asked."""
    exclude_after: int = 3
    """Failures or losses within an hour after which a host is not used for a while. It is used all the same if the job
    has too few nodes without it. 0: every host is always used."""
    node_timeout: float = 5.0
    """A node from which nothing is heard for this long counts as lost. It ends its workers by itself within the same
    time. At least 1."""
    hang_timeout: int | float | str = "auto"
    """How long a worker may make no step before all are restarted. The stacks of all ranks are written first. A number
    counts from the start of the worker: include the time of imports and of the first step. `auto`: after 300 s or
    longer, raylaunch examines what the ranks do, and decides. `off`: never."""
    last_call: float = 5.0
    """With `MIN:MAX`: how long to wait for more nodes. The time begins when MIN nodes are ready, and again when a node
    joins."""
    start_timeout: float = 120.0
    """How long a node may take to start its workers, or to end them. After that, it is given up."""
    shutdown_timeout: float = 30.0
    """The time between SIGTERM and SIGKILL for workers."""
    state_memory: float | None = None
    """Memory of each node, in GiB, that `raylaunch.worker.State` may use. Files in RAYLAUNCH_FAST_DIR count, too.
    Default: half of what is free there when it is first needed."""
    durable: str | None = None
    """A folder that all nodes see, for checkpoints of `raylaunch.worker.State`. The nodes write commits there as
    checkpoints of `torch.distributed.checkpoint`, at the end of the run and now and then. `restore` of a new run begins
    with the newest one."""
    durable_every: float = 600.0
    """With `durable`: the least time between two checkpoints."""
    durable_keep: int = 3
    """With `durable`: how many checkpoints stay."""
    keep_warm: float = 0.0
    """How long the agents, with everything they have imported, stay for the next run of the same user in the same
    folder. 0: they end with the run. Has no effect without a Ray cluster, as with `--standalone`, or if workers have
    GPUs."""
    detach: bool = False
    """Whether the run goes on in the background, without the command and its terminal: see `raylaunch attach`."""
    driver_timeout: float = 600.0
    """How long agents of a detached run on a cluster wait for another driver. They wait when theirs is gone and none
    can be started. After that, nothing of the run is left."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Where the cluster is."""

    @property
    def min_nodes(self) -> int:
        """MIN of `nnodes`. Raise ValueError if it is malformed."""
        return node_range(self.nnodes)[0]

    @property
    def max_nodes(self) -> int:
        """MAX of `nnodes`. Raise ValueError if it is malformed."""
        return node_range(self.nnodes)[1]

    @property
    def preloaded(self) -> tuple[str, ...]:
        """The modules that are imported before the first start."""
        return _DEFAULT_PRELOAD if isinstance(self.preload, str) else tuple(self.preload)

    @property
    def title(self) -> str:
        """The job's name, or one made of its entry point's that a folder may have."""
        if self.name is not None:
            return self.name
        last = self.entrypoint.target.replace(":", "/").replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        words = last.removesuffix(".py").replace("<", "").replace(">", "")  # as of `main.<locals>.<lambda>`
        found = "".join(char if char.isalnum() or char in _PLAIN else "_" for char in words)
        return "job" if found in ("", ".", "..") else found[:_MAX_TITLE]


def is_number(text: str) -> bool:
    """Whether a text is a whole number, 0 or more, of a size that people write."""
    return text.strip().isdecimal() and len(text.strip()) <= _MAX_DIGITS


def node_range(nnodes: int | str) -> tuple[int, int]:
    """Return (MIN, MAX): `2` is `(2, 2)`, `"1:4"` is `(1, 4)`. Raise ValueError for anything else."""
    if isinstance(nnodes, int):
        return nnodes, nnodes
    low, colon, high = nnodes.partition(":")
    if not is_number(low) or (colon and not is_number(high)):
        msg = f"`{nnodes}` is neither N nor MIN:MAX"
        raise ValueError(msg)
    return int(low), int(high) if colon else int(low)


def shown_ranks(show: str) -> frozenset[int] | None:
    """Return the ranks that `show` names; None means all. Raise ValueError if it is malformed."""
    if show in ("all", "raw"):
        return None
    if show == "none":
        return frozenset()
    parts = [part.strip() for part in show.split(",")]
    if not all(map(is_number, parts)):
        msg = f"`{show}` is not `all`, `raw`, `none` or a list of ranks like `0,3`"
        raise ValueError(msg)
    return frozenset(int(part) for part in parts)

"""What was asked for. These dataclasses are the one schema: job files, overrides and Python use them.

Keys are torchrun's flags with underscores wherever torchrun has the flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch.utils.data", "torch._dynamo")
"""What a DDP script needs: `DistributedDataParallel()` imports `torch._dynamo`, seconds in each worker otherwise."""

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

PLACEMENTS = ("auto", "spread", "pack")
START_METHODS = ("forkserver", "spawn")
NPROC_WORDS = ("auto", "cpu", "gpu")
LOG_LAYOUTS = ("raylaunch", "torchrun")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
EVENT_LOG_HANDLERS = ("null", "console")
HANG_WORDS = ("auto", "off")
AUTO_PRELOAD = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """What every worker runs: exactly one of script, module, function or command."""

    script: str | None = None
    """A Python file, as in `torchrun train.py`."""
    module: str | None = None
    """A module, as in `torchrun -m train`."""
    function: str | None = None
    """`package.module:function`. raylaunch calls `init_process_group` before it and destroys the group after."""
    command: str | None = None
    """Any program on the PATH, as in `torchrun --no-python`."""
    args: list[Any] = field(default_factory=list)
    """Arguments; `${local_rank}` in them is replaced for each worker, as under torchrun."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments; only a function takes them."""
    pass_local_rank: bool = False
    """Put `--local-rank=N` before the arguments, as `torch.distributed.launch` did without `--use-env`."""

    @property
    def kind(self) -> str:
        """Which of the four was given, `""` if none."""
        return next((kind for kind in ENTRYPOINT_KINDS if getattr(self, kind) is not None), "")

    @property
    def target(self) -> str:
        """The script, module, function or command itself."""
        return str(getattr(self, self.kind)) if self.kind else ""

    def __str__(self) -> str:
        return " ".join([self.target, *map(str, self.args)])


ENTRYPOINT_KINDS = ("script", "module", "function", "command")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRule:
    """What is different on the nodes that a key of `nodes` matches."""

    nproc_per_node: int | None = None
    """Workers there; default: as everywhere; 0: the node is left out."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables there, on top of the job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Where the cluster is."""

    address: str = "auto"
    """`host:port` connects; `none`: this machine alone, without Ray; `local`: the same with a Ray that is started in
    this process; `auto` takes RAY_ADDRESS, else a running cluster, else none."""
    working_dir: str | None = None
    """A folder that Ray copies to every node, where the workers then run; for nodes without a shared file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. All times are in seconds."""

    entrypoint: Entrypoint = field(default_factory=Entrypoint)
    """What every worker runs."""
    name: str | None = None
    """Names the run folder; default: the entry point's own name."""
    run_id: str | None = None
    """TORCHELASTIC_RUN_ID and the last part of the run folder; default: the time of the start."""
    nnodes: int | str = 1
    """`N` or `MIN:MAX` nodes."""
    nproc_per_node: int | str = 1
    """Workers on each node: a number, `gpu`, `cpu`, or `auto` (GPUs if there are any, else CPUs)."""
    nprocs: int | None = None
    """Workers in all, as many on each node as fit there, instead of `nproc_per_node`."""
    nodes: dict[str, NodeRule] = field(default_factory=dict)
    """What is different on some nodes, by address (`10.0.0.7`, `10.0.0.*`), subnet of one of its interfaces
    (`10.1.0.0/16`) or Ray label (`label:zone=a`). Of several that match, later ones win."""
    gpus_per_worker: int | str = "auto"
    """GPUs reserved for each worker: a number, or `auto` (1 if the nodes have enough of them, else 0)."""
    cpus_per_worker: float = 1.0
    """CPUs reserved for each worker."""
    placement: str = "auto"
    """`spread`: one agent on each Ray node; `pack`: they may share one; `auto`: `pack` on one machine only."""
    max_restarts: int = 0
    """How many failures of workers the whole job survives. Lost nodes do not count."""
    start_method: str = "forkserver"
    """`forkserver`: fork workers from a process that has imported torch; `spawn`: a fresh interpreter for each."""
    preload: list[str] | str = "auto"
    """Modules the fork server imports before it forks; with none, each worker imports torch itself. `auto`: torch, what
    DDP needs of it, and for a restart the installed modules that the script was seen to import."""
    backend: str | None = None
    """For a function: the process group's backend; default: nccl where workers have GPUs, else gloo; `none`: the
    function gets no process group."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    role: str = "default"
    """ROLE_NAME of the workers, and part of the prefix of their lines."""
    master_addr: str | None = None
    """MASTER_ADDR of the workers, where it is an address or a name of the node with rank 0; default: its address."""
    master_port: int = 0
    """MASTER_PORT of the workers; 0: a free one, another for each attempt."""
    virtual_local_rank: bool = False
    """LOCAL_RANK is 0 for every worker, and CUDA_VISIBLE_DEVICES is its own device alone."""
    numa_binding: str | None = None
    """Bind each worker to CPUs near its GPU: `node`, `socket`, `exclusive` or `core-complex`."""
    show: str = "0"
    """Ranks whose output is shown on the terminal: `0`, `0,3`, `all` or `none`; `raw` shows all of them without a
    prefix, as torchrun does. Files are written for all."""
    tee: int | str = 0
    """Streams whose lines are shown with a prefix: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank `0:3,1:2`."""
    redirects: int | str = 0
    """Streams that are not shown unless `tee` names them: as for `tee`."""
    local_ranks_filter: str = ""
    """Local ranks whose output is shown: `0,1`; empty: all. The other filters apply too."""
    duplicate_stdout_filters: list[str] = field(default_factory=list)
    """Lines of stdout with one of these texts in them are also written to `filtered_stdout.log` of the attempt."""
    duplicate_stderr_filters: list[str] = field(default_factory=list)
    """The same for stderr."""
    log_line_prefix_template: str | None = None
    """What lines of `tee` begin with: a text with `${role_name}`, `${local_rank}` and `${rank}`; default:
    `[${role_name}${local_rank}]:`."""
    log_dir: str = "runs"
    """Where run folders are made; `/dev/null`: nothing is kept."""
    log_layout: str = "raylaunch"
    """`raylaunch`: `<log_dir>/<name>/<run_id>/attempt-N/rank-R/`; `torchrun`: as torchrun lays its files out,
    `<log_dir>/<run_id>_<random>/attempt_<N-1>/<R>/`."""
    logs_specs: str = "default"
    """torchrun's name for a class that decides where files go; only `default` is possible."""
    event_log_handler: str = "null"
    """`console`: write torchelastic's events to stderr; `null`: do not."""
    signals_to_handle: list[str] = field(default_factory=lambda: list(DEFAULT_SIGNALS))
    """Signals to the driver that end the run; the workers get the same signal."""
    signals_to_forward: list[str] = field(default_factory=list)
    """Signals to the driver that all workers get, whereupon the run goes on."""
    placement_timeout: float = 300.0
    """How long to wait for the cluster to give what was asked, before the first start."""
    join_timeout: float = 600.0
    """How long to wait for nodes when fewer than MIN are left."""
    multiple_of: int = 1
    """WORLD_SIZE is always a multiple of this; nodes beyond the last multiple wait."""
    spares: int = 0
    """Nodes beyond MAX that are kept warm and take over at once."""
    exclude_after: int = 3
    """A host that caused so many failures in an hour, or was lost as often, is left out for a while; 0: never."""
    node_timeout: float = 5.0
    """A node of which nothing is heard for as long is lost. It ends its workers within the same time by itself."""
    hang_timeout: int | float | str = "auto"
    """When a worker makes no step for as long, all stacks are written and the workers restarted; `auto`: after 300 s
    or longer it is looked into, and that is done where nobody works any more; `off`: never."""
    last_call: float = 5.0
    """With `MIN:MAX`, how long to wait for more nodes once MIN are there."""
    start_timeout: float = 120.0
    """How long a node may take to start its workers before it is given up."""
    shutdown_timeout: float = 30.0
    """How long workers have between SIGTERM and SIGKILL."""
    keep_warm: float = 0.0
    """How long the agents and what they have imported stay for the next run of the same process; 0: they end with
    the run. Not where workers have GPUs. With the command, that process is a driver that stays as long too."""
    ray: RayOptions = field(default_factory=RayOptions)

    @property
    def min_nodes(self) -> int:
        """Fewest nodes worth running on."""
        return node_range(self.nnodes)[0]

    @property
    def max_nodes(self) -> int:
        """Most nodes that are used."""
        return node_range(self.nnodes)[1]

    @property
    def preloaded(self) -> tuple[str, ...]:
        """What is imported before the first start."""
        return DEFAULT_PRELOAD if isinstance(self.preload, str) else tuple(self.preload)

    @property
    def title(self) -> str:
        """The job's name, or its entry point's."""
        if self.name is not None:
            return self.name
        last = self.entrypoint.target.replace(":", "/").replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        return last.removesuffix(".py") or "job"


def node_range(nnodes: int | str) -> tuple[int, int]:
    """`2` is `(2, 2)`, `"1:4"` is `(1, 4)`; raises ValueError on anything else."""
    text = str(nnodes)
    low, colon, high = text.partition(":")
    if not low.strip().isdecimal() or (colon and not high.strip().isdecimal()):
        msg = f"`{text}` is neither N nor MIN:MAX"
        raise ValueError(msg)
    return int(low), int(high) if colon else int(low)


def shown_ranks(show: str) -> frozenset[int] | None:
    """The ranks named by `show`; None stands for all. Raises ValueError."""
    if show in ("all", "raw"):
        return None
    if show == "none":
        return frozenset()
    parts = [part.strip() for part in show.split(",")]
    if not all(part.isdecimal() for part in parts):
        msg = f"`{show}` is not `all`, `raw`, `none` or a list of ranks like `0,3`"
        raise ValueError(msg)
    return frozenset(int(part) for part in parts)

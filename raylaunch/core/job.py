"""What was asked for. These dataclasses are the one schema: job files, overrides and Python use them.

Keys are torchrun's flags with underscores wherever torchrun has the flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch.utils.data", "torch._dynamo")
"""What a DDP script needs: `DistributedDataParallel()` imports `torch._dynamo`, seconds in each worker otherwise."""

PLACEMENTS = ("auto", "spread", "pack")
START_METHODS = ("forkserver", "spawn")
NPROC_WORDS = ("auto", "cpu", "gpu")


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
    """Arguments, passed on as they are."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments; only a function takes them."""

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
class RayOptions:
    """Where the cluster is."""

    address: str = "auto"
    """`auto` takes RAY_ADDRESS, else a running cluster, else starts Ray in this process; `local` always
    starts one; `host:port` connects."""
    working_dir: str | None = None
    """A folder that Ray copies to every node, where the workers then run; for nodes without a shared file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. All times are in seconds."""

    entrypoint: Entrypoint = field(default_factory=Entrypoint)
    name: str | None = None
    """Names the run folder; default: the entry point's own name."""
    run_id: str | None = None
    """TORCHELASTIC_RUN_ID and the last part of the run folder; default: the time of the start."""
    nnodes: int | str = 1
    """`N` or `MIN:MAX` nodes."""
    nproc_per_node: int | str = 1
    """Workers on each node: a number, `gpu`, `cpu`, or `auto` (GPUs if there are any, else CPUs)."""
    gpus_per_worker: int | str = "auto"
    """GPUs reserved for each worker: a number, or `auto` (1 if the nodes have enough of them, else 0)."""
    cpus_per_worker: float = 1.0
    """CPUs reserved for each worker."""
    placement: str = "auto"
    """`spread`: one agent on each Ray node; `pack`: they may share one; `auto`: `pack` on a local Ray only."""
    max_restarts: int = 0
    """How many failures of workers the whole job survives. Lost nodes do not count."""
    start_method: str = "forkserver"
    """`forkserver`: fork workers from a process that has imported torch; `spawn`: a fresh interpreter for each."""
    preload: list[str] = field(default_factory=lambda: list(DEFAULT_PRELOAD))
    """Modules the fork server imports before it forks."""
    backend: str | None = None
    """For a function: the process group's backend; default: nccl where workers have GPUs, else gloo."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    show: str = "0"
    """Ranks whose output is shown on the terminal: `0`, `0,3`, `all` or `none`. Files are written for all."""
    log_dir: str = "runs"
    """Where run folders are made: `<log_dir>/<name>/<run_id>/`."""
    placement_timeout: float = 300.0
    """How long to wait for the cluster to give what was asked, before the first start."""
    join_timeout: float = 600.0
    """How long to wait for nodes when fewer than MIN are left."""
    last_call: float = 5.0
    """With `MIN:MAX`, how long to wait for more nodes once MIN are there."""
    start_timeout: float = 120.0
    """How long a node may take to start its workers before it is given up."""
    shutdown_timeout: float = 30.0
    """How long workers have between SIGTERM and SIGKILL."""
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
    def title(self) -> str:
        """The job's name, or its entry point's."""
        if self.name is not None:
            return self.name
        last = self.entrypoint.target.replace(":", "/").replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        return last.removesuffix(".py") or "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a job: the key it is about, what is wrong, and what to do."""

    key: str
    message: str
    hint: str = ""
    also: str = ""
    """A second key that has a part in it."""


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
    if show == "all":
        return None
    if show == "none":
        return frozenset()
    parts = [part.strip() for part in show.split(",")]
    if not all(part.isdecimal() for part in parts):
        msg = f"`{show}` is not `all`, `none` or a list of ranks like `0,3`"
        raise ValueError(msg)
    return frozenset(int(part) for part in parts)


def problems(job: Job) -> list[Problem]:
    """Everything that is wrong with a job whose values have the right types."""
    return [
        *_entrypoint_problems(job.entrypoint),
        *_size_problems(job),
        *_word_problems(job),
        *_number_problems(job),
        *_name_problems(job),
    ]


def _entrypoint_problems(entrypoint: Entrypoint) -> list[Problem]:
    given = [kind for kind in ENTRYPOINT_KINDS if getattr(entrypoint, kind) is not None]
    kinds = ", ".join(ENTRYPOINT_KINDS[:-1]) + " or " + ENTRYPOINT_KINDS[-1]
    if not given:
        return [Problem(key="entrypoint", message=f"nothing to run: give a {kinds}")]
    if len(given) > 1:
        message = f"both `{given[0]}` and `{given[1]}` are given, but one of {kinds} is expected"
        return [Problem(key=f"entrypoint.{given[1]}", message=message, also=f"entrypoint.{given[0]}")]
    found = []
    kind, target = given[0], str(getattr(entrypoint, given[0]))
    if not target.strip():
        found.append(Problem(key=f"entrypoint.{kind}", message=f"`{kind}` is empty"))
    if kind == "function" and (target.count(":") != 1 or not all(target.split(":"))):
        message = f"`{target}` is not of the form `package.module:function`"
        found.append(Problem(key="entrypoint.function", message=message))
    if entrypoint.kwargs and kind != "function":
        message = f"a {kind} takes no keyword arguments"
        found.append(Problem(key="entrypoint.kwargs", message=message, hint="use `args`"))
    return found


def _size_problems(job: Job) -> list[Problem]:
    found = []
    try:
        low, high = node_range(job.nnodes)
    except ValueError as error:
        found.append(Problem(key="nnodes", message=str(error), hint="for example `2` or `1:4`"))
    else:
        if low < 1:
            found.append(Problem(key="nnodes", message="at least one node is needed"))
        elif low > high:
            message = f"the minimum ({low}) is larger than the maximum ({high})"
            found.append(Problem(key="nnodes", message=message, hint=f"did you mean `{high}:{low}`?"))
    if not _is_count(job.nproc_per_node, least=1) and job.nproc_per_node not in NPROC_WORDS:
        message = f"`{job.nproc_per_node}` is neither a number of workers nor one of auto, cpu, gpu"
        found.append(Problem(key="nproc_per_node", message=message))
    if not _is_count(job.gpus_per_worker, least=0) and job.gpus_per_worker != "auto":
        message = f"`{job.gpus_per_worker}` is neither a number of GPUs nor auto"
        found.append(Problem(key="gpus_per_worker", message=message))
    return found


def _is_count(value: int | str, *, least: int) -> bool:
    return str(value).isdecimal() and int(value) >= least


def _word_problems(job: Job) -> list[Problem]:
    found = []
    for key, words in (("placement", PLACEMENTS), ("start_method", START_METHODS)):
        value = getattr(job, key)
        if value not in words:
            message = f"`{value}` is not one of {', '.join(words)}"
            close = get_close_matches(value, words, n=1)
            found.append(Problem(key=key, message=message, hint=f"did you mean `{close[0]}`?" if close else ""))
    try:
        shown_ranks(job.show)
    except ValueError as error:
        found.append(Problem(key="show", message=str(error)))
    return found


def _number_problems(job: Job) -> list[Problem]:
    no_time = [key for key in ("placement_timeout", "join_timeout", "start_timeout") if not getattr(job, key) > 0]
    below = [
        key
        for key in ("max_restarts", "last_call", "shutdown_timeout", "cpus_per_worker")
        if not getattr(job, key) >= 0
    ]
    return [
        *(
            Problem(key=key, message=f"{getattr(job, key):g} seconds is no time: more than 0 is expected")
            for key in no_time
        ),
        *(Problem(key=key, message=f"{getattr(job, key):g} is less than 0") for key in below),
    ]


def _name_problems(job: Job) -> list[Problem]:
    found = []
    for key in ("name", "run_id"):
        value = getattr(job, key)
        if value is not None and (not value.strip() or "/" in value or "\0" in value or value in (".", "..")):
            message = f"`{value}` cannot name a folder"
            found.append(Problem(key=key, message=message))
    return found + [
        Problem(key=f"env.{key}", message=f"`{key}` cannot name an environment variable")
        for key in job.env
        if not key or "=" in key or "\0" in key
    ]

"""The table of flags: every one of torchrun's, those of `torch.distributed.launch`, and ours; one row for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Value = str | list[str] | None
"""What a flag's word means as a value of its setting; None: the same as not giving the flag."""


class Group(Enum):
    """The sections of `--help`, in their order: a title, and what holds for all flags in it."""

    ENTRY = "What runs"
    SIZE = "Size"
    RESTARTS = "Restarts and signals"
    OUTPUT = "Output"
    RENDEZVOUS = "Rendezvous"
    ENVIRONMENT = "Environment of the workers"
    ACCEPTED = "Accepted, without effect"
    OURS = "raylaunch's own"


def _plain(text: str) -> Value:
    return text


def _list(text: str) -> Value:
    return [part.strip() for part in text.split(",")]


def _filters(text: str) -> Value:
    """As a list, but two commas are one that is meant."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")] if text else []


def _nproc(text: str) -> Value:
    return {"xpu": "gpu"}.get(text, text)


def _run_id(text: str) -> Value:
    return None if text == "none" else text  # torchrun's default


def _start_method(text: str) -> Value:
    return {"fork": "forkserver"}.get(text, text)


def _no_ray(_: str) -> Value:
    return "none"


def _true(_: str) -> Value:
    return "true"


def _if_any(text: str) -> Value:
    return text or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. Dashes and underscores in its name are the same."""

    name: str
    about: str
    """One line; of a flag without effect, what is done instead."""
    takes: str = ""
    """What its value is called in `--help`; `""`: it takes none."""
    short: str = ""
    default: str = ""
    """As `--help` shows it."""
    setting: str = ""
    """The key of the job that it sets; `""`: it means more than one key, or none."""
    reads: Callable[[str], Value] = _plain
    pet: bool = True
    """The environment variable `PET_<NAME>` gives its default, as under torchrun."""
    number: type[int | float] | None = None
    """Of a flag without a setting: the kind of number it takes."""

    @property
    def spelled(self) -> str:
        """As on the command line."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable with its default."""
        return "PET_" + self.name.replace("-", "_").upper()


_MEETING = "the Ray cluster is the meeting place"

TABLE = {
    Group.ENTRY: (
        Flag(name="module", short="m", about="the script is a module, as in `python -m`"),
        Flag(name="no-python", about="the script is a program, run as it is"),
        Flag(name="run-path", about="the script is a Python file, whatever -m and --no-python say"),
        Flag(
            name="start-method",
            takes="METHOD",
            default="forkserver",
            about="forkserver, fork: import torch once a node; spawn: in each worker",
            setting="start_method",
            reads=_start_method,
        ),
    ),
    Group.SIZE: (
        Flag(
            name="nnodes",
            takes="N|MIN:MAX",
            default="1",
            about="nodes; with MIN:MAX the world grows and shrinks between them",
            setting="nnodes",
        ),
        Flag(
            name="nproc-per-node",
            takes="N|WORD",
            default="1",
            about="workers on each node: a number, gpu (or xpu), cpu, or auto",
            setting="nproc_per_node",
            reads=_nproc,
        ),
    ),
    Group.RESTARTS: (
        Flag(
            name="max-restarts",
            takes="N",
            default="0",
            about="failures of workers that the whole job survives; lost nodes do not count",
            setting="max_restarts",
        ),
        Flag(
            name="shutdown-timeout",
            takes="SECONDS",
            default="30",
            about="between SIGTERM and SIGKILL; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            setting="shutdown_timeout",
        ),
        Flag(
            name="signals-to-handle",
            takes="NAMES",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            about="signals that end the run; workers get the same",
            setting="signals_to_handle",
            reads=_list,
        ),
    ),
    Group.OUTPUT: (
        Flag(
            name="log-dir",
            takes="DIR",
            default="runs",
            about="where logs go, in torchrun's layout; not given: the run folder in ./runs",
            setting="log_dir",
            reads=_if_any,
        ),
        Flag(
            name="redirects",
            short="r",
            takes="STREAMS",
            default="0",
            about="streams kept off the terminal: 1 stdout, 2 stderr, 3 both; 0:3,1:2 by local rank",
            setting="redirects",
        ),
        Flag(
            name="tee",
            short="t",
            takes="STREAMS",
            default="0",
            about="streams shown line by line with a prefix; as for --redirects",
            setting="tee",
        ),
        Flag(
            name="local-ranks-filter",
            takes="RANKS",
            default="all",
            about="local ranks that the terminal shows, as in 0,1",
            setting="local_ranks_filter",
        ),
        Flag(
            name="duplicate-stdout-filters",
            takes="TEXTS",
            default="none",
            about="copy lines with one of these texts to filtered_stdout.log; `,,` is a comma",
            setting="duplicate_stdout_filters",
            reads=_filters,
        ),
        Flag(
            name="duplicate-stderr-filters",
            takes="TEXTS",
            default="none",
            about="the same for stderr",
            setting="duplicate_stderr_filters",
            reads=_filters,
        ),
        Flag(
            name="logs-specs",
            takes="NAME",
            default="default",
            about="only `default`: classes of one's own cannot say where files go",
            setting="logs_specs",
            pet=False,
        ),
        Flag(
            name="event-log-handler",
            takes="NAME",
            default="null",
            about="console: write torchelastic's events to stderr",
            setting="event_log_handler",
        ),
    ),
    Group.RENDEZVOUS: (
        Flag(
            name="standalone",
            about="this machine alone, without Ray (ray.address=none)",
            setting="ray.address",
            reads=_no_ray,
        ),
        Flag(
            name="rdzv-id",
            takes="ID",
            default="the time",
            about="TORCHELASTIC_RUN_ID, and names the run folder",
            setting="run_id",
            reads=_run_id,
        ),
        Flag(
            name="rdzv-conf",
            takes="K=V,...",
            about="join_timeout, last_call_timeout and timeout have their meaning; other keys none",
        ),
        Flag(
            name="master-addr",
            takes="ADDRESS",
            default="that of node 0",
            about="MASTER_ADDR, where it is an address or a name of node 0",
            setting="master_addr",
            reads=_if_any,
        ),
        Flag(name="master-port", takes="PORT", default="a free one", about="MASTER_PORT", setting="master_port"),
    ),
    Group.ENVIRONMENT: (
        Flag(name="role", takes="NAME", default="default", about="ROLE_NAME", setting="role"),
        Flag(
            name="virtual-local-rank",
            about="LOCAL_RANK=0 for all, each sees its own GPU alone",
            setting="virtual_local_rank",
            reads=_true,
        ),
        Flag(
            name="numa-binding",
            takes="KIND",
            default="none",
            about="CPUs near the GPU: node, socket, exclusive or core-complex",
            setting="numa_binding",
            pet=False,
        ),
    ),
    Group.ACCEPTED: (
        Flag(name="node-rank", takes="N", about="raylaunch numbers the nodes", number=int),
        Flag(name="rdzv-backend", takes="NAME", about=_MEETING),
        Flag(name="rdzv-endpoint", takes="HOST:PORT", about=_MEETING),
        Flag(name="local-addr", takes="ADDRESS", about="Ray knows the nodes' addresses"),
        Flag(name="monitor-interval", takes="SECONDS", about="exits are pushed, not polled", number=float),
        Flag(name="use-env", about="LOCAL_RANK is always in the environment", pet=False),
    ),
    Group.OURS: (
        Flag(name="plan", about="say who would run where, and why not elsewhere; start nothing", pet=False),
        Flag(name="set", takes="KEY=VALUE", about="any setting of a job file; may be given again and again", pet=False),
        Flag(
            name="show",
            takes="RANKS",
            default="raw; job file: 0",
            about="ranks on the terminal: 0,3, all, none; raw: all, without a prefix",
            setting="show",
            pet=False,
        ),
        Flag(
            name="signals-to-forward",
            takes="NAMES",
            default="none",
            about="signals that all workers get while the run goes on: SIGUSR1,SIGUSR2",
            setting="signals_to_forward",
            reads=_list,
            pet=False,
        ),
        Flag(
            name="pass-local-rank",
            about="pass --local-rank=N to the script, as torch.distributed.launch did",
            pet=False,
        ),
        Flag(
            name="keep-warm",
            takes="SECONDS",
            default="0",
            about="driver and agents stay as long for the next run; see `raylaunch status`",
            setting="keep_warm",
            pet=False,
        ),
        Flag(name="end", about="only with `status`: end what is kept warm", pet=False),
        Flag(name="version", about="show the version and exit", pet=False),
        Flag(name="help", short="h", about="show this and exit", pet=False),
    ),
}

FLAGS = tuple(flag for flags in TABLE.values() for flag in flags)
BY_NAME = {flag.name: flag for flag in FLAGS}
BY_LETTER = {flag.short: flag for flag in FLAGS if flag.short}


def meant_by(name: str) -> list[Flag]:
    """The flags that a name, or the beginning of one, can stand for.

    Where a beginning stands for one of torchrun's flags and for some of ours, torchrun's is meant: its command lines
    keep their meaning.
    """
    name = name.replace("_", "-")
    if name in BY_NAME:
        return [BY_NAME[name]]
    found = [flag for flag in FLAGS if name and flag.name.startswith(name)]
    torchruns = [flag for flag in found if flag not in TABLE[Group.OURS] and flag.name != "use-env"]
    return torchruns if len(torchruns) == 1 else found

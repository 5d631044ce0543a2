"""The table of flags: torchrun's, `torch.distributed.launch`'s, raylaunch's own, and one for each other key."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any

from raylaunch.core.job.job import LOG_LAYOUTS, PLACEMENTS, Job, RayOptions
from raylaunch.core.job.validation import NOTICES

Value = str | list[str] | None
"""The value of the setting that a flag sets; None: the flag has no effect, as if it were not given."""


class Group(Enum):
    """The sections of `--help`, in the order in which it prints them. The value is the title."""

    ENTRY = "What runs"
    SIZE = "Size"
    RESTARTS = "Restarts and signals"
    OUTPUT = "Output"
    RENDEZVOUS = "Rendezvous"
    ENVIRONMENT = "Environment of the workers"
    ACCEPTED = "Accepted without effect"
    OURS = "raylaunch only"
    KEYS = "Keys of job files"


def _unchanged(text: str) -> Value:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. On the command line, dashes and underscores in its name are the same."""

    name: str
    help: str
    """One line for `--help`. For a flag without effect: what raylaunch does instead."""
    metavar: str = ""
    """The name of its value in `--help`; "" for a switch, which takes no value."""
    short: str = ""
    default: str = ""
    """The default as `--help` shows it; "" shows none."""
    setting: str = ""
    """The config key that it sets; "" where it sets several keys or none."""
    convert: Callable[[str], Value] = _unchanged
    """Makes the value of the setting from the text on the command line."""
    pet: bool = True
    """Whether the environment variable `PET_<NAME>` sets its default, as under torchrun."""
    number_type: type[int | float] | None = None
    """For a flag without effect: the type of number that its value must be."""

    @property
    def option(self) -> str:
        """The flag as written on the command line."""
        return f"--{self.name}"

    @property
    def env_variable(self) -> str:
        """The environment variable that sets its default, if `pet` is true."""
        return "PET_" + self.name.replace("-", "_").upper()


_NO_FLAGS = ("entrypoint", "nodes", "ray")
"""Sections. The script on the command line is the entry point; `ray` has flags for its own keys."""
_METAVARS = {
    "gpus_per_worker": "N|auto",
    "cpus_per_worker": "N",
    "placement": "|".join(PLACEMENTS),
    "preemption_notices": "|".join(NOTICES),
    "preload": "MODULES",
    "env": "NAME=VALUE",
    "log_layout": "|".join(LOG_LAYOUTS),
    "hang_timeout": "SECONDS|auto|off",
    "deadline": "TIME|auto",
    "state_memory": "GIB",
    "durable": "DIR",
    "ray.address": "HOST:PORT",
    "ray.working_dir": "DIR",
}
_METAVARS_BY_TYPE = {"bool": "true|false", "int": "N", "float": "SECONDS", "str": "NAME", "list": "A,B"}
_SENTENCE = re.compile(r"\.(?:\s|$)")


def _key_flags(taken: Collection[str]) -> tuple[Flag, ...]:
    """Return a flag for each key whose name is not `taken` by another flag."""
    return (*_flags(Job, "", taken), *_flags(RayOptions, "ray.", taken))


def _flags(kind: type[Any], section: str, taken: Collection[str]) -> Iterator[Flag]:
    meanings = attribute_docstrings(kind)
    for field in fields(kind):
        key = section + field.name
        if key not in _NO_FLAGS and key.replace("_", "-") not in taken:
            meaning = _SENTENCE.split(meanings.get(field.name, ""))[0]
            yield Flag(
                name=key.replace("_", "-"),
                metavar=_METAVARS.get(key) or _METAVARS_BY_TYPE[re.split(r"\W", str(field.type))[0]],
                default=default_text(field),
                help=meaning if meaning[1:2].isupper() else meaning[:1].lower() + meaning[1:],
                setting=key,
                convert=_items if str(field.type).startswith("list") else _unchanged,
                pet=False,
            )


def _items(text: str) -> Value:
    return text if text == "auto" else [part.strip() for part in text.split(",") if part]


def default_text(field: Field[Any]) -> str:
    """Return the default of a key as job files have it; "" if it is a section, empty or null."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value in (None, "", {}) or is_dataclass(value):
        return ""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the text below each attribute of a class of a module, on one line, by the attribute's name.

    Empty where Python has the compiled modules only.
    """
    found = {}
    body = next((one.body for one in _classes(kind.__module__) if one.name == kind.__name__), [])
    for before, after in pairwise(body):
        targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
        if isinstance(targets[0], ast.Name) and isinstance(after, ast.Expr):
            found[targets[0].id] = " ".join(inspect.cleandoc(ast.literal_eval(after.value)).split())
    return found


@cache
def _classes(module: str) -> list[ast.ClassDef]:
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return []
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def _list(text: str) -> Value:
    return [part.strip() for part in text.split(",")]


def _filters(text: str) -> Value:
    """Split at commas; `,,` is a literal comma."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")] if text else []


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


_NO_RENDEZVOUS = "nodes find each other through the Ray cluster"

TABLE: dict[Group, tuple[Flag, ...]] = {
    Group.ENTRY: (
        Flag(name="module", short="m", help="run SCRIPT as a module, as `python -m` does"),
        Flag(name="no-python", help="run SCRIPT as a program, without Python"),
        Flag(name="run-path", help="run SCRIPT as a Python file, even with -m or --no-python"),
        Flag(
            name="start-method",
            metavar="METHOD",
            default="forkserver",
            help="forkserver (or fork): import torch once per node; spawn: in each worker",
            setting="start_method",
            convert=_start_method,
        ),
    ),
    Group.SIZE: (
        Flag(
            name="nnodes",
            metavar="N|MIN:MAX",
            default="1",
            help="number of nodes; with MIN:MAX the job grows and shrinks between the two",
            setting="nnodes",
        ),
        Flag(
            name="nproc-per-node",
            metavar="N|auto|cpu|gpu",
            default="1",
            help="workers per node: a number, one per GPU (gpu, xpu), one per CPU (cpu), or auto",
            setting="nproc_per_node",
        ),
    ),
    Group.RESTARTS: (
        Flag(
            name="max-restarts",
            metavar="N",
            default="0",
            help="worker failures that the whole job survives; lost nodes do not count",
            setting="max_restarts",
        ),
        Flag(
            name="shutdown-timeout",
            metavar="SECONDS",
            default="30",
            help="time between SIGTERM and SIGKILL; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            setting="shutdown_timeout",
        ),
        Flag(
            name="signals-to-handle",
            metavar="NAMES",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            help="signals that stop the run and are sent to the workers",
            setting="signals_to_handle",
            convert=_list,
        ),
    ),
    Group.OUTPUT: (
        Flag(
            name="log-dir",
            metavar="DIR",
            default="runs",
            help="folder for logs in torchrun's layout; without it: a run folder in ./runs",
            setting="log_dir",
            convert=_if_any,
        ),
        Flag(
            name="redirects",
            short="r",
            metavar="STREAMS",
            default="0",
            help="streams kept off the terminal: 1 stdout, 2 stderr, 3 both; 0:3,1:2 by local rank",
            setting="redirects",
        ),
        Flag(
            name="tee",
            short="t",
            metavar="STREAMS",
            default="0",
            help="streams shown line by line with a prefix; values as for --redirects",
            setting="tee",
        ),
        Flag(
            name="log-line-prefix-template",
            metavar="TEXT",
            help="prefix of --tee; ${role_name}, ${local_rank}, ${rank} and ${hostname} are replaced",
            setting="log_line_prefix_template",
            convert=_if_any,
        ),
        Flag(
            name="local-ranks-filter",
            metavar="RANKS",
            default="all",
            help="local ranks that the terminal shows, for example 0,1",
            setting="local_ranks_filter",
        ),
        Flag(
            name="duplicate-stdout-filters",
            metavar="TEXTS",
            default="none",
            help="copy lines that contain one of TEXTS to filtered_stdout.log; `,,` is a comma",
            setting="duplicate_stdout_filters",
            convert=_filters,
        ),
        Flag(
            name="duplicate-stderr-filters",
            metavar="TEXTS",
            default="none",
            help="the same for stderr and filtered_stderr.log",
            setting="duplicate_stderr_filters",
            convert=_filters,
        ),
        Flag(
            name="logs-specs",
            metavar="NAME",
            default="default",
            help="only `default` is supported: raylaunch loads no other LogsSpecs classes",
            setting="logs_specs",
            pet=False,
        ),
        Flag(
            name="event-log-handler",
            metavar="NAME",
            default="null",
            help="console: write torchelastic's events to stderr; null: write none",
            setting="event_log_handler",
        ),
        Flag(
            name="print-completion",
            metavar="SHELL",
            help="print the same as `raylaunch completion SHELL`, and exit",
            pet=False,
        ),
    ),
    Group.RENDEZVOUS: (
        Flag(
            name="standalone",
            help="run on this machine only, without Ray (sets ray.address=none)",
            setting="ray.address",
            convert=_no_ray,
        ),
        Flag(
            name="rdzv-id",
            metavar="ID",
            default="the start time",
            help="value of TORCHELASTIC_RUN_ID, and name of the run folder",
            setting="run_id",
            convert=_run_id,
        ),
        Flag(
            name="rdzv-conf",
            metavar="K=V,...",
            help="join_timeout, last_call_timeout and timeout take effect; other keys do not",
        ),
        Flag(
            name="master-addr",
            metavar="ADDRESS",
            default="node 0",
            help="value of MASTER_ADDR; ignored unless it is an address or name of node 0",
            setting="master_addr",
            convert=_if_any,
        ),
        Flag(
            name="master-port",
            metavar="PORT",
            default="a free port",
            help="value of MASTER_PORT",
            setting="master_port",
        ),
    ),
    Group.ENVIRONMENT: (
        Flag(name="role", metavar="NAME", default="default", help="value of ROLE_NAME", setting="role"),
        Flag(
            name="virtual-local-rank",
            help="LOCAL_RANK is 0 for all workers, and each sees only its own GPU",
            setting="virtual_local_rank",
            convert=_true,
        ),
        Flag(
            name="numa-binding",
            metavar="KIND",
            default="none",
            help="bind workers to CPUs near their GPU: node, socket, exclusive or core-complex",
            setting="numa_binding",
            pet=False,
        ),
    ),
    Group.ACCEPTED: (
        Flag(name="node-rank", metavar="N", help="raylaunch assigns the node ranks", number_type=int),
        Flag(name="rdzv-backend", metavar="NAME", help=_NO_RENDEZVOUS),
        Flag(name="rdzv-endpoint", metavar="HOST:PORT", help=_NO_RENDEZVOUS),
        Flag(name="local-addr", metavar="ADDRESS", help="Ray knows the address of each node"),
        Flag(
            name="monitor-interval",
            metavar="SECONDS",
            help="raylaunch is notified of exits and does not poll",
            number_type=float,
        ),
        Flag(name="use-env", help="LOCAL_RANK is always set in the environment", pet=False),
    ),
    Group.OURS: (
        Flag(name="plan", help="show which node would run which ranks, and why not others; start nothing", pet=False),
        Flag(name="set", metavar="KEY=VALUE", help="set any key of a job file; may be repeated", pet=False),
        Flag(
            name="show",
            metavar="RANKS",
            default="raw; job file: 0",
            help="ranks shown on the terminal: 0,3, all or none; raw: all, no prefix",
            setting="show",
            pet=False,
        ),
        Flag(
            name="debug",
            metavar="RANK",
            help="give this rank the terminal, for breakpoint() and pdb",
            setting="debug",
            pet=False,
        ),
        Flag(name="pty", help="rank 0 writes to a terminal, in colour", setting="pty", convert=_true, pet=False),
        Flag(
            name="progress",
            metavar="KIND",
            default="auto",
            help="auto: live on a terminal, else a line each minute; line: each minute; off",
            setting="progress",
            pet=False,
        ),
        Flag(
            name="signals-to-forward",
            metavar="NAMES",
            default="none",
            help="signals that are sent to all workers and do not stop the run: SIGUSR1,SIGUSR2",
            setting="signals_to_forward",
            convert=_list,
            pet=False,
        ),
        Flag(
            name="pass-local-rank", help="pass --local-rank=N to the script, as torch.distributed.launch did", pet=False
        ),
        Flag(
            name="keep-warm",
            metavar="SECONDS",
            default="0",
            help="keep agents this long for the next run; `raylaunch ps --end` ends them",
            setting="keep_warm",
            pet=False,
        ),
        Flag(
            name="detach",
            short="d",
            help="run in the background, and outlive this command: see `raylaunch attach`",
            setting="detach",
            convert=_true,
            pet=False,
        ),
        Flag(name="no-wait", help="with `-d`: do not wait until the workers have started", pet=False),
        Flag(name="version", help="show the versions that a bug report needs, and exit", pet=False),
        Flag(name="json", help="with `--version`: as a JSON object", pet=False),
        Flag(name="help", short="h", help="show this help and exit", pet=False),
    ),
}
TABLE[Group.KEYS] = _key_flags({flag.name for flags in TABLE.values() for flag in flags})

FLAGS = tuple(flag for flags in TABLE.values() for flag in flags)
BY_NAME = {flag.name: flag for flag in FLAGS}
BY_SHORT = {flag.short: flag for flag in FLAGS if flag.short}


def matching_flags(name: str) -> list[Flag]:
    """Return the flags with this name or prefix; several flags if the prefix is ambiguous.

    Where a prefix fits one of torchrun's flags and some of raylaunch's own, only torchrun's is returned, so that
    torchrun's command lines keep their meaning. The flags of keys have no prefixes: `--gpus 2` of other launchers
    starts two workers, and would give one worker two GPUs.
    """
    name = name.replace("_", "-")
    if name in BY_NAME:
        return [BY_NAME[name]]
    found = [flag for flag in FLAGS if name and flag.name.startswith(name) and flag not in TABLE[Group.KEYS]]
    torchruns = [flag for flag in found if flag not in TABLE[Group.OURS] and flag.name != "use-env"]
    return torchruns if len(torchruns) == 1 else found

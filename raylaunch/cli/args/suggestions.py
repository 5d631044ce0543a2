"""What was probably meant by words and flags that other launchers have, and by a command in one text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches

from raylaunch.cli.args import subcommands
from raylaunch.core.job import secrets

_WRAPPERS = ("run", "launch", "start", "exec", "submit", "python", "python3", "torchrun", "accelerate", "deepspeed")
"""Words before the script in other launchers, which raylaunch does not have."""
_COMMANDS = ("check", *subcommands.BY_NAME)
_OTHER_WORDS = {
    "help": "write `raylaunch --help`",
    "version": "write `raylaunch --version`",
    "list": "did you mean `raylaunch ps`?",
    "ls": "did you mean `raylaunch ps`?",
    "kill": "did you mean `raylaunch stop`?",
    "cancel": "did you mean `raylaunch stop`?",
}
_WORKERS = "`--nproc-per-node N` starts N workers on each node, `--nprocs N` starts N in all"
_JOB_FILE = "name the job file without a flag: `raylaunch conf/job.yaml`"
_FOREIGN_FLAGS = {
    **dict.fromkeys(("-n", "-np", "--num-processes", "--ntasks", "--num-procs"), _WORKERS),
    **dict.fromkeys(("--num-workers", "--workers", "--world-size"), _WORKERS),
    **dict.fromkeys(("-N", "--num-machines", "--num-nodes", "--nodes"), "did you mean `--nnodes`?"),
    **dict.fromkeys(("--num-gpus", "--gpus", "--gpus-per-node"), "did you mean `--nproc-per-node`?"),
    **dict.fromkeys(("--ntasks-per-node", "--nproc-per-machine"), "did you mean `--nproc-per-node`?"),
    **dict.fromkeys(("-c", "-f", "--config", "--config-file"), _JOB_FILE),
    **dict.fromkeys(("-H", "--hostfile", "--hosts"), "raylaunch uses the nodes of the Ray cluster; see `--plan`"),
    "--dry-run": "did you mean `--plan`?",
    "--machine-rank": "did you mean `--node-rank`?",
    "--main-process-ip": "did you mean `--master-addr`?",
    "--main-process-port": "did you mean `--master-port`?",
    "--address": "did you mean `--ray.address HOST:PORT`?",
    "--working-dir": "did you mean `--ray.working-dir DIR`?",
    **dict.fromkeys(("-e", "--environment"), "did you mean `--env NAME=VALUE`?"),
    **dict.fromkeys(("--max-retries", "--retries", "--restarts"), "did you mean `--max-restarts`?"),
    **dict.fromkeys(("-v", "--verbose"), "`--show all` shows the output of all ranks, `--version` the versions"),
}
"""Flags of mpirun, srun, accelerate, deepspeed and `ray job submit`."""


def for_flag(written: str) -> str:
    """Return a hint for a flag of another launcher, `""` for an unknown one. A value may follow a single letter."""
    if written.startswith("--"):
        return _FOREIGN_FLAGS.get(written.replace("_", "-").lower(), "")
    return _FOREIGN_FLAGS.get(written.rstrip("=0123456789"), "")


def is_foreign(word: str) -> bool:
    """Whether other launchers have a command of this name, and raylaunch has not."""
    return word in _WRAPPERS or word in _OTHER_WORDS


def for_script(script: str, args: Sequence[object], *, in_file: bool) -> str:
    """Return a hint for a script that does not exist, `""` if nothing is known about its name.

    `in_file`: a job file names it.
    """
    if script in _OTHER_WORDS:
        return _OTHER_WORDS[script]
    if script in _WRAPPERS:
        return f"write `raylaunch {_first_of(args)}`"
    if not in_file and re.match(r"[A-Za-z_][\w.]*=", script):
        return f"without a job file, a setting is given as `--set {secrets.cut(script)}`"
    words = split(script)
    if len(words) > 1 and words[0].endswith((".py", "python", "python3")):
        return separated(words, in_file=in_file)
    close = get_close_matches(script.lower(), _COMMANDS, n=1, cutoff=0.75)
    return f"did you mean `raylaunch {close[0]}`?" if close else ""


def _first_of(args: Sequence[object]) -> str:
    """Return the script or module that these arguments of a wrapper begin with."""
    words = [str(argument) for argument in args]
    if words and words[0] in ("run", "launch"):
        words = words[1:]
    if len(words) > 1 and words[0] == "-m":
        return f"-m {secrets.cut(words[1])}"
    return next((secrets.cut(word) for word in words if not word.startswith("-")), "train.py")


def separated(words: Sequence[str], *, in_file: bool) -> str:
    """Return how a command of several words is written in a job file, or on the command line."""
    if not in_file:
        return "leave out the quotes around program and arguments"
    import yaml  # noqa: PLC0415

    key = "command"
    if words[0].rpartition("/")[2] in ("python", "python3") and len(words) > 1 and words[1].endswith(".py"):
        words = words[1:]
    if words[0].endswith(".py"):
        key = "script"
    args = yaml.safe_dump([*map(str, secrets.shown_arguments(words))][1:], default_flow_style=True, width=10_000)
    return f"write `{key}: {words[0]}` and `args: {args.strip()}`"


def split(text: str) -> list[str]:
    """Return the words of a command, as a shell would."""
    try:
        return shlex.split(text)
    except ValueError:  # a quote is never closed
        return text.split()

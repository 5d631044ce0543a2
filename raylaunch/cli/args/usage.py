"""The texts of `--help` and of the short usage."""

from __future__ import annotations

from raylaunch.cli.args import subcommands
from raylaunch.cli.args.flags import TABLE, Group
from raylaunch.cli.args.subcommands import help_line

COMMANDS = (
    ("raylaunch [FLAGS] SCRIPT [ARGS...]", "run a script, as torchrun does"),
    ("raylaunch [FLAGS] JOB.yaml [KEY=VALUE...]", "run a job file"),
    ("raylaunch check [FLAGS] [JOB.yaml [KEY=VALUE...]]", "test that the cluster computes and communicates"),
    *((command.synopsis, command.summary) for command in subcommands.TABLE),
)
"""All command lines, and what each does in a few words."""
USAGE = "usage: " + "       ".join(f"{line:50} {summary}\n" for line, summary in COMMANDS)

_HEAD = """
Run a PyTorch script on the nodes of a Ray cluster, or on this machine if no cluster is running. The flags are
torchrun's. Each may be written with dashes or underscores (--nproc-per-node, --nproc_per_node), shortened to an
unambiguous prefix (--nproc), and given as --flag VALUE or --flag=VALUE. Everything after the script is passed to the
script. After a job file, flags and KEY=VALUE may be given in any order, and `-- ARGS` replaces the script's
arguments. Each key of a job file is a flag, too. The command line overrides the job file. The job file overrides the
environment, in which PET_<NAME> sets the default of a torchrun flag.
"""

_NOTES = {
    Group.ACCEPTED: "flags of torchrun; a note says what happens instead",
    Group.OURS: "not in torchrun",
    Group.KEYS: "the same with `--set KEY=VALUE`; times are in seconds",
}

_TAIL = """\
Exit codes:
  0         all workers finished
  1         the job failed, and its restarts are used up
  2         the command line or the job file is wrong; nothing was started
  3         the cluster cannot be reached, or did not provide the requested nodes in time
  4         internal error: a bug in raylaunch
  75        stopped in time, since the job's time is over: start it again, and it goes on
  93        the job failed, and would fail in the same way again: do not start it again
  128 + n   stopped by signal n: 130 for SIGINT, 143 for SIGTERM

Examples:
  raylaunch --nnodes 1:4 --nproc-per-node 8 --max-restarts 3 train.py --lr 3e-4
  raylaunch --standalone --nproc-per-node gpu -m package.train
  raylaunch conf/job.yaml nproc_per_node=8 --max-restarts 5 -- --lr 3e-4
  raylaunch --plan --nnodes 2 --nproc-per-node 8 train.py
  raylaunch check --nnodes 2 --nproc-per-node 8
"""

_WIDTH = 32


def full() -> str:
    """Return the text of `--help`."""
    parts = [USAGE, _HEAD]
    for group in Group:
        title = f"{group.value} ({_NOTES[group]})" if group in _NOTES else group.value
        lines = [help_line(flag, _WIDTH) for flag in TABLE[group]]
        parts.append("\n" + "\n".join([f"{title}:", *lines]) + "\n")
    return "".join([*parts, "\n", _TAIL])

"""`--help`, the short usage, and the README's table of flags, all from the table of flags."""

from __future__ import annotations

from raylaunch.cli.flags import TABLE, Flag, Group

USAGE = """\
usage: raylaunch [FLAGS] SCRIPT [ARGS...]                 as `torchrun`, on a Ray cluster
       raylaunch [FLAGS] JOB.yaml [KEY=VALUE...]          what a job file says
       raylaunch check [FLAGS] [JOB.yaml [KEY=VALUE...]]  whether the cluster computes and communicates
       raylaunch status [--end]                           what `keep_warm` keeps on this machine
"""

_HEAD = """
Run a PyTorch script on the nodes of a Ray cluster, or on this machine if there is none. Flags are torchrun's, in
both spellings (--nproc-per-node, --nproc_per_node), with any unambiguous beginning (--nproc), as --flag VALUE or
--flag=VALUE. All that follows the script is the script's. After a job file, flags and KEY=VALUE may stand in any
order, and `-- WORDS` replace the script's arguments. The command line beats the job file, which beats the
environment: torchrun's flags take their defaults from PET_<NAME>.
"""

_WHOSE = {
    Group.ACCEPTED: "torchrun's; one line says what is done instead",
    Group.OURS: "not torchrun's",
}

_TAIL = """\
Exit codes:
  0         all workers finished
  1         the job failed
  2         the command line or the job file is wrong; nothing was started
  3         the cluster cannot be reached, or did not give what was asked
  4         raylaunch is at fault
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
    """The text of `--help`."""
    parts = [USAGE, _HEAD]
    for group in Group:
        title = f"{group.value} ({_WHOSE[group]})" if group in _WHOSE else group.value
        lines = [f"  {_left(flag):{_WIDTH}} {flag.about}{_default(flag)}" for flag in TABLE[group]]
        parts.append("\n" + "\n".join([f"{title}:", *lines]) + "\n")
    return "".join([*parts, "\n", _TAIL])


def table() -> str:
    """The table of flags in the README, in Markdown."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for group in Group:
        whose = {Group.ACCEPTED: "accepted, without effect: ", Group.OURS: "raylaunch's own: "}.get(group, "")
        for flag in TABLE[group]:
            name = _left(flag).strip().replace("|", "\\|")
            about = flag.about.replace("|", "\\|")
            default = f"`{flag.default}`" if flag.default and " " not in flag.default else flag.default
            lines.append(f"| `{name}` | {default} | {whose}{about} |")
    return "\n".join(lines) + "\n"


def _left(flag: Flag) -> str:
    short = f"-{flag.short}, " if flag.short else ""
    return f"{short}{flag.spelled} {flag.takes}".rstrip()


def _default(flag: Flag) -> str:
    return f" [{flag.default}]" if flag.default else ""

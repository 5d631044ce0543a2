"""The table of subcommands that work on runs, the parser of their arguments, and their `--help`.

They have no script whose arguments could be confused with theirs, so argparse parses them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from raylaunch.cli.args.flags import Flag, matching_flags
from raylaunch.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """A command on runs, such as `raylaunch ps`."""

    name: str
    summary: str
    """What it does, in a few words for the list of all commands."""
    help: str
    flags: tuple[Flag, ...]
    takes_run: bool = True
    """Whether an argument may name a run."""
    other: str = ""
    """What an argument may be in the place of a run; "": nothing."""
    takes_settings: bool = False
    """Whether `KEY=VALUE` may follow that argument."""
    rest: str = ""
    """What may follow `--`; "": nothing."""
    operand: str = ""
    """What the argument before it is, such as `NODE`; "": there is none."""

    @property
    def usage(self) -> str:
        """The command line that its help and its errors show, such as `raylaunch status [FLAGS] [RUN]`."""
        return f"raylaunch {self.name} [FLAGS]{self._arguments}"

    @property
    def synopsis(self) -> str:
        """The command line without flags, such as `raylaunch status [RUN]`."""
        return f"raylaunch {self.name}{self._arguments}"

    @property
    def _arguments(self) -> str:
        operand = f" {self.operand}" if self.operand else ""
        argument = self.argument + " [KEY=VALUE...]" * self.takes_settings
        rest = f" [-- {self.rest}...]" if self.rest else ""
        return f"{operand}{f' [{argument}]' if argument else ''}{rest}"

    @property
    def argument(self) -> str:
        """The name of its argument in its usage; "" if it has none."""
        return "RUN" if self.takes_run else self.other


_HELP = Flag(name="help", short="h", help="show this help and exit")
_JSON = Flag(name="json", help="print a JSON object")
_YES = Flag(name="yes", short="y", help="do not ask")
_JSON_AT_THE_END = Flag(name="json", help="print what `raylaunch status --json` prints, when it is done")
_GRACE = Flag(
    name="grace", metavar="SECONDS", default="600", help="how long the workers may take to save; 0: they do not"
)

TABLE = (
    Subcommand(
        name="ps",
        summary="list runs, or end what `keep_warm` keeps",
        help="list the runs in progress, of this user and of the cluster",
        takes_run=False,
        flags=(
            Flag(name="all", short="a", help="list runs that have ended too"),
            Flag(name="last", short="n", metavar="N", default="10", help="at most N runs, the newest; 0: all"),
            Flag(name="watch", short="w", help="on a terminal: refresh it every 2 seconds"),
            _JSON,
            Flag(name="end", help="end the idle agents that `keep_warm` keeps for this user and machine; list nothing"),
            _HELP,
        ),
    ),
    Subcommand(
        name="status",
        summary="show one run: nodes, attempts, and what it waits for",
        help="show one run: its nodes and ranks, its attempts, and what it waits for",
        flags=(
            Flag(name="watch", short="w", help="on a terminal: refresh it every 2 seconds, until the run ends"),
            _JSON,
            _HELP,
        ),
    ),
    Subcommand(
        name="logs",
        summary="print what the workers of a run have written",
        help="print what the workers of a run have written, on all nodes while it lasts, then from its run folder",
        flags=(
            Flag(
                name="follow",
                short="f",
                help="go on over restarts until the run ends; the exit code is the run's",
            ),
            Flag(
                name="tail",
                short="n",
                metavar="N",
                help="the last N lines of each file, or `all`; default: 100, with `--since` all",
            ),
            Flag(
                name="since",
                metavar="TIME",
                help="only lines written since then: `10m` ago (s, m, h, d), or `2026-01-31T09:00:00Z`",
            ),
            Flag(name="timestamps", short="t", help="the time in UTC at which each line was written, or `-`"),
            Flag(name="rank", metavar="RANKS", help="only these ranks: 0,3-5"),
            Flag(name="node", metavar="NODE", help="while the run lasts: only the ranks of this node (`node-2`)"),
            Flag(name="attempt", metavar="N", help="another attempt than the last one"),
            Flag(name="previous", short="p", help="the attempt before the last one"),
            Flag(name="failed", help="the rank whose failure was the root cause, in the last attempt with failures"),
            Flag(name="stdout", help="only stdout"),
            Flag(name="stderr", help="only stderr"),
            Flag(name="grep", metavar="REGEX", help="only lines in which this regular expression is found"),
            Flag(
                name="sync-down",
                metavar="DIR",
                help="copy the files of all attempts and nodes to DIR instead",
            ),
            Flag(name="no-prefix", help="without the rank at the beginning of each line"),
            Flag(name="json", help="print a JSON object for each line"),
            _HELP,
        ),
    ),
    Subcommand(
        name="attach",
        summary="watch a run, such as one that `-d` started",
        help="watch a run and the output of rank 0 until it ends; Ctrl-C detaches; the exit code is the run's",
        flags=(
            Flag(name="since", metavar="TIME", help="the output since then, as for `logs`; default: from now on"),
            Flag(name="rank", metavar="RANKS", default="0", help="the output of these ranks: 0,3-5"),
            _HELP,
        ),
    ),
    Subcommand(
        name="report",
        summary="write what happened in a run as an HTML file",
        help="write the report of a run as an HTML file, also while the run goes on, and print its path",
        flags=(
            Flag(name="output", short="o", metavar="FILE", help="the file; default: `report.html` in the run folder"),
            Flag(name="json", help="print a JSON object instead"),
            Flag(name="open", help="show it in a browser"),
            _HELP,
        ),
    ),
    Subcommand(
        name="stop",
        summary="let a run save, stop it, and wait for its end",
        help="let all workers save at one step, then stop the run, and wait for its end",
        flags=(
            _GRACE,
            Flag(name="now", help="do not wait for the workers: SIGKILL"),
            _YES,
            _JSON_AT_THE_END,
            _HELP,
        ),
    ),
    Subcommand(
        name="restart",
        summary="let a run save, and start its workers again",
        help="let all workers save at one step, then start them again; this spends none of `max_restarts`",
        flags=(_GRACE, Flag(name="now", help="do not save: SIGKILL"), _YES, _JSON_AT_THE_END, _HELP),
    ),
    Subcommand(
        name="resize",
        summary="let a run save, and go on with fewer or more nodes",
        operand="MIN:MAX",
        help="change the bounds of the number of nodes for the rest of the run",
        flags=(_YES, _JSON_AT_THE_END, _HELP),
    ),
    Subcommand(
        name="drain",
        summary="take a node from a run for good",
        operand="NODE",
        help="take a node away for good: its host is not used again; NODE is its name or address in `raylaunch status`",
        flags=(_YES, _JSON_AT_THE_END, _HELP),
    ),
    Subcommand(
        name="stacks",
        summary="print what all workers of a run are doing now",
        help="print at which line of code each worker is now, those at the same line together",
        flags=(Flag(name="rank", metavar="RANKS", help="the whole stacks of these ranks: 0,3-5"), _JSON, _HELP),
    ),
    Subcommand(
        name="doctor",
        summary="look for what is wrong with cluster, nodes and job",
        help="look for what is wrong with the cluster, its nodes and a job, without starting workers",
        takes_run=False,
        other="JOB",
        takes_settings=True,
        flags=(_JSON, _HELP),
    ),
    Subcommand(
        name="slurm",
        summary="write or submit a Slurm script for a job",
        help="write a batch script that runs a job on Slurm, in a Ray cluster of its own, until the job is done",
        takes_run=False,
        other="JOB_FILE",
        takes_settings=True,
        rest="SBATCH_FLAGS",
        flags=(
            Flag(name="submit", help="submit the script by `sbatch` instead of printing it"),
            Flag(
                name="elastic",
                metavar="MIN:MAX",
                help="each node is a Slurm job of its own, which may be taken away, and comes back",
            ),
            Flag(
                name="notice",
                metavar="SECONDS",
                default="30",
                help="the time between Slurm's SIGTERM and SIGKILL, set by GraceTime or KillWait",
            ),
            _HELP,
        ),
    ),
    Subcommand(
        name="completion",
        summary="print a completion script for a shell",
        help="print a script that completes command lines of raylaunch in bash, zsh or fish",
        takes_run=False,
        other="SHELL",
        flags=(_HELP,),
    ),
)
BY_NAME = {command.name: command for command in TABLE}

_RUN = """\
RUN is an id, the beginning of one, a name (of which the newest run is taken), NAME/ID, or a run folder. Without RUN it
is the newest run below this folder, else the newest one. `raylaunch ps -a` lists runs.
"""
_OTHERS = {
    "JOB": """\
JOB is a job file, which KEY=VALUE may follow, or a script. Without it, only the cluster and its nodes are examined.
""",
    "JOB_FILE": """\
SBATCH_FLAGS go into the script, such as `-- --partition gpu --time 4:00:00`; with --elastic, to the jobs of the nodes.
""",
    "SHELL": """\
SHELL is bash, zsh, fish or tcsh. In ~/.bashrc or ~/.zshrc:

  eval "$(raylaunch completion bash)"
  eval "$(raylaunch completion zsh)"

and in ~/.config/fish/config.fish: `raylaunch completion fish | source`. tcsh completes flags and files only.
""",
}
"""What an argument is that names no run."""


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} --help` lists its flags")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a subcommand, of which the first is its name. Raises ConfigError.

    The result has `command` (the `Subcommand`), `run` (None: not given), `rest` (what follows `--`), and each flag by
    its name: True or False for a switch, else a string.
    """
    command = BY_NAME[argv[0]]
    parser = _ArgumentParser(prog=f"raylaunch {command.name}", add_help=False)
    for flag in command.flags:
        names = [*([f"-{flag.short}"] if flag.short else []), flag.option]
        if flag.metavar:
            parser.add_argument(*names, metavar=flag.metavar, default=flag.default)
        else:
            parser.add_argument(*names, action="store_true")
    if command.operand:
        parser.add_argument("operand", metavar=command.operand, nargs="?")
    if command.argument:
        parser.add_argument(command.argument.lower(), metavar=command.argument, nargs="?")
    if command.takes_settings:
        parser.add_argument("settings", nargs="*")
    words = list(argv[1:])
    split = words.index("--") if command.rest and "--" in words else len(words)
    found, unknown = parser.parse_known_intermixed_args(words[:split])
    if unknown and not found.help:
        raise _unknown(command, unknown[0])
    if command.operand and found.operand is None and not found.help:
        raise ConfigError(f"`{command.name}` needs {command.operand}", hint=f"write `{command.usage}`")
    found.command, found.rest = command, words[split + 1 :]
    return found


def _unknown(command: Subcommand, argument: str) -> ConfigError:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return ConfigError(f"`{command.name}` does not take `{argument}`", hint=f"write `{command.usage}`")
    others = [f"`raylaunch {other.name}`" for other in TABLE if flag in {each.option for each in other.flags}]
    close = get_close_matches(flag, [each.option for each in command.flags], n=1, cutoff=0.7)
    hint = f"did you mean `{close[0]}`?" if close else f"it is a flag of {' and '.join(others)}" if others else ""
    if command.takes_settings and (of_jobs := [each for each in matching_flags(flag[2:]) if each.setting]):
        setting = f"{of_jobs[0].setting}={'VALUE' if of_jobs[0].metavar else of_jobs[0].convert('')}"
        hint = hint or f"settings go after a job file: `raylaunch {command.name} job.yaml {setting}`"
    hint = hint or f"`raylaunch {command.name} --help` lists its flags"
    return ConfigError(f"`{flag}` is not a flag of `{command.name}`", hint=hint)


def full(command: Subcommand) -> str:
    """Return the text of its `--help`."""
    lines = [f"usage: {command.usage}", "", f"{command.help[0].upper()}{command.help[1:]}.", ""]
    lines += [help_line(flag, 20) for flag in command.flags]
    note = _RUN if command.takes_run else _OTHERS.get(command.other)
    return "\n".join([*lines, *(["", note] if note else [""])])


def signature(flag: Flag) -> str:
    """Return how a flag is written, with its short form and the name of its value."""
    short = f"-{flag.short}, " if flag.short else ""
    return f"{short}{flag.option} {flag.metavar}".rstrip()


def help_line(flag: Flag, width: int) -> str:
    """Return the line of a flag in `--help`. `width`: of the column with its name."""
    default = f" [{flag.default}]" if flag.default else ""
    return f"  {signature(flag):{width}} {flag.help}{default}"

"""What each subcommand does: a function that gets its arguments and returns the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone

from raylaunch.cli import completion
from raylaunch.cli.args import flag_values, subcommands
from raylaunch.cli.completion import Candidate
from raylaunch.cli.run_once import say
from raylaunch.cli.runs import attach, follow_logs, known_runs, run_requests, run_tables
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import RunSummary, summary
from raylaunch.core.job.job import RayOptions
from raylaunch.core.text import count, printable
from raylaunch.errors import ConfigError, ExitCode, signal_exit_code
from raylaunch.node.linux import procfs

_WATCH_SECONDS = 2.0
_MOST_ASKED = 16
"""How many runs are looked at at the same time."""
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the subcommand that the first argument names, and return its exit code. Raises ConfigError."""
    try:
        code = _code(argv, environ)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return signal_exit_code(signal.SIGPIPE)
    return code


def _code(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    if list(argv[:2]) == ["completion", "--words"]:  # they are another command line, and not for argparse
        return _candidates(argv[2:], environ)
    arguments = subcommands.parse(argv)
    if arguments.help:
        print(subcommands.full(arguments.command), end="")
        return ExitCode.OK
    name = arguments.command.name
    if name in _OF_A_RUN:
        return _OF_A_RUN[name](known_runs.find(arguments.run, environ), arguments)
    if name in _CHANGES:
        return _CHANGES[name](known_runs.find_to_change(arguments.run, environ), arguments)
    return _OTHERS[name](arguments, environ)


def _ps(arguments: Namespace, environ: Mapping[str, str]) -> int:
    if arguments.end:
        return _end_idle_agents()
    most = flag_values.number(arguments.last, "--last")
    if _is_json(arguments):
        runs = [asdict(run) for run in _summaries(environ, every=arguments.all)]
        print(json.dumps({"runs": runs[: most or None]}, indent=2))
        return ExitCode.OK
    return _shown(arguments, lambda: (_ps_text(environ, most, every=arguments.all), False))


def _end_idle_agents() -> int:
    from raylaunch.cluster.run import end_idle_agents  # noqa: PLC0415, it needs Ray

    number = end_idle_agents(RayOptions())
    print(f"{count(number, 'idle agent')} ended" if number else "there are no idle agents of this user and machine")
    return ExitCode.OK


def _summaries(environ: Mapping[str, str], *, every: bool) -> list[RunSummary]:
    known = [run for run in known_runs.all_runs(environ) if every or run.entry.exit_code is None]
    with ThreadPoolExecutor(_MOST_ASKED) as pool:  # a driver may take seconds to answer, or not to
        found = list(pool.map(_summary, known))
    for run in known_runs.forget_lost(known):
        say(f"{run.entry.title} of {run.entry.user or 'somebody'} is lost: its driver is gone; it is listed no more")
    return [run for run in found if every or not run.is_over]


def _summary(run: RunReader) -> RunSummary:
    shown = summary(run)
    run.close()
    return shown


def _ps_text(environ: Mapping[str, str], most: int, *, every: bool) -> str:
    runs = _summaries(environ, every=every)
    shown = runs[: most or None]
    now, host, user = datetime.now(timezone.utc), socket.gethostname(), procfs.user_name()
    text = run_tables.table(shown, now, host, user) if shown else _nothing(every=every)
    if len(shown) < len(runs):
        text += f"{len(runs) - len(shown)} more: `-n 0` lists all\n"
    return text


def _nothing(*, every: bool) -> str:
    return "there is no run yet\n" if every else "no run is going on; `raylaunch ps -a` lists those that ended\n"


def _status(arguments: Namespace, environ: Mapping[str, str]) -> int:
    run = known_runs.find(arguments.run, environ)
    if _is_json(arguments):
        print(json.dumps(asdict(summary(run)), indent=2))
        return ExitCode.OK
    return _shown(arguments, lambda: _status_text(run), run.wait)


def _status_text(run: RunReader) -> tuple[str, bool]:
    shown = summary(run)
    return run_tables.page(shown, run.status()), shown.is_over


def _report(arguments: Namespace, environ: Mapping[str, str]) -> int:
    from raylaunch.cli.runs import show_report  # noqa: PLC0415, its template engine takes a while to import

    return show_report.show(known_runs.find(arguments.run, environ), arguments, environ)


def _doctor(arguments: Namespace, environ: Mapping[str, str]) -> int:
    from raylaunch.cli.doctor import examination  # noqa: PLC0415

    return examination.doctor(arguments, environ)


def _slurm(arguments: Namespace, environ: Mapping[str, str]) -> int:
    from raylaunch.cli.slurm import batch_script  # noqa: PLC0415

    return batch_script.slurm(arguments, environ)


def _completion(arguments: Namespace, environ: Mapping[str, str]) -> int:
    del environ
    if arguments.shell not in completion.SCRIPTS:
        what = f"there is no completion for `{arguments.shell}`" if arguments.shell else "which shell is it for?"
        raise ConfigError(what, hint=completion.HINT)
    print(completion.SCRIPTS[arguments.shell], end="")
    return ExitCode.OK


def _candidates(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print what may come next on a command line, for the script of a shell."""

    def runs() -> Iterator[Candidate]:
        with contextlib.suppress(ConfigError):
            known = known_runs.all_runs(environ)
            yield from (Candidate(run.entry.id, run.entry.name) for run in known)
            yield from (
                Candidate(name, "the newest of this name") for name in dict.fromkeys(run.entry.name for run in known)
            )

    def nodes() -> Iterator[Candidate]:
        with contextlib.suppress(ConfigError):
            reader = known_runs.find(None, environ)
            reader.refresh()
            status = reader.status()
            yield from (Candidate(node.name, node.address) for node in (status.nodes if status is not None else ()))

    names = completion.Names(runs=runs, nodes=nodes)
    for line in completion.lines(words, names):
        print(printable(line) if "\t" not in line else "\t".join(map(printable, line.split("\t"))))
    return ExitCode.OK


# What several of them do.


def _is_json(arguments: Namespace) -> bool:
    if arguments.json and arguments.watch:
        raise ConfigError("`--json` and `--watch` exclude each other", hint="remove one of them")
    return bool(arguments.json)


def _shown(
    arguments: Namespace, text: Callable[[], tuple[str, bool]], wait: Callable[[float], None] | None = None
) -> int:
    """Print a text, with `--watch` again and again. `text` also returns whether it will not change any more.

    `wait` takes the seconds to wait before the next time. It returns earlier if there is news.
    """
    if not arguments.watch:
        print(text()[0], end="")
        return ExitCode.OK
    if not sys.stdout.isatty():
        raise ConfigError("`--watch` needs a terminal", hint="without it the command prints once")
    try:
        is_final = False
        while not is_final:
            shown, is_final = text()
            width, height = shutil.get_terminal_size()
            lines = [line[: width - 1] for line in shown.splitlines()[: height - 1]]
            print(_CLEAR + "\n".join(lines), flush=True)
            if not is_final:
                (wait or time.sleep)(_WATCH_SECONDS)
    except KeyboardInterrupt:
        print()
    return ExitCode.OK


_OF_A_RUN: Mapping[str, Callable[[RunReader, Namespace], int]] = {
    "logs": follow_logs.show,
    "attach": attach.attach,
    "stacks": run_requests.stacks,
}
_CHANGES: Mapping[str, Callable[[RunReader, Namespace], int]] = {
    "stop": run_requests.stop,
    "restart": run_requests.restart,
    "resize": run_requests.resize,
    "drain": run_requests.drain,
}
_OTHERS: Mapping[str, Callable[[Namespace, Mapping[str, str]], int]] = {
    "ps": _ps,
    "status": _status,
    "report": _report,
    "doctor": _doctor,
    "slurm": _slurm,
    "completion": _completion,
}

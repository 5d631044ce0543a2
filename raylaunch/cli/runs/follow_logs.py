"""The command `raylaunch logs`: chooses attempt and ranks, and follows a run over its restarts until it ends."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from raylaunch.cli.run_once import say
from raylaunch.cli.runs.known_runs import KnownRun
from raylaunch.cli.runs.run_summary import RunSummary, summary
from raylaunch.cli.runs.worker_logs import AttemptLogs, LogChoice
from raylaunch.core.failures.failure import root_cause
from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.record.run_layout import LAYOUTS
from raylaunch.core.text import count
from raylaunch.errors import ConfigError, ExitCode

_POLL_SECONDS = 0.25
_NODES_PER_SECOND = 200
"""So many nodes are asked in a second, at most, by one who follows a run."""
_MOST_DIGITS = 9
_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def show(run: KnownRun, arguments: Namespace) -> int:
    """Print the chosen lines, and follow the run if that is asked for. Raises ConfigError."""
    choice = _choice(arguments)
    others = [name for name in ("attempt", "previous", "failed") if getattr(arguments, name)]
    if arguments.sync_down and (others or arguments.follow or arguments.grep):
        msg = "`--sync-down` copies the files of all attempts whole"
        raise ConfigError(msg, hint="it goes with `--rank`, `--node`, `--stdout` and `--stderr`")
    if len(others) > 1 or (others and arguments.follow) or (arguments.failed and arguments.rank):
        named = "`--attempt`, `--previous`, `--failed` and `--follow`"
        raise ConfigError(f"{named} exclude each other, and so do `--failed` and `--rank`", hint="remove one of them")
    run.reader.refresh()
    status = run.reader.status()
    if status is None or not run.reader.has_logs:
        why = run.reader.problem or "nothing was written yet"
        raise ConfigError(f"there are no logs of {run.title}: {why}", hint="`log_dir` says where a run keeps them")
    if arguments.sync_down:
        return _copy(run, choice, Path(arguments.sync_down), status)
    if arguments.follow:
        return _Follower(run, choice).follow()
    attempt = _attempt(arguments, status)
    if arguments.failed:
        failures = [failure for each in status.result.attempts if each.number == attempt for failure in each.failures]
        failure = root_cause(failures)
        if failure is None:
            say(f"no worker of {run.title} has failed")
            return ExitCode.OK
        say(f"rank {failure.rank} on {failure.node} {failure.what} (attempt {attempt})")
        choice = replace(choice, ranks=(range(failure.rank, failure.rank + 1),))
    found = attempt_logs(run, choice, attempt, status)
    _write(found.last(whole=True))
    if found.is_empty:
        say(f"there are no such files of attempt {attempt} in {run.folder}; each node keeps those of its own ranks")
    if found.missing:
        say(f"{', '.join(found.missing)} did not answer: the logs there are missing here")
    return ExitCode.OK


def _copy(run: KnownRun, choice: LogChoice, folder: Path, status: RunStatus) -> int:
    """Copy the logs of all attempts to a folder. Raises ConfigError."""
    layout = LAYOUTS[run.reader.log_layout]
    copied, missing = 0, set[str]()
    try:
        for attempt in range(1, status.attempt + 1):
            found = attempt_logs(run, choice, attempt, status)
            copied += found.copy(folder, layout)
            missing |= set(found.missing)
    except OSError as error:
        raise ConfigError(f"cannot copy the logs to {folder}: {error}", hint="name a folder with room") from None
    say(f"copied {count(copied, 'log file')} of {run.title} to {folder}")
    if missing:
        say(f"{', '.join(sorted(missing))} did not answer: the logs there are missing here")
    return ExitCode.OK


def _choice(arguments: Namespace) -> LogChoice:
    """Return what the flags choose. Raises ConfigError."""
    streams = [name for name in ("stdout", "stderr") if getattr(arguments, name)]
    tail = arguments.tail
    if tail != "all" and not (tail.isascii() and tail.isdigit() and len(tail) <= _MOST_DIGITS):
        raise ConfigError(f"`--tail` must be a number or `all`, but is `{tail}`", hint="write `--tail 100`")
    try:
        pattern = re.compile(os.fsencode(arguments.grep)) if arguments.grep else None
    except (re.error, UnicodeEncodeError) as error:
        raise ConfigError(
            f"`{arguments.grep}` is no regular expression: {error}", hint="`re` of Python has them"
        ) from None
    return LogChoice(
        streams=streams or ["stdout", "stderr"],
        ranks=ranks_of(arguments.rank) if arguments.rank else None,
        lines=None if tail == "all" else int(tail),
        pattern=pattern,
        is_prefixed=not arguments.no_prefix,
        node=arguments.node or "",
    )


def ranks_of(text: str) -> tuple[range, ...]:
    """Return the ranks that `--rank` names. Raises ConfigError."""
    found = [_RANKS.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"`{text}` is not a list of ranks", hint="write `--rank 0,3-5`")
    return tuple(range(int(part[1]), int(part[2] or part[1]) + 1) for part in found if part)


def _attempt(arguments: Namespace, status: RunStatus) -> int:
    """Return the number of the attempt whose logs are shown. Raises ConfigError."""
    if arguments.failed:
        return max(
            (each.number for each in status.result.attempts if root_cause(each.failures)), default=status.attempt
        )
    text = str(status.attempt - 1) if arguments.previous else arguments.attempt or str(status.attempt)
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and 1 <= int(text) <= status.attempt):
        what = "there is no attempt before the last one" if arguments.previous else f"there is no attempt {text}"
        raise ConfigError(what, hint=f"the run has had {count(status.attempt, 'attempt')}")
    return int(text)


def attempt_logs(run: KnownRun, choice: LogChoice, attempt: int, status: RunStatus) -> AttemptLogs:
    """Return the chosen files of an attempt. `status`: that of the run, which has been read."""
    sizes = {each.number: each.world_size for each in status.result.attempts}
    return AttemptLogs(run.reader, choice, attempt, sizes.get(attempt) or status.world_size)


def _write(lines: Iterable[bytes]) -> None:
    """Write lines to stdout, of which the last one may lack its end."""
    for line in lines:
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


class _Follower:
    """Prints the logs of a run while they grow, attempt by attempt."""

    def __init__(self, run: KnownRun, choice: LogChoice) -> None:
        self._run = run
        self._choice = choice
        self._attempt = 0
        #: Those of the present attempt; None: there is none yet.
        self._logs: AttemptLogs | None = None

    def follow(self) -> int:
        """Follow the run until it ends, and return its exit code; 130 on Ctrl-C, which does not end the run."""
        try:
            while not (shown := self._step()).is_over:
                self._run.reader.wait(max(_POLL_SECONDS, shown.nodes / _NODES_PER_SECOND))
        except KeyboardInterrupt:
            say(f"{self._run.title} goes on; `raylaunch stop {self._run.id}` stops it")
            return ExitCode.INTERRUPTED
        _write(self._logs.rest() if self._logs is not None else ())
        self._run.reader.close()
        code = ExitCode.INTERNAL if shown.exit_code is None else shown.exit_code
        ended = shown.state if shown.exit_code is None else f"{shown.state} with exit code {code}"
        say(f"{self._run.title}: {ended}: {shown.why}")
        return code

    def _step(self) -> RunSummary:
        """Print what is new, after a look at the status: what was written before the end of the run is shown."""
        shown = summary(self._run, datetime.now(timezone.utc))
        status = self._run.reader.status()
        if status is not None and status.attempt:
            if self._logs is None:
                self._logs, self._attempt = self._of(status.attempt, status), status.attempt
                _write(self._logs.last(whole=False))
            _write(self._logs.more())
            while self._attempt < status.attempt:
                _write(self._logs.rest())
                self._attempt += 1
                self._logs = self._of(self._attempt, status)
                say(f"attempt {self._attempt} begins")
                _write(self._logs.more())
        return shown

    def _of(self, attempt: int, status: RunStatus) -> AttemptLogs:
        return attempt_logs(self._run, self._choice, attempt, status)

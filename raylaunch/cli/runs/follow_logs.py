"""The command `raylaunch logs`: chooses attempt and ranks, and follows a run over its restarts until it ends."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from raylaunch.cli.args import flag_values
from raylaunch.cli.args.flag_values import is_whole
from raylaunch.cli.run_once import say
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import RunSummary, seconds_since, summary
from raylaunch.cli.runs.worker_logs import AttemptLogs, LogChoice
from raylaunch.core.failures.failure import root_cause
from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.machine.state import Phase
from raylaunch.core.record.run_layout import LAYOUTS, LOGS
from raylaunch.core.text import count, host_list
from raylaunch.errors import ConfigError, ExitCode

_POLL_SECONDS = 0.25
_NODES_PER_SECOND = 200
"""How many nodes a command that follows a run asks in a second, at most."""
_RESULT_SECONDS = 30.0
"""How long one who has followed a run waits for its result, which the driver writes when its agents have ended."""
_TAIL = "100"
"""The value of `--tail` by default, without `--since`."""


def show(run: RunReader, arguments: Namespace) -> int:
    """Print the chosen lines, and follow the run if that is asked for. Raises ConfigError."""
    choice = _choice(arguments)
    others = [name for name in ("attempt", "previous", "failed") if getattr(arguments, name)]
    shaped = [name for name in ("follow", "grep", "since", "timestamps", "json") if getattr(arguments, name)]
    if arguments.sync_down and (others or shaped):
        msg = "`--sync-down` copies the files of all attempts whole"
        raise ConfigError(msg, hint="it goes with `--rank`, `--node`, `--stdout` and `--stderr`")
    if len(others) > 1 or (others and arguments.follow) or (arguments.failed and arguments.rank):
        named = "`--attempt`, `--previous`, `--failed` and `--follow`"
        raise ConfigError(f"{named} exclude each other, and so do `--failed` and `--rank`", hint="remove one of them")
    run.refresh()
    status = run.status()
    if status is None or not run.has_logs:
        why = run.problem or "nothing was written yet"
        raise ConfigError(
            f"there are no logs of {run.entry.title}: {why}", hint="`log_dir` says where a run keeps them"
        )
    if arguments.sync_down:
        return _copy(run, choice, Path(arguments.sync_down), status)
    if arguments.follow:
        return LogFollower(run, choice).follow()
    attempt = _attempt(arguments, status)
    if arguments.failed:
        failures = [failure for each in status.result.attempts if each.number == attempt for failure in each.failures]
        failure = root_cause(failures)
        if failure is None:
            say(f"no worker of {run.entry.title} has failed")
            return ExitCode.OK
        say(f"rank {failure.rank} on {failure.node} {failure.what} (attempt {attempt})")
        choice = replace(choice, ranks=(range(failure.rank, failure.rank + 1),))
    found = attempt_logs(run, choice, attempt, status)
    _write(found.last(whole=True))
    if found.is_empty:
        where = f"attempt {attempt} in {run.entry.folder}"
        say(f"there are no such files of {where}; each node keeps the files of its own ranks")
    if found.missing:
        say(f"{host_list(found.missing)} did not answer: the logs there are missing here")
    return ExitCode.OK


def _copy(run: RunReader, choice: LogChoice, folder: Path, status: RunStatus) -> int:
    """Copy the logs of all attempts to a folder. Raises ConfigError."""
    layout = LAYOUTS[run.log_layout]
    copied, missing = 0, set[str]()
    try:
        for attempt in range(1, status.attempt + 1):
            found = attempt_logs(run, choice, attempt, status)
            copied += found.copy(folder, layout)
            missing |= set(found.missing)
    except OSError as error:
        raise ConfigError(f"cannot copy the logs to {folder}: {error}", hint="name a folder with room") from None
    say(f"copied {count(copied, 'log file')} of {run.entry.title} to {folder}")
    if missing:
        say(f"{host_list(sorted(missing))} did not answer: the logs there are missing here")
    return ExitCode.OK


def _choice(arguments: Namespace) -> LogChoice:
    """Return what the flags choose. Raises ConfigError."""
    streams = [name for name in ("stdout", "stderr") if getattr(arguments, name)]
    since = arguments.since and flag_values.time_since(arguments.since)
    tail = arguments.tail or ("all" if since else _TAIL)
    try:
        pattern = re.compile(os.fsencode(arguments.grep)) if arguments.grep else None
    except (re.error, UnicodeEncodeError) as error:
        raise ConfigError(
            f"`{arguments.grep}` is no regular expression: {error}", hint="`re` of Python has them"
        ) from None
    return LogChoice(
        streams=streams or ["stdout", "stderr"],
        ranks=flag_values.ranks(arguments.rank) if arguments.rank else None,
        lines=flag_values.number_or_all(tail),
        pattern=pattern,
        is_prefixed=not arguments.no_prefix,
        has_times=arguments.timestamps,
        is_json=arguments.json,
        node=arguments.node or "",
        since=since or None,
    )


def _attempt(arguments: Namespace, status: RunStatus) -> int:
    """Return the number of the attempt whose logs are shown. Raises ConfigError."""
    if arguments.failed:
        return max(
            (each.number for each in status.result.attempts if root_cause(each.failures)), default=status.attempt
        )
    if not status.attempt:
        raise ConfigError("the run has no logs of workers: none have run in it", hint="`raylaunch status` tells why")
    text = str(status.attempt - 1) if arguments.previous else arguments.attempt or str(status.attempt)
    if not (is_whole(text) and 1 <= int(text) <= status.attempt):
        what = "there is no attempt before the last one" if arguments.previous else f"there is no attempt {text}"
        raise ConfigError(what, hint=f"the run has had {count(status.attempt, 'attempt')}")
    return int(text)


def attempt_logs(run: RunReader, choice: LogChoice, attempt: int, status: RunStatus) -> AttemptLogs:
    """Return the chosen files of an attempt. `status`: the status of the run, as just read."""
    sizes = {each.number: each.world_size for each in status.result.attempts}
    return AttemptLogs(run, choice, attempt, sizes.get(attempt) or status.world_size)


def text(run: RunReader, ranks: int | Iterable[int] | None, attempt: int | None, tail: int | None) -> str:
    """Return what workers have written, stdout and stderr, by rank; `""` if nothing is kept. See `Handle.logs`."""
    chosen = (ranks,) if isinstance(ranks, int) else ranks
    choice = LogChoice(
        streams=tuple(LOGS),
        ranks=None if chosen is None else tuple(range(rank, rank + 1) for rank in chosen),
        lines=tail,
    )
    run.refresh()
    status = run.status()
    if status is None or not run.entry.folder:
        return ""
    found = attempt_logs(run, choice, attempt or status.attempt, status)
    return b"".join(found.last(whole=True)).decode(errors="replace")


def _write(lines: Iterable[bytes]) -> None:
    """Write lines to stdout, of which the last one may lack its end."""
    for line in lines:
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


class LogFollower:
    """Prints the logs of a run while they grow, attempt by attempt."""

    def __init__(
        self,
        run: RunReader,
        choice: LogChoice,
        write: Callable[[Iterable[bytes]], None] = _write,
        say: Callable[[str], None] = say,
    ) -> None:
        """`write` takes lines of the workers, `say` one for a person."""
        self._run = run
        self._choice = choice
        self._write = write
        self._say = say
        #: The attempt that is shown; 0: none is yet.
        self._attempt = 0
        #: Those of the present attempt; None: there is none yet.
        self._logs: AttemptLogs | None = None

    def follow(self) -> int:
        """Follow the run until it ends, and return its exit code; 130 on Ctrl-C, which does not end the run."""
        try:
            while not (shown := self.step()).is_over:
                self.wait(shown)
        except KeyboardInterrupt:
            self._say(f"{self._run.entry.title} goes on; `raylaunch stop {self._run.entry.id}` stops it")
            return ExitCode.INTERRUPTED
        return self.end(shown)

    def wait(self, shown: RunSummary) -> None:
        """Wait for news, for a moment."""
        self._run.wait(max(_POLL_SECONDS, shown.nodes / _NODES_PER_SECOND))

    def end(self, shown: RunSummary) -> int:
        """Print what is left of a run that is over, and how it ended. Return its exit code."""
        shown = self._with_result(shown)
        self._show_more(self._run.status(), is_over=True)
        self._write(self._logs.rest() if self._logs is not None else ())
        self._run.close()
        code = ExitCode.INTERNAL if shown.exit_code is None else shown.exit_code
        self._say(f"{self._run.entry.title}: {shown.outcome}: {shown.why}")
        return code

    def _with_result(self, shown: RunSummary) -> RunSummary:
        """Return what is shown of a run that is over when its result is written, unless its driver is gone."""
        if shown.exit_code is None:
            return shown
        self._run.await_result(_RESULT_SECONDS)
        found = summary(self._run)
        # The journal of a driver that was killed may end before what it had told.
        return found if found.exit_code is not None else shown

    def step(self) -> RunSummary:
        """Print what is new, after a look at the status: what was written before the end of the run is shown."""
        shown = summary(self._run)
        status = self._run.status()
        if status is not None and status.attempt and self._logs is None:
            self._attempt = self._first_attempt(status)
            self._logs = self._of(self._attempt, status)
            self._write(self._logs.last(whole=False))
        self._show_more(status)
        return shown

    def _show_more(self, status: RunStatus | None, *, is_over: bool = False) -> None:
        """Print the new lines of the logs, attempt by attempt up to the attempt of the status."""
        if status is None or self._logs is None:
            return
        self._write(self._logs.more())
        if self._run.awaits_logs:
            return  # what follows is another attempt's
        # Workers of the last attempt may write until workers of the next one are started.
        may_write = status.phase is Phase.STARTING and not is_over
        while self._attempt < status.attempt - may_write:
            self._write(self._logs.rest())
            self._attempt += 1
            self._logs = self._of(self._attempt, status)
            self._say(f"attempt {self._attempt} begins")
            self._write(self._logs.more())

    def _first_attempt(self, status: RunStatus) -> int:
        """Return the attempt with which to begin: that in which the time falls since which lines are shown."""
        since = self._choice.since
        if since is None:
            return status.attempt
        now = datetime.now(timezone.utc)
        began = now.timestamp() - seconds_since(self._run.entry.began, now)
        later = (each.number for each in status.result.attempts if began + each.ended_at >= since)
        return min(later, default=status.attempt)

    def _of(self, attempt: int, status: RunStatus) -> AttemptLogs:
        return attempt_logs(self._run, self._choice, attempt, status)

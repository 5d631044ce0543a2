"""The command `raylaunch attach`: shows a run as the command that drives it would, from now on, until it ends."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable

from raylaunch.cli.args import flag_values
from raylaunch.cli.output.async_writer import AsyncWriter
from raylaunch.cli.output.console import is_coloured
from raylaunch.cli.output.live_line import LiveLine, LiveStatus
from raylaunch.cli.runs.follow_logs import LogFollower
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import RunSummary
from raylaunch.cli.runs.worker_logs import LogChoice
from raylaunch.core.history.run_status import NodeState, RunStatus
from raylaunch.core.machine.state import Phase
from raylaunch.core.text import printable
from raylaunch.errors import ExitCode


def attach(run: RunReader, arguments: Namespace) -> int:
    """Show the run until it ends, and return its exit code; 130 on Ctrl-C, which only detaches. Raises ConfigError."""
    since = arguments.since and flag_values.time_since(arguments.since)
    choice = LogChoice(
        streams=("stdout", "stderr"),
        ranks=flag_values.ranks(arguments.rank),
        lines=None if since else 0,
        since=since or None,
    )
    return AttachedView(run, choice).show()


class AttachedView:
    """What one who is attached sees: messages and, on a terminal, a live line, with the output of workers."""

    def __init__(self, run: RunReader, choice: LogChoice) -> None:
        self._run = run
        self._writer = AsyncWriter(sys.stdout, sys.stderr)
        self._live = LiveLine(is_coloured(os.environ))
        self._logs = LogFollower(run, choice, self._write, self._say)
        #: What was said of the run last.
        self._said = ""

    def show(self) -> int:
        """Show the run until it ends, and return its exit code; 130 on Ctrl-C."""
        self._writer.show_row(self._live.text)
        try:
            while not (shown := self._logs.step()).is_over:
                self._say_news(shown)
                self._logs.wait(shown)
            return self._logs.end(shown)
        except KeyboardInterrupt:
            self._say(f"detached; {self._run.entry.title} goes on")
            return ExitCode.INTERRUPTED
        finally:
            self._run.close()
            self._writer.close()

    def _say_news(self, shown: RunSummary) -> None:
        status = self._run.status()
        if status is not None:
            self._live.on_status(_live_status(shown, status))
        text = f"{shown.state}: {shown.why}" if shown.why else shown.state
        if shown.waits_for:
            text += f"; it waits for {shown.waits_for}"
        if text != self._said:
            self._said = text
            self._say(f"{self._run.entry.title}: {text}")

    def _say(self, text: str) -> None:
        self._writer.say(f"raylaunch: {printable(text)}\n".encode(errors="backslashreplace"))

    def _write(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._writer.put("stdout", line)


def _live_status(shown: RunSummary, status: RunStatus) -> LiveStatus:
    ready = sum(node.state is not NodeState.GRANTED for node in status.nodes)
    slowest = shown.slowest_step
    return LiveStatus(
        phase=Phase(shown.state) if shown.state in {*Phase} else status.phase,
        seconds=shown.seconds,
        ready=ready,
        wanted=f"{len(status.nodes)}",
        nodes=shown.nodes,
        workers=shown.workers,
        progress=status.progress,
        behind=shown.step - slowest if shown.step is not None and slowest is not None else 0,
        restarts=shown.restarts,
        goodput=shown.goodput,
    )

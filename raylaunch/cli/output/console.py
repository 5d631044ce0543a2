"""The lines that a run prints. stdout belongs to the job; messages of raylaunch go to stderr."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping

from raylaunch.cli.output.async_writer import AsyncWriter
from raylaunch.cli.output.live_line import LiveLine
from raylaunch.cli.output.progress_line import ProgressLine
from raylaunch.cluster.driver.observer import RunObserver
from raylaunch.core.failures.failure import root_cause
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.machine.events_and_actions import (
    Action,
    Cordon,
    DriverReplaced,
    Event,
    Finish,
    ForwardRequested,
    ForwardSignal,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    RequestCheckpoint,
    ResizeRequested,
    RestartRequested,
    Stop,
    StopRequested,
    Uncordon,
    WorkersHung,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.requests import requested
from raylaunch.core.machine.save_time import DeadlineSet
from raylaunch.core.machine.state import Phase, Stopping
from raylaunch.core.monitoring.progress_report import ProgressSample
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import assign
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.text import capped, count, duration, printable
from raylaunch.errors import JOB_FAILURES
from raylaunch.node.logs.tail import LogOutput

_MAX_GROUPS = 8
_MAX_LINE = 4_000
"""Characters of a line."""
_NO_DEADLINE = 1e6
"""Seconds. A node that is drained without a deadline gets one that is further away than this."""
_CODES = {"dim": "2", "green": "32", "yellow": "33"}


class _ShownAttempt:
    """What was printed of one attempt."""

    def __init__(self, launched_at: float = 0.0, ranks: Mapping[NodeId, range] | None = None) -> None:
        """`launched_at`: 0: by an earlier driver, or there is no attempt yet. `ranks`: by node."""
        self.launched_at = launched_at
        self._ranks = ranks or {}
        #: Ranks whose output was shown.
        self.shown_ranks: set[int] = set()
        #: Reasons that were printed; each is printed only once.
        self.reasons: set[str] = set()

    def has_output_of(self, node: NodeId) -> bool:
        """Return whether output of the node's workers was shown."""
        return not self.shown_ranks.isdisjoint(self._ranks.get(node, ()))


class Console:
    """The observer that prints one line for each change in the run.

    On a terminal, a live line at the bottom shows the progress; else a line is printed once a minute.
    """

    def __init__(self) -> None:
        self._colour = is_coloured(os.environ)
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._writer = AsyncWriter(sys.stdout, sys.stderr)
        self._phase = Phase.GATHERING
        self._attempt = _ShownAttempt()
        self._progress = ProgressLine()
        self._live = LiveLine(self._colour)
        self._is_live = False
        #: Replaces secrets in raylaunch's messages.
        self._redactor = Redactor()
        #: What the first and the last line say.
        self._fallback = ""

    def on_plan(self, job: Job, plan: Plan, run_dir: str) -> None:
        """Print the name of the run and what it requests. `run_dir` is "" if no logs are kept."""
        self.on_takeover(job, run_dir)
        if job.progress == "auto":
            self._is_live = self._writer.show_row(self._live.text)
            self._progress.is_periodic = not self._is_live
        self._fallback = plan.fallback
        if plan.fallback:
            self.on_message(plan.fallback)
        self.say(self._redactor.headline(job))
        if plan.cluster:
            self.say(f"on the Ray cluster at {plan.cluster}")
        self.say(f"requesting {plan.asked}; {f'logs in {run_dir}' if run_dir else 'no logs are kept'}")
        if not plan.feasible:
            limit = f"up to {job.placement_timeout:g} s " if math.isfinite(job.placement_timeout) else ""
            what = "for free resources"
            if not plan.possible:
                self.say("the nodes of the cluster have no room for this, even if nothing else ran", colour="yellow")
                what = "for other nodes to join"
            self.say(f"waiting {limit}{what}", colour="yellow")
            for line in plan.shortage.splitlines()[1:]:
                self.say(f"  {line}", colour="yellow")

    def on_takeover(self, job: Job, run_dir: str) -> None:
        """Print nothing: the first driver of the run has, and a message says that this one has taken over."""
        self._writer.has_log_files = run_dir != ""
        self._redactor = Redactor.of(job, os.environ)
        self._progress.is_periodic = job.progress != "off"

    def on_progress(self, sample: ProgressSample) -> None:
        """Show it on the live line."""
        self._live.on_progress(sample)

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """Print what changed, and why."""
        self._live.on_entry(entry, machine)
        self._print_event(entry, machine)
        whys = [action.why for action in entry.actions if isinstance(action, Launch)]
        for action in entry.actions:
            if not (isinstance(action, Cordon) and any(action.why in why for why in whys)):
                self._print_action(action, machine, entry.event)
        if machine.phase is not self._phase:
            self._phase = machine.phase
            if machine.phase is Phase.RUNNING and self._attempt.launched_at:  # else an earlier driver has said it
                took = machine.now - self._attempt.launched_at
                self.say(
                    f"attempt {machine.attempt} runs: {machine.status} (started in {duration(took)})", colour="green"
                )

    def _print_event(self, entry: JournalEntry, machine: Machine) -> None:
        match entry.event:
            case NodeGranted() if not machine.attempt:
                pass  # at the start all nodes are granted at once, and a line follows when each is ready
            case NodeGranted() | NodeJoined() | NodeDraining() | DriverReplaced() | DeadlineSet():
                self._print_arrival(entry.event)
            case NodeLost() as event if event.node in machine.roster:
                has_output = self._attempt.has_output_of(event.node)
                note = "; the last lines of its workers may be missing here" if has_output else ""
                lost = f"{event.node} was lost: {event.why}"
                self._attempt.reasons.add(lost)
                self.say(f"{lost}{note}", colour="yellow")
            case WorkersHung() as event if entry.actions:
                self._print_hang(event)
            case Progressed() as event:
                if line := self._progress.update(event):
                    self.say(line)
            case StopRequested() | RestartRequested() | ResizeRequested() as event:
                if not any(isinstance(action, RequestCheckpoint | Stop | Launch | Finish) for action in entry.actions):
                    self.say(requested(event), colour="yellow")
            case ForwardRequested(signal=signal) if not entry.actions:
                self.say(f"{signal} is not forwarded: no workers are running", colour="yellow")

    def _print_arrival(self, event: NodeGranted | NodeJoined | NodeDraining | DriverReplaced | DeadlineSet) -> None:
        match event:
            case DriverReplaced():
                self.say(f"driver {event.driver} is in command after {duration(event.seconds)}: {event.phases}")
            case DeadlineSet():
                self.say(f"the run must be over in {duration(max(0, round(event.deadline - event.at)))}: {event.why}")
            case NodeGranted(address=address):
                self.say(f"{address}: resources are reserved, the agent is starting")
            case NodeJoined(address=address):
                self.say(f"{event.node} ({address}) is ready for {count(event.nproc, 'worker')}")
            case NodeDraining():
                left = event.deadline - event.at
                when = f" and ends in {duration(max(0, round(left)))}" if left < _NO_DEADLINE else ""
                self.say(f"{event.node} is being drained{when}: {event.why}", colour="yellow")

    def _print_hang(self, event: WorkersHung) -> None:
        self.say("a worker hangs; this is what all workers are doing:", colour="yellow")
        for group in event.groups[:_MAX_GROUPS]:
            self.say(f"  {group}", colour="yellow")
        if len(event.groups) > _MAX_GROUPS:
            self.say(f"  ... {count(len(event.groups) - _MAX_GROUPS, 'more group')}", colour="yellow")

    def _print_action(self, action: Action, machine: Machine, event: Event | None) -> None:
        match action:
            case Launch(attempt=attempt, why=why):
                if attempt > 1 and why not in self._attempt.reasons:
                    self.say(why, colour="yellow")
                members = [machine.nodes[node] for node in action.roster if node in machine.nodes]
                ranks = {part.node: part.ranks for part in assign(attempt, members)}
                self._attempt = _ShownAttempt(machine.now, ranks)
            case Stop(why=why, grace=grace) if grace > 0 and why not in self._attempt.reasons:
                self._attempt.reasons.add(why)
                why = _without_failure(machine) or why
                again = "; another one kills them" if isinstance(event, StopRequested) and not event.by else ""
                self.say(f"stopping the workers, within {grace:g} s: {why}{again}", colour="yellow")
            case RequestCheckpoint(why=why):
                self._attempt.reasons.add(why)  # the driver says it, which knows whether the workers can save
            case Cordon(why=why):
                self.say(why, colour="yellow")
            case Uncordon(why=why):
                self.say(why)
            case ForwardSignal(signal=signal, nodes=nodes):
                self.say(f"{signal} is forwarded to the workers on {count(len(nodes), 'node')}")
            case _:
                pass

    def on_output(self, output: Iterable[LogOutput]) -> None:
        """Write output of the workers, which the nodes have already filtered and prefixed."""
        for part in output:
            self._attempt.shown_ranks.add(part.rank)
            self._writer.put(part.stream, part.data)

    def on_message(self, text: str) -> None:
        """Print a warning that no event or action stands for."""
        self.say(text, colour="yellow")

    def say(self, text: str, *, colour: str = "") -> None:
        """Print one line of raylaunch, in order with the job's output."""
        shown = printable(capped(self._redactor.hide(text), _MAX_LINE))
        self._write(f"{self._in('dim', 'raylaunch:')} {self._in(colour, shown)}\n")

    def line(self, text: str) -> None:
        """Print a line for programs to stderr, without prefix or colour."""
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        self._writer.say(text.encode(self._encoding, errors="backslashreplace"))

    def _in(self, colour: str, text: str) -> str:
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._colour and colour else text

    def report(self, text: str, *, ok: bool) -> None:
        """Print the report: as lines of raylaunch if the run succeeded, else as a block.

        After a run with a live line, the steps and the times of the run come first.
        """
        if self._is_live and (ending := self._live.ending()):
            self.say(ending)
        if ok:
            for line in text.splitlines():
                self.say(line, colour="green")
        else:
            self._write(f"\n{text}")

    def close(self) -> None:
        """Write everything that is queued, and stop the writer thread. The last line says what the first one did."""
        if self._fallback:
            self.on_message(self._fallback)
        self._writer.close()


def run_observer(job: Job, console: Console) -> RunObserver:
    """Return the observer of a run: the console, behind the event log if the job asks for torchelastic's events."""
    if job.event_log_handler != "console":
        return console
    from raylaunch.cli.output.event_log import EventLog  # noqa: PLC0415

    return EventLog(console, console.line)


def _without_failure(machine: Machine) -> str:
    """Return who failed, if the run ends with that: the report, which follows, says what it was; else ""."""
    cause = root_cause(machine.world.failures)
    ending = machine.state.ending if isinstance(machine.state, Stopping) else None
    is_failed = ending is not None and ending.exit_code in JOB_FAILURES
    return f"rank {cause.rank} on {cause.node} failed" if is_failed and cause is not None else ""


def is_coloured(environ: Mapping[str, str]) -> bool:
    """Return whether stderr gets colours: as NO_COLOR (no-color.org) or FORCE_COLOR say, else on a capable terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return environ["FORCE_COLOR"] != "0"
    return sys.stderr is not None and sys.stderr.isatty() and environ.get("TERM") != "dumb"

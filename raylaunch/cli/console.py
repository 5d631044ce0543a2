"""What a person sees while a run is on. stdout is the job's; every word of ours goes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from raylaunch.cli.pace import Pace
from raylaunch.cli.writer import OutputWriter
from raylaunch.core.actions import Action, AskCheckpoint, Forward, Launch, Readmit, Shun, Stop
from raylaunch.core.events import (
    ForwardAsked,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    WorkersHung,
)
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine
from raylaunch.core.phases import Phase
from raylaunch.core.plan import Plan
from raylaunch.core.ranks import assign
from raylaunch.core.redaction import Secrets
from raylaunch.core.words import count
from raylaunch.node.logs import Output

_MOST_GROUPS = 8
_FAR = 1e6
"""Seconds: a deadline that is further away is none."""
_CODES = {"dim": "2", "green": "32", "yellow": "33"}


class Console:
    """One line for each change, the same on a terminal and on a pipe."""

    def __init__(self) -> None:
        self._colour = is_coloured(os.environ, is_terminal=sys.stderr is not None and sys.stderr.isatty())
        self._writer = OutputWriter(sys.stdout, sys.stderr)
        self._phase = Phase.GATHERING
        self._launched_at = 0.0
        #: Of the present attempt, by node.
        self._ranks: dict[str, range] = {}
        #: Ranks of which something was shown.
        self._seen: set[int] = set()
        #: Why this attempt ends, as far as it was said.
        self._reasons: set[str] = set()
        self._pace = Pace()
        #: What no line of ours repeats.
        self._secrets = Secrets()
        #: Addresses of the machines that Ray has other names for.
        self._hosts: dict[str, str] = {}

    def planned(self, job: Job, plan: Plan, run_dir: str) -> None:
        """The head of the run. `run_dir` is `""` where nothing is kept."""
        self._writer.kept = run_dir != ""
        self._secrets = Secrets.of(job, os.environ)
        seen = self._secrets.shown(job)
        self.say(f"{seen.title}: {seen.entrypoint}")
        self.say(f"asking for {plan.asked}; {f'logs in {run_dir}' if run_dir else 'no logs are kept'}")
        if not plan.feasible:
            self.say(f"waiting up to {job.placement_timeout:g} s for room", colour="yellow")
            for line in plan.shortage.splitlines()[1:]:
                self.say(f"  {line}", colour="yellow")

    def decided(self, entry: Entry, machine: Machine) -> None:
        """Say what changed, and why."""
        self._tell_event(entry, machine)
        whys = [action.why for action in entry.actions if isinstance(action, Launch)]
        for action in entry.actions:
            if not (isinstance(action, Shun) and any(action.why in why for why in whys)):
                self._tell_action(action, machine)
        if machine.phase is not self._phase:
            self._phase = machine.phase
            if machine.phase is Phase.RUNNING:
                took = machine.now - self._launched_at
                self.say(f"attempt {machine.attempt} runs: {machine.status} (started in {took:.2f} s)", colour="green")

    def _tell_event(self, entry: Entry, machine: Machine) -> None:
        match entry.event:
            case NodeGranted() if not machine.attempt:
                pass  # all of them come at once, and each is ready soon
            case NodeGranted() | NodeJoined() | NodeDraining():
                self._tell_node(entry.event)
            case NodeLost() as event if event.node in machine.roster:
                missing = not self._seen.isdisjoint(self._ranks.get(event.node, ()))
                may_lack = "; the last lines of its workers may be missing here" if missing else ""
                lost = f"{event.node} was lost: {event.why}"
                self._reasons.add(lost)
                self.say(f"{lost}{may_lack}", colour="yellow")
            case WorkersHung() as event if entry.actions:
                self._tell_hang(event)
            case Progressed() as event:
                if line := self._pace.told(event):
                    self.say(line)
            case ForwardAsked(signal=signal) if not entry.actions:
                self.say(f"{signal} is not passed on: no workers are running", colour="yellow")

    def _tell_node(self, event: NodeGranted | NodeJoined | NodeDraining) -> None:
        match event:
            case NodeGranted(address=address):
                self.say(f"{address} is granted; its agent is starting")
            case NodeJoined(address=address):
                self._hosts[event.host] = address
                self.say(f"{event.node} ({address}) is ready, {count(event.nproc, 'worker')}")
            case NodeDraining():
                left = event.deadline - event.at
                when = f", gone in {max(0.0, left):.0f} s" if left < _FAR else ""
                self.say(f"{event.node} is being drained{when}: {event.why}", colour="yellow")

    def _tell_hang(self, event: WorkersHung) -> None:
        self.say("a worker hangs; what all of them do:", colour="yellow")
        for group in event.groups[:_MOST_GROUPS]:
            self.say(f"  {group}", colour="yellow")
        if len(event.groups) > _MOST_GROUPS:
            self.say(f"  ... {count(len(event.groups) - _MOST_GROUPS, 'group')} more", colour="yellow")

    def _tell_action(self, action: Action, machine: Machine) -> None:
        match action:
            case Launch(attempt=attempt, why=why):
                self._launched_at = machine.now
                members = [machine.nodes[node] for node in action.roster if node in machine.nodes]
                self._ranks = {part.node: part.ranks for part in assign(attempt, members)}
                self._seen.clear()
                if attempt > 1 and why not in self._reasons:
                    self.say(why, colour="yellow")
                self._reasons.clear()
            case Stop(why=why, grace=grace) if grace > 0 and why not in self._reasons:
                self._reasons.add(why)
                self.say(f"stopping, {grace:g} s at most: {why}", colour="yellow")
            case AskCheckpoint(why=why):
                self._reasons.add(why)
                self.say(f"asking the workers to save: {why}", colour="yellow")
            case Shun(why=why):
                self.say(why, colour="yellow")
            case Readmit(host=host, why=why):
                self.say(f"{self._hosts.get(host, host)} may be used again: {why}")
            case Forward(signal=signal, nodes=nodes):
                self.say(f"{signal} is passed on to the workers of {count(len(nodes), 'node')}")
            case _:
                pass

    def wrote(self, output: Iterable[Output]) -> None:
        """Pass on what shown ranks wrote, as the nodes made it ready to be shown."""
        for part in output:
            self._seen.add(part.rank)
            self._writer.put(part.stream, part.data)

    def said(self, text: str) -> None:
        """A line that is no decision."""
        self.say(text, colour="yellow")

    def say(self, text: str, *, colour: str = "") -> None:
        """One line of ours, in order with the job's output."""
        self._writer.say(f"{self._in('dim', 'raylaunch:')} {self._in(colour, self._secrets.hide(text))}\n".encode())

    def line(self, text: str) -> None:
        """A line for a program to read, on stderr as it is."""
        self._writer.say(f"{text}\n".encode())

    def _in(self, colour: str, text: str) -> str:
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._colour and colour else text

    def last_words(self, text: str, *, ok: bool) -> None:
        """The report: lines of ours where all went well, else a block that stands for itself."""
        if ok:
            for line in text.splitlines():
                self.say(line, colour="green")
        else:
            self._writer.say(f"\n{text}".encode())

    def close(self) -> None:
        """Print what still waits."""
        self._writer.close()


def is_coloured(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """On a terminal, unless NO_COLOR is set (no-color.org) or it can show none; elsewhere where FORCE_COLOR is."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return environ["FORCE_COLOR"] != "0"
    return is_terminal and environ.get("TERM") != "dumb"

"""What a person sees while a run is on. stdout is the job's; every word of ours goes to stderr."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterable
from typing import BinaryIO

import click

from raylaunch.core.actions import Launch, Stop
from raylaunch.core.events import NodeJoined, NodeLost
from raylaunch.core.job import Job, shown_ranks
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine, Phase
from raylaunch.core.plan import Plan
from raylaunch.node.logs import Output

_MOST_UNPRINTED = 8 * 1024 * 1024
"""Bytes that may wait for a slow terminal; what comes beyond is left out of it and counted. The files have it all."""


class Console:
    """One line for each change, the same on a terminal and on a pipe."""

    def __init__(self) -> None:
        self._colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._writer = OutputWriter(sys.stdout.buffer, sys.stderr.buffer)
        self._phase = Phase.GATHERING
        self._launched_at = 0.0
        self._only_rank: int | None = 0

    def planned(self, job: Job, plan: Plan, run_dir: str) -> None:
        """The head of the run."""
        shown = shown_ranks(job.show)
        self._only_rank = next(iter(shown)) if shown is not None and len(shown) == 1 else None
        self.say(f"{job.title}: {job.entrypoint}")
        self.say(f"asking for {plan.asked}; logs in {run_dir}")
        if not plan.feasible:
            self.say(f"waiting up to {job.placement_timeout:g} s for room", colour="yellow")
            for line in plan.shortage.splitlines()[1:]:
                self.say(f"  {line}", colour="yellow")

    def decided(self, entry: Entry, machine: Machine) -> None:
        """Say what changed, and why."""
        match entry.event:
            case NodeJoined() as event:
                self.say(f"{event.node} ({event.address}) is ready, {event.nproc} workers")
            case NodeLost() as event if event.node in machine.roster:
                self.say(f"{event.node} was lost: {event.why}", colour="yellow")
        for action in entry.actions:
            match action:
                case Launch(attempt=attempt, why=why):
                    self._launched_at = machine.now
                    if attempt > 1:
                        self.say(why, colour="yellow")
                case Stop(why=why, grace=grace) if grace > 0:
                    self.say(f"stopping, {grace:g} s at most: {why}", colour="yellow")
        if machine.phase is not self._phase:
            self._phase = machine.phase
            if machine.phase is Phase.RUNNING:
                took = machine.now - self._launched_at
                self.say(f"attempt {machine.attempt} runs: {machine.status} (started in {took:.2f} s)", colour="green")

    def wrote(self, output: Iterable[Output]) -> None:
        """Pass on what shown ranks wrote. Where several are shown, each line names its rank."""
        for part in output:
            data = part.data if part.rank == self._only_rank else _prefixed(part)
            self._writer.put(part.stream, data)

    def said(self, text: str) -> None:
        """A line that is no decision."""
        self.say(text, colour="yellow")

    def say(self, text: str, *, colour: str | None = None) -> None:
        """One line of ours, in order with the job's output."""
        line = f"{click.style('raylaunch:', dim=True)} {click.style(text, fg=colour)}"
        self._writer.put("stderr", f"{line if self._colour else click.unstyle(line)}\n".encode())

    def last_words(self, text: str, *, ok: bool) -> None:
        """The report: lines of ours where all went well, else a block that stands for itself."""
        if ok:
            for line in text.splitlines():
                self.say(line, colour="green")
        else:
            self._writer.put("stderr", f"\n{text}".encode())

    def close(self) -> None:
        """Print what still waits."""
        self._writer.close()


def _prefixed(part: Output) -> bytes:
    tag = f"[{part.rank}] ".encode()
    return b"".join(tag + line for line in part.data.splitlines(keepends=True))


class OutputWriter:
    """Writes in a thread of its own: a terminal that stands still must not stop the driver."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._left_out = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, daemon=True, name="raylaunch-output")
        self._thread.start()

    def put(self, stream: str, data: bytes) -> None:
        """Never blocks."""
        with self._lock:
            if self._waiting + len(data) > _MOST_UNPRINTED:
                self._left_out += len(data)
                return
            self._waiting += len(data)
        self._queue.put((stream, data))

    def close(self) -> None:
        """Wait for a terminal that moves; leave one that does not."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, data = item
            self._to(stream, data)
            with self._lock:
                self._waiting -= len(data)
                left_out, self._left_out = (self._left_out, 0) if self._waiting == 0 else (0, self._left_out)
            if left_out:
                self._to("stderr", f"raylaunch: {left_out} bytes of output are not shown\n".encode())

    def _to(self, stream: str, data: bytes) -> None:
        try:
            self._streams[stream].write(data)
            self._streams[stream].flush()
        except (OSError, ValueError):
            return  # nobody reads any more (a closed pipe); the run goes on

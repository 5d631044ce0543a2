"""The processes of one attempt on one node: started, watched, stopped, and truly gone before the next begin.

Each worker leads a session of its own. What it starts is in its process group, or, having left that, becomes our
child when its parent dies, because the fork server is a subreaper.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from raylaunch.node import messages, processes
from raylaunch.node.young import Young
from raylaunch.worker.spec import WorkerSpec
from raylaunch.worker.stacks import SIGNAL, listens

_SLACK = 0.02
"""Seconds between looks while killed processes are still going; their end is not always ours to be told of."""


@dataclass(frozen=True, slots=True)
class _Worker:
    spec: WorkerSpec
    report: int
    stacks: int


class Brood:
    """All processes of the present attempt.

    `say` tells the supervisor of their ends. `spared` gives the children of the fork server that are no workers.
    """

    def __init__(self, say: Callable[[messages.Word, int | None], None], spared: Callable[[], Collection[int]]) -> None:
        self._say = say
        self._spared = spared
        self.attempt = 0
        self._alive: dict[int, _Worker] = {}
        #: Process groups that may still have members. A group's number is not reused while it has any.
        self._groups: set[int] = set()
        self._stopping = False
        self._killing = False
        self._answer_stop = False
        self._kill_at: float | None = None
        self._young = Young()

    def begin(self, attempt: int) -> None:
        """Forget the attempt before, which is gone."""
        self.attempt = attempt
        self._stopping = self._killing = self._answer_stop = False
        self._kill_at = None
        self._young = Young()

    def add(self, pid: int, spec: WorkerSpec, report: int, stacks: int) -> None:
        """A worker was forked; these files are to be closed when it has ended."""
        self._alive[pid] = _Worker(spec, report, stacks)
        self._groups.add(pid)

    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by local rank."""
        return tuple(sorted(self._alive, key=lambda pid: self._alive[pid].spec.local_rank))

    def stop(self, attempt: int, grace: float, number: int = signal.SIGTERM) -> None:
        """Ask them to end; `press` sees to it. Answered by `Stopped`, at once where nothing is left."""
        if attempt != self.attempt:
            self._say(messages.Stopped(attempt=attempt), None)
            return
        self._stopping = self._answer_stop = True
        kill_at = time.monotonic() + grace
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if grace > 0 and not self._killing:
            for pid in self._alive:
                if not processes.signal_group(pid, number):  # so young that it leads no group yet
                    os.kill(pid, number)
                processes.signal_group(pid, signal.SIGCONT)  # one that is stopped does not run its handler

    def forward(self, attempt: int, number: int) -> None:
        """Pass a signal on to the workers, which are to live; what they started is their own affair."""
        if attempt == self.attempt and not self._stopping:
            for pid, worker in self._alive.items():
                if worker.spec.kind == "command":  # what became another program may never answer it
                    os.kill(pid, number)
                else:
                    self._young.signal(pid, number)

    def dump(self, attempt: int) -> None:
        """Have them write their stacks: those who listen for the signal, which would be the end of others."""
        asked: list[tuple[messages.Asked, int]] = []
        for pid, worker in self._alive.items() if attempt == self.attempt else ():
            start = os.fstat(worker.stacks).st_size
            hears = worker.spec.kind != "command" and listens(pid)
            if hears:
                os.kill(pid, SIGNAL)
            word = messages.Asked(attempt=attempt, rank=worker.spec.rank, start=start, hears=hears)
            asked.append((word, worker.stacks))
        for word, file in asked:
            self._say(word, file)

    def kill(self) -> None:
        """End them now."""
        self._stopping = self._killing = True
        for group in self._groups:
            if group in self._alive:
                processes.kill_tree(group)
            else:
                processes.signal_group(group, signal.SIGKILL)

    def press(self) -> None:
        """Once workers are to end: kill those out of time, then what they left behind; say when all is gone."""
        if not self._stopping:
            self._young.press(self._alive)
            return
        out_of_time = self._kill_at is not None and time.monotonic() >= self._kill_at
        if not self._killing and (out_of_time or not self._alive):
            self.kill()
        if self._killing and self.is_gone() and self._answer_stop:
            self._answer_stop = False
            self._kill_at = None
            self._say(messages.Stopped(attempt=self.attempt), None)

    def is_gone(self) -> bool:
        """Whether no process of the attempt is left; kills those that left their group."""
        if self._alive:
            return False
        for pid in self._escaped():
            processes.kill_tree(pid)
        self._groups = {group for group in self._groups if processes.signal_group(group, 0)}
        return not self._groups and not self._escaped()

    def _escaped(self) -> set[int]:
        return processes.children() - set(self._spared())

    def until_deadline(self) -> float | None:
        """Seconds until `press` has something to do by itself."""
        if not self._stopping:
            return self._young.until_look()
        if self._killing and (self._alive or self._groups or self._answer_stop):
            return _SLACK
        if self._kill_at is not None:
            return max(0.0, self._kill_at - time.monotonic())
        return None

    def reap(self) -> set[int]:
        """Take note of every process that ended. Those that were no workers."""
        others = set()
        for pid, status in _ended():
            worker = self._alive.pop(pid, None)
            if worker is None:
                others.add(pid)
                continue
            code = os.waitstatus_to_exitcode(status)
            spec = worker.spec
            word = messages.Exited(
                attempt=self.attempt,
                rank=spec.rank,
                local_rank=spec.local_rank,
                pid=pid,
                exit_code=code,
                stopped=self._stopping,
                at=time.monotonic(),
            )
            try:
                self._say(word, worker.report)
            finally:
                os.close(worker.report)
                os.close(worker.stacks)
        return others

    def wait_until_gone(self, seconds: float) -> bool:
        """For the end of the fork server, when there is nobody to tell."""
        self._say = lambda *_: None
        deadline = time.monotonic() + seconds
        while not self.is_gone():
            if time.monotonic() > deadline:
                return False
            time.sleep(_SLACK / 10)
            self.reap()
        return True


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(end)
    return found

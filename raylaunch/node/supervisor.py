"""The agent's side of the fork server: turns orders for the node into processes, and their ends into events."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from dataclasses import replace

from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.failure import Failure
from raylaunch.core.pulse import Pulse
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.node import deaths, lease, messages, wire
from raylaunch.node.deaths import Death
from raylaunch.node.hearth import Hearth
from raylaunch.node.looking import Looking, Seen
from raylaunch.node.memory import KernelKills
from raylaunch.node.owed import Owed
from raylaunch.node.present import Present
from raylaunch.node.pulse import pulse
from raylaunch.node.settings import NodeSettings
from raylaunch.worker.page import LEASE
from raylaunch.worker.spec import Report

_MOST_FALSE_STARTS = 3

Event = messages.Ready | messages.StoreOpen | messages.Learned | WorkersStarted | WorkersExited | WorkersStopped | Seen
"""What `poll` gives. `at` in events and failures is this machine's CLOCK_MONOTONIC."""


class Supervisor:
    """One node's processes. Never blocks: whoever owns it waits for `fileno()` to be readable and calls `poll`."""

    def __init__(self, settings: NodeSettings, hearth: Hearth | None = None) -> None:
        """`hearth`: what an earlier run left, awake; its fork server is one that these settings might have started."""
        self._hearth = Hearth(settings) if hearth is None else hearth
        self._page = self._hearth.page
        self.settings = self._hearth.settle(settings)
        self.ready = False
        #: The fork server's process id, 0 until it is ready.
        self.server_pid = 0
        self._present: Present | None = None
        self._looking = Looking(self._page, settings.node)
        self._readable = select.epoll()
        self._readable.register(self._looking, select.EPOLLIN)
        self._owed = Owed()
        self._preload = settings.preload
        self._why: tuple[str, ...] = ()
        #: Fork servers in a row that died before they were ready.
        self._false_starts = 0
        self._kills = KernelKills()
        self._closed = False

    def start(self) -> None:
        """Start the fork server, unless there is one; `Ready` comes when it has imported everything."""
        if self._hearth.control is None:
            self._hearth.start(self.settings, self._preload)
        self._listen()
        if self._hearth.ready is not None:
            self._looking.soon()

    def _listen(self) -> None:
        assert self._hearth.control is not None
        self._readable.register(self._hearth.control, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `poll` has something; the same one whatever becomes of the fork server."""
        return self._readable.fileno()

    def launch(self, part: Assignment, meeting: Rendezvous) -> None:
        """End all earlier attempts without grace, then start this node's part of the next."""
        workers = tuple(self.settings.worker(part, local_rank, meeting) for local_rank in range(part.nproc))
        self._looking.drop_checkpoint()
        self._present = Present(part=part)
        self._order(messages.StartWorkers(attempt=part.attempt, workers=workers))
        self._kills.mark()

    def stop(self, attempt: int, grace: float, signal: str = "SIGTERM") -> None:
        """End the attempt. `WorkersStopped` follows in any case."""
        self._looking.drop_checkpoint()
        self._order(messages.StopWorkers(attempt=attempt, grace=grace, signal=signal))

    def forward(self, attempt: int, signal: str) -> None:
        """Send the attempt's workers a signal that is not ours."""
        if self.ready:
            self._order(messages.SignalWorkers(attempt=attempt, signal=signal))

    def renew(self, until_ns: int) -> None:
        """Let the node live until then (`page.lease_clock`), unless this is said again in time. 0: without an end.

        After that all its processes are gone, whether this process can see to it or not. What is over stays over.
        """
        if self._closed or lease.is_over(self._page):
            return
        tell = self.ready and lease.must_be_told(self._page, until_ns)
        self._page.numbers[LEASE] = until_ns
        if tell:
            self._order(messages.LookAtPage())

    def pulse(self) -> Pulse | None:
        """Signs of life of the present attempt's workers; None: none are started."""
        return None if self._closed else pulse(self._page, self._present)

    def ask_checkpoint(self, attempt: int, step: int) -> None:
        """Propose a step at which the attempt's workers save. `Proposed` follows, or they cannot be asked.

        When it was settled they save and wait for their end: `WorkersCheckpointed` says so, or that they cannot.
        """
        self._looking.ask_checkpoint(attempt, step, self._present)

    def settle(self, attempt: int, step: int) -> None:
        """All workers of all nodes can save at the step that was proposed."""
        self._looking.settle(attempt, step)

    def dump_stacks(self, attempt: int) -> None:
        """Ask the attempt's workers what they are doing. `WorkersStacks` follows, soon, whoever can answer."""
        self._looking.dump_stacks(attempt, self._present)
        if self.ready:
            self._order(messages.DumpStacks(attempt=attempt))

    def open_store(self, attempt: int) -> None:
        """Have a store ready for the attempt. `StoreOpen` follows."""
        self._order(self.settings.store(attempt, port=0))

    def values(self) -> dict[int, bytes]:
        """What the functions of the present attempt returned (or raised), pickled, by rank."""
        return dict(self._present.values) if self._present is not None else {}

    def rest(self) -> Hearth | None:
        """End all of the run but what the next can use. None: there is nothing, and all has ended."""
        hearth, self._present = self._hearth, None
        if not (self.ready and self._preload == self.settings.preload and hearth.clear()):
            self.close()
            return None
        self._closed = True
        self._look_away()
        return hearth

    def close(self) -> None:
        """End the fork server and with it every process of ours on the node. Waits for that, for seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._hearth.put_out()
        self._look_away()
        self._hearth.close()

    def _look_away(self) -> None:
        self._kills.close()
        self._readable.close()
        self._looking.close()

    def _order(self, order: messages.Order) -> None:
        control = self._hearth.control if self.ready else None
        self._owed.asked(order, heard=control is not None)
        if control is not None:
            with contextlib.suppress(OSError):  # gone: `poll` finds out and says what that means
                wire.send(control, order)

    def poll(self) -> list[Event]:
        """Everything that happened since the last time."""
        found: list[Event] = []
        failures: list[Failure] = []
        for word, fd in self._words():
            self._owed.answered(word)
            match word:
                case messages.Exited():
                    failures.extend(self._exited(word, fd))
                case messages.Stopped() | messages.Started():
                    found.extend(self._told(failures))
                    found.append(self._turned(word))
                case messages.Ready():
                    found.extend(self._told(failures))
                    self.server_pid = word.pid
                    self._begin_serving()
                    found.append(replace(word, why=self._why + word.why))
                case messages.StoreOpen():
                    found.append(word)
                case messages.Asked():
                    self._looking.take(word, fd)
                case messages.Learned():
                    found.append(replace(word, lesson=None))
                case messages.Reserve():
                    pass  # the hearth has it
                case messages.Rested():
                    raise AssertionError(word)  # the hearth waits for it
        found.extend(self._told(failures))
        found.extend(self._looking.look(self._present))
        return found

    def _words(self) -> Iterator[tuple[messages.Word, int | None]]:
        woken, self._hearth.ready = self._hearth.ready, None
        if woken is not None:
            yield woken, None
        while (control := self._hearth.control) is not None and wire.is_readable(control):
            try:
                yield self._hearth.hear()
            except (EOFError, ConnectionError):
                yield from self._server_died()
                return

    def _begin_serving(self) -> None:
        self.ready = True
        for order in self._owed.take():
            self._order(order)

    def _exited(self, word: messages.Exited, fd: int | None) -> list[Failure]:
        """The failures to tell now. Those we caused ourselves are kept for `WorkersStopped`."""
        report = deaths.report(fd)
        present = self._present
        if present is None or word.attempt != present.attempt:
            return [self._failure(word, report)] if word.exit_code and not word.stopped else []
        present.ends[word.rank] = word.exit_code
        if report.value:
            present.values[word.rank] = report.value
        if word.exit_code == 0:
            return []
        found = self._failure(word, report)
        if word.stopped:
            present.late.append(found)
            return []
        return [found]

    def _failure(self, word: messages.Exited, report: Report) -> Failure:
        failure = deaths.failure(
            Death(attempt=word.attempt, rank=word.rank, local_rank=word.local_rank, pid=word.pid, at=word.at),
            exit_code=word.exit_code,
            stopped=word.stopped,
            report=report,
            node=self.settings.node,
            folder=self.settings.folder(word.attempt, word.rank),
            kills=self._kills,
        )
        return failure if self.settings.kept else replace(failure, stdout="", stderr="", error_file="")

    def _told(self, failures: list[Failure]) -> list[Event]:
        """Failures as one event for each attempt; or, where none ever failed, that all have finished."""
        found: list[Event] = []
        for attempt in sorted({failure.attempt for failure in failures}):
            mine = tuple(failure for failure in failures if failure.attempt == attempt)
            found.append(
                WorkersExited(at=mine[0].at, attempt=attempt, node=self.settings.node, failures=mine),
            )
        failures.clear()
        present = self._present
        if present is not None and not present.finished and set(present.part.ranks) <= set(present.ends):
            present.finished = True
            if not any(present.ends.values()):
                now = time.monotonic()
                found.append(WorkersExited(at=now, attempt=present.attempt, node=self.settings.node))
        return found

    def _turned(self, word: messages.Started | messages.Stopped) -> Event:
        now = time.monotonic()
        present = self._present
        if isinstance(word, messages.Started):
            if present is not None and present.attempt == word.attempt:
                present.pids = word.pids
            node = self.settings.node
            return WorkersStarted(at=now, attempt=word.attempt, node=node, pids=word.pids, turnover=word.turnover)
        late: tuple[Failure, ...] = ()
        if present is not None and present.attempt == word.attempt:
            late, present.late = tuple(present.late), []
        return WorkersStopped(at=now, attempt=word.attempt, node=self.settings.node, failures=late)

    def _server_died(self) -> Iterator[tuple[messages.Word, int | None]]:
        """Its workers died with it; end their orphans, tell of each, and go on with its reserve, or start another."""
        successor = self._hearth.succeed() if not lease.is_over(self._page) else None
        if successor is None:
            self._hearth.put_out()
        self._false_starts = 0 if self.ready else self._false_starts + 1
        self.ready = False
        present = self._present
        if present is not None and self._owed.launch is None:
            stopped = present.attempt in self._owed.stopping or lease.is_over(self._page)
            for word in present.died_with_server(stopped=stopped):
                yield word, None
        for attempt in sorted(self._owed.stopping):
            yield messages.Stopped(attempt=attempt), None
        self._owed.inherit(self.settings)
        if successor is None:
            yield from self._start_again()
            return
        self._listen()
        yield replace(successor, why=()), None

    def _start_again(self) -> Iterator[tuple[messages.Word, int | None]]:
        """Another fork server: without the preload if the last one died of it.

        None after a few that died young, and none where the lease is over, which fork servers know themselves.
        """
        died_too_often = self._false_starts >= _MOST_FALSE_STARTS
        why = "the fork server dies again and again while it imports torch" if died_too_often else ""
        why = "nothing was heard of the driver for too long" if lease.is_over(self._page) else why
        if self._false_starts and self._preload:
            self._why = (f"cannot preload {', '.join(self._preload)}: the fork server died of it",)
            self._preload = ()
        try:
            if not why:
                self.start()
                return
        except OSError as error:
            why = f"the fork server cannot be started: {error}"
        yield messages.Ready(start_method="", why=(why,), torch=False, pid=0), None

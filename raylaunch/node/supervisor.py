"""The agent's side of the fork server: turns orders for the node into processes, and their ends into events."""

from __future__ import annotations

import contextlib
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.failure import Failure
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.node import deaths, keeper, messages, spool, timer, wire
from raylaunch.node.deaths import Death
from raylaunch.node.memory import KernelKills
from raylaunch.node.settings import NodeSettings
from raylaunch.worker.spec import Report

_MOST_FALSE_STARTS = 3


@dataclass(slots=True)
class _Present:
    """The present attempt on this node. `ends` holds all and only the ranks whose processes are gone."""

    part: Assignment
    pids: tuple[int, ...] = ()
    ends: dict[int, int] = field(default_factory=dict)
    late: list[Failure] = field(default_factory=list)
    values: dict[int, bytes] = field(default_factory=dict)
    finished: bool = False


Event = messages.Ready | messages.StoreOpen | WorkersStarted | WorkersExited | WorkersStopped
"""What `poll` gives. `at` in events and failures is this machine's CLOCK_MONOTONIC."""


class Supervisor:
    """One node's processes. Never blocks: whoever owns it waits for `fileno()` to be readable and calls `poll`."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = replace(
            settings,
            env=settings.env | timer.variables(settings.env),
            run_dir=settings.run_dir if settings.kept else spool.make(),
        )
        self.ready = False
        #: The fork server's process id, 0 until it is ready.
        self.server_pid = 0
        self._present: _Present | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._readable = select.epoll()
        #: Orders that came before the fork server was ready.
        self._waiting: list[messages.Order] = []
        #: What a new fork server has to make good for the one that died: ports of the stores it held (0: not told yet),
        #: and attempts that were to be stopped.
        self._stores: dict[int, int] = {}
        self._stopping: set[int] = set()
        self._preload = settings.preload
        self._why: tuple[str, ...] = ()
        #: Fork servers in a row that died before they were ready.
        self._false_starts = 0
        self._kills = KernelKills()

    def start(self) -> None:
        """Start the fork server; `Ready` comes when it has imported everything."""
        ours, theirs = wire.pair()
        self._server = subprocess.Popen(  # noqa: S603
            [sys.executable, "-u", keeper.__file__, str(theirs.fileno()), *self.settings.temporary()],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=self.settings.env,
            cwd=self.settings.cwd,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._readable.register(ours, select.EPOLLIN)
        wire.send(ours, messages.Begin(preload=self._preload, start_method=self.settings.start_method))

    def fileno(self) -> int:
        """Readable when `poll` has something; the same one whatever becomes of the fork server."""
        return self._readable.fileno()

    def launch(self, part: Assignment, meeting: Rendezvous) -> None:
        """End all earlier attempts without grace, then start this node's part of the next."""
        workers = tuple(self.settings.worker(part, local_rank, meeting) for local_rank in range(part.nproc))
        self._present = _Present(part=part)
        self._order(messages.StartWorkers(attempt=part.attempt, workers=workers))
        self._kills.mark()

    def stop(self, attempt: int, grace: float, signal: str = "SIGTERM") -> None:
        """End the attempt. `WorkersStopped` follows in any case."""
        self._stopping.add(attempt)
        self._order(messages.StopWorkers(attempt=attempt, grace=grace, signal=signal))

    def forward(self, attempt: int, signal: str) -> None:
        """Send the attempt's workers a signal that is not ours."""
        if self.ready:
            self._order(messages.SignalWorkers(attempt=attempt, signal=signal))

    def open_store(self, attempt: int) -> None:
        """Have a store ready for the attempt. `StoreOpen` follows."""
        self._stores[attempt] = 0
        self._order(self.settings.store(attempt, port=0))

    def values(self) -> dict[int, bytes]:
        """What the functions of the present attempt returned (or raised), pickled, by rank."""
        return dict(self._present.values) if self._present is not None else {}

    def close(self) -> None:
        """End the fork server and with it every process of ours on the node. Waits for that, for seconds at most."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(timeout=6.0)
            self._server = None
        self._kills.close()
        self._readable.close()
        for folder in self.settings.temporary():
            spool.remove(folder)

    def _order(self, order: messages.Order) -> None:
        if not self.ready or self._control is None:
            self._waiting.append(order)
            return
        with contextlib.suppress(OSError):  # gone: `poll` finds out and says what that means
            wire.send(self._control, order)

    def poll(self) -> list[Event]:
        """Everything that happened since the last time."""
        found: list[Event] = []
        failures: list[Failure] = []
        for word, fd in self._words():
            match word:
                case messages.Exited():
                    failures.extend(self._exited(word, fd))
                case messages.Stopped() | messages.Started():
                    found.extend(self._told(failures))
                    found.append(self._turned(word))
                case messages.Ready():
                    self.server_pid = word.pid
                    self._begin_serving()
                    found.append(replace(word, why=self._why + word.why))
                case messages.StoreOpen():
                    self._stores[word.attempt] = word.port
                    found.append(word)
        found.extend(self._told(failures))
        return found

    def _words(self) -> Iterator[tuple[messages.Word, int | None]]:
        while self._control is not None and _is_readable(self._control):
            try:
                yield wire.receive(self._control)
            except (EOFError, ConnectionError):
                yield from self._server_died()
                return

    def _begin_serving(self) -> None:
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._order(order)

    def _exited(self, word: messages.Exited, fd: int | None) -> list[Failure]:
        """The failures to tell now. Those we caused ourselves are kept for `WorkersStopped`."""
        report = _report(fd)
        present = self._present
        if present is None or word.attempt != present.part.attempt:
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
                found.append(WorkersExited(at=now, attempt=present.part.attempt, node=self.settings.node))
        return found

    def _turned(self, word: messages.Started | messages.Stopped) -> Event:
        now = time.monotonic()
        present = self._present
        if isinstance(word, messages.Started):
            self._stores = {attempt: port for attempt, port in self._stores.items() if attempt >= word.attempt}
            if present is not None and present.part.attempt == word.attempt:
                present.pids = word.pids
            return WorkersStarted(at=now, attempt=word.attempt, node=self.settings.node, pids=word.pids)
        self._stopping.discard(word.attempt)
        late: tuple[Failure, ...] = ()
        if present is not None and present.part.attempt == word.attempt:
            late, present.late = tuple(present.late), []
        return WorkersStopped(at=now, attempt=word.attempt, node=self.settings.node, failures=late)

    def _server_died(self) -> Iterator[tuple[messages.Word, int | None]]:
        """Its workers died with it; tell of each, end their orphans, and start another."""
        assert self._control is not None
        assert self._server is not None
        self._control.close()
        self._server.wait()  # for the keeper, which ends the orphans
        self._false_starts = 0 if self.ready else self._false_starts + 1
        self.ready = False
        unsent = [order for order in self._waiting if isinstance(order, messages.StartWorkers)]
        unsent = [order for order in unsent[-1:] if order.attempt not in self._stopping]
        present = self._present
        if present is not None and not unsent:
            for local_rank, rank in enumerate(present.part.ranks):
                if rank not in present.ends:
                    pid = present.pids[local_rank] if local_rank < len(present.pids) else 0
                    stopped = present.part.attempt in self._stopping
                    yield _died_with_server(present.part.attempt, rank, local_rank, pid, stopped=stopped), None
        for attempt in sorted(self._stopping):
            yield messages.Stopped(attempt=attempt), None
        self._waiting = [
            *(self.settings.store(attempt, port) for attempt, port in self._stores.items()),
            *unsent,
        ]
        yield from self._start_again()

    def _start_again(self) -> Iterator[tuple[messages.Word, int | None]]:
        """Another fork server: without the preload if the last one died of it, and none after a few that died young."""
        died_too_often = self._false_starts >= _MOST_FALSE_STARTS
        why = "the fork server dies again and again while it imports torch" if died_too_often else ""
        if self._false_starts and self._preload:
            self._why = (f"cannot preload {', '.join(self._preload)}: the fork server died of it",)
            self._preload = ()
        try:
            if not why:
                self.start()
                return
        except OSError as error:
            why = f"the fork server cannot be started: {error}"
        self._control = None
        yield messages.Ready(start_method="", why=(why,), torch=False, pid=0), None


def _died_with_server(attempt: int, rank: int, local_rank: int, pid: int, *, stopped: bool) -> messages.Exited:
    return messages.Exited(
        attempt=attempt,
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        exit_code=-signal.SIGKILL,
        stopped=stopped,
        at=time.monotonic(),
    )


def _is_readable(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def _report(fd: int | None) -> Report:
    if fd is None:
        return Report()
    data = wire.read_all(fd)
    if not data:
        return Report()
    return _loads(data)


def _loads(data: bytes) -> Report:
    try:
        report = pickle.loads(data)  # noqa: S301
    except Exception:  # noqa: BLE001
        return Report()  # cut off by a kill
    return report if isinstance(report, Report) else Report()

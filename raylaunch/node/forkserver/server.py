"""The fork server: the parent of all workers of a node, a Python that has imported torch and forks.

The subreaper starts it by fork and exec, never by a fork of a Ray worker. It runs no threads, touches no CUDA and
checks both about itself; where it is not safe to fork, each worker gets a fresh interpreter. When its supervisor is
gone or the node's lease has expired, it kills everything that it started and exits.

A `WorkerTable` has the processes of one attempt, from the fork until none of them is left. Each worker leads a session,
and what it starts is in its process group. Whatever is left when a worker has ended becomes a child of the fork server,
because the fork server is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER). So it is found there and not by the number of
the group, which may be somebody else's as soon as the worker has been reaped.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from signal import Signals

from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.measured import RestartTimings
from raylaunch.core.machine.workers_status import WorkerExit
from raylaunch.core.newtypes import NodeTime
from raylaunch.node.forkserver import file_timer, store
from raylaunch.node.forkserver.file_timer import FileTimer
from raylaunch.node.forkserver.lifeline import agent_is_gone, remove_folders, tell_that_all_have_ended
from raylaunch.node.forkserver.store import StoreTable
from raylaunch.node.linux import command_line, limits, processes, procfs
from raylaunch.node.linux.processes import CLEANUP_SECONDS, fork, run_at_bottom
from raylaunch.node.preload.controller import PreloadController
from raylaunch.node.preload.initial import import_ahead
from raylaunch.node.preload.zygote import Zygote
from raylaunch.node.preload.zygote_client import ForkedWorkers
from raylaunch.node.protocol import forkserver_messages, node_status, wire
from raylaunch.node.protocol.forkserver_messages import (
    ForkServerEvent,
    Reset,
    StackDumpStarted,
    StartWorkers,
    WorkersGone,
)
from raylaunch.node.protocol.node_goal import DumpStacks, SignalWorkers, StopWorkers
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime import boot, entry, process_setup, staleness
from raylaunch.worker.runtime.process_setup import encodable
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker.runtime.stack_signal import ALL_STACKS_SIGNAL, STACK_SIGNAL, can_write

_MOST_SECONDS = 3600.0
"""The longest that one turn waits: epoll(7) refuses more than 24 days."""
_COMPLETED_BYTES_PER_SECOND = 2**28
"""How fast a survivor writes its state into new memory, at least. An idle machine is ten times as fast."""
_POLL_SECONDS = 0.02
"""Seconds between two checks while killed processes are still there."""
_PATIENCE = 10.0
"""Seconds that a signal waits for a handler. Then it is sent in any case, as torchrun would do at once."""
_HANDLER_POLL_SECONDS = 0.05
"""Between two checks: the kernel does not tell when a handler is installed."""


def main(subreaper: int, control_fd: int, lifeline: int, folders: Sequence[str], started_at: float) -> int:
    """Serve until the supervisor or the subreaper, whose process id is given, is gone.

    `folders` are removed at the end, by whichever of the two is alive then. `started_at`: the time.time() before
    anything was imported. Returns the exit code, in each forked child that child's.
    """
    command_line.set_helper_title("fork server")
    processes.signal_on_parent_death(signal.SIGTERM, subreaper)
    processes.become_subreaper()
    entry.demote_bootstrap_path()
    serve = partial(_serve_and_end, subreaper, socket.socket(fileno=control_fd), lifeline, folders, started_at)
    return run_at_bottom(serve)


def _serve_and_end(
    subreaper: int, control: socket.socket, lifeline: int, folders: Sequence[str], started_at: float
) -> int:
    server = None
    try:
        initialize, _ = wire.receive(control)
        server = ForkServer(control, initialize, import_ahead(initialize), started_at)
        server.serve()
    except (EOFError, ConnectionError):
        pass  # the supervisor is gone
    except OSError as error:
        why = limits.explained(error, "the fork server")
        print(f"raylaunch: a fork server cannot go on: {why}", file=sys.stderr, flush=True)  # noqa: T201
        with contextlib.suppress(OSError):
            wire.send(control, forkserver_messages.ServerFailed(why=why))
    control.close()  # an agent that is alive notices that this process ends
    if server is not None:
        with contextlib.suppress(OSError):  # no file descriptor is left: the subreaper ends the rest
            server.end(lifeline)
    is_alone = os.getppid() != subreaper
    if is_alone:
        tell_that_all_have_ended(lifeline)
    if is_alone or agent_is_gone(lifeline):  # else the subreaper, once this process has ended
        remove_folders(folders, lifeline, is_last=is_alone)
    return 0


class ForkServer:
    """Carries out the supervisor's orders one at a time, and reports what becomes of the processes."""

    def __init__(
        self,
        control: socket.socket,
        initialize: forkserver_messages.Initialize,
        ready: node_status.Ready,
        started_at: float,
    ) -> None:
        """`control`: the socket to the supervisor. `ready`: what to tell it when serving begins.

        `started_at`: the time.time() before anything was imported.
        """
        self.control = control
        self.page = SharedPage.open(initialize.page)
        self.ready = ready
        self._started_at = started_at
        forks = ready.start_method == StartMethod.FORKSERVER
        self.stores = StoreTable(self._run_store)
        self.timer = FileTimer(file_timer.file_of(os.environ))
        self.preloader = PreloadController(
            replace(initialize, preload_auto=initialize.preload_auto and forks), self._send
        )
        self.workers = WorkerTable(self._send, other_children=self._other_children)
        #: The order that is carried out as soon as nothing of the attempts before is alive.
        self._pending: StartWorkers | Reset | None = None
        #: Of the last attempt that was ordered, as far as it has got.
        self._timings = RestartTimings(ordered=NodeTime(0.0), ended=NodeTime(0.0), forked=NodeTime(0.0))
        #: How many workers of the present attempt are survivors.
        self._stayed = 0
        self._terminated = False

    def _other_children(self) -> set[int]:
        """Process ids of children that are no workers."""
        return {self.timer.pid, self.preloader.zygote.pid, *self.stores.pids()}

    def _send(self, event: forkserver_messages.ForkServerEvent, fd: int | None = None) -> None:
        wire.send(self.control, event, fd=fd)

    def serve(self) -> int:
        """Serve until the supervisor is gone or the lease has expired: both raise EOFError or OSError.

        Never returns. In each forked child `BecomeChild` is raised from here.
        """
        wake, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # before the first fork: a child may end at once
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._terminate)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self._fork_missing()
        self._send(self.ready)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self.preloader.zygote, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._timeout())}
                if wake in ready:
                    os.read(wake, 4096)
                self._turn(has_order=self.control in ready)

    def _timeout(self) -> float | None:
        """Seconds until something is due that no file descriptor tells of.

        A lease that was renewed meanwhile costs one turn that finds nothing to do.
        """
        due = (
            self.workers.until_deadline(),
            self.page.lease_seconds_left,
            self.preloader.seconds_until_poll(),
        )
        return min((min(max(0.0, seconds), _MOST_SECONDS) for seconds in due if seconds is not None), default=None)

    def _terminate(self, number: int, _frame: object) -> None:
        """Handle SIGTERM, from a person or because the subreaper died: exit in the next turn.

        SIGHUP comes where this process was stopped when the subreaper died: the kernel has woken it (see `subreaper`).
        """
        self._terminated = True
        if os.getpid() != self.ready.pid:  # a worker that has not reset its handlers yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _turn(self, *, has_order: bool) -> None:
        if self._terminated or self.page.lease_has_expired:
            raise EOFError
        self._reap()
        if has_order:
            order, _ = wire.receive(self.control)
            self._handle(order)
        self.workers.advance()
        self.preloader.poll()
        match self._pending:
            case StartWorkers() as start if self.workers.is_gone and not self.preloader.delays_start:
                self._begin_attempt(start)
            case Reset() if self.workers.is_gone:
                self._finish_reset()
        self._fork_missing()

    def _reap(self) -> None:
        """Reap all children that have ended, and do what follows for each that is no worker."""
        ended = self.workers.reap()
        for process in (self.timer, self.preloader.zygote):
            process.reaped(ended)
        for opened in self.stores.reaped(ended):
            self._send(opened)

    def _handle(self, order: forkserver_messages.ForkServerOrder) -> None:
        match order:
            case StartWorkers():
                self._pending, self._timings = order, replace(self._timings, ordered=NodeTime(time.monotonic()))
                self.workers.kill(order.survivors, order.return_seconds, order.to_complete)
            case forkserver_messages.SurvivorReturned():
                self._handle_survivor(order)
            case StopWorkers():
                self._stop(order)
            case SignalWorkers():
                self.workers.signal(order.attempt, signal.Signals[order.signal])
            case forkserver_messages.StartStore():
                self._start_store(order)
            case DumpStacks():
                self.workers.dump_stacks(order.attempt, order.in_full)
            case Reset():
                self._pending = order
                self.stores.close_all()
                self.workers.kill()
            case forkserver_messages.Activate():
                self._activate()
            case _:
                assert isinstance(order, forkserver_messages.ReadPage)  # each turn reads the lease

    # The workers.

    def _handle_survivor(self, order: forkserver_messages.SurvivorReturned) -> None:
        latest = self._pending if isinstance(self._pending, StartWorkers) else self.workers
        if order.attempt != latest.attempt:
            return
        if order.completed:
            self.workers.survivors.record_completed(order.pid)
        else:
            self.workers.survivors.record_return(order.pid)

    def _stop(self, order: StopWorkers) -> None:
        if isinstance(self._pending, StartWorkers) and self._pending.attempt == order.attempt:
            self._pending = None
        self.workers.stop(order.attempt, order.grace, signal.Signals[order.signal])

    def _begin_attempt(self, order: StartWorkers) -> None:
        self._pending, self._timings = None, replace(self._timings, ended=NodeTime(time.monotonic()))
        self.stores.close_before(order.attempt)
        self._stayed = len(self.workers.survivors.pids)
        self.page.reset(order.attempt, len(order.workers))
        self.workers.begin(order.attempt, order.workers, self.preloader.begin_attempt(order.workers))

    def _fork_workers(self) -> None:
        if self.workers.fork(self.preloader.fork_workers, self._run_worker):
            timings = replace(self._timings, forked=NodeTime(time.monotonic()))
            pids, attempt = self.workers.forked_pids(), self.workers.attempt
            self._send(
                forkserver_messages.WorkersForked(attempt=attempt, pids=pids, timings=timings, stayed=self._stayed)
            )

    def _run_worker(self, spec: WorkerSpec, report: int, stacks: int, imports: int) -> int:
        command_line.set_worker_title(spec.title)
        self._detach()
        spawns = self.ready.start_method == StartMethod.SPAWN and spec.kind != "command"
        server = os.getppid()
        files = (ServerFile.inherited(fd, server) for fd in (report, stacks, imports) if fd >= 0)
        return boot.set_up_and_run(spec, boot.WorkerFiles(*files), server, exec_boot if spawns else boot.run)

    def _detach(self) -> None:
        """In a child: let no object close a file descriptor later, which may be another file's by then."""
        self.control.detach()
        self.preloader.zygote.close_in_child()

    # Another run.

    def _finish_reset(self) -> None:
        self._pending = None
        self.workers.begin(0)
        self.page.reset(0, 0)
        self._send(forkserver_messages.ResetDone())

    def _activate(self) -> None:
        if staleness.changed_since(self._started_at):
            raise EOFError  # an imported file has changed
        self._send(self.ready)

    # What is missing.

    def _fork_missing(self) -> None:
        """Fork what is missing: workers first, then timer and zygote, which they can do without."""
        self._fork_workers()
        with contextlib.suppress(OSError):  # the next turn tries again
            self.timer.start(self._run_timer)
            self.preloader.request_imports(lambda line: fork(partial(self._run_zygote, line)))

    def _run_zygote(self, line: socket.socket) -> int:
        return Zygote(line, self._become_helper(line.fileno())).serve()

    # Other children.

    def _start_store(self, order: forkserver_messages.StartStore) -> None:
        if order.fixed:  # kill earlier attempts, and wait until their stores have left the port
            if isinstance(self._pending, StartWorkers) and self._pending.attempt < order.attempt:
                self._pending = None
            if self.workers.attempt < order.attempt:
                self.workers.kill()
            self.stores.vacate(order.attempt)
        self._send(self.stores.open(order))

    def _become_helper(self, *fds: int) -> int:
        """In a child that is no worker: keep only these files, and die with the fork server. Returns its process id."""
        self._detach()
        parent = os.getppid()
        process_setup.die_with_parent(parent)
        process_setup.close_other_fds(*fds)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return parent

    def _run_store(self, address: str, port: int, listening: int) -> int:
        parent = self._become_helper(listening)
        store.run(parent, address, port, listening, forked=self.ready.start_method == StartMethod.FORKSERVER)
        return 0

    def _run_timer(self) -> int:
        parent = self._become_helper()
        file_timer.run(parent, self.timer.path, forked=self.ready.start_method == StartMethod.FORKSERVER)
        return 0

    def end(self, lifeline: int) -> None:
        """Kill every process that was started here, and what those started.

        Waits until they have ended, as long as the agent waits for that; else for seconds at most.
        """
        self.stores.close_all()
        self.timer.kill()
        self.preloader.zygote.kill()
        self.workers.kill()
        while not self.workers.wait_until_gone(CLEANUP_SECONDS) and not agent_is_gone(lifeline):
            pass


@dataclass(frozen=True, slots=True)
class _WorkerProcess:
    spec: WorkerSpec
    report: int
    stacks: int


class WorkerTable:
    """All processes of the present attempt."""

    def __init__(
        self,
        send: Callable[[ForkServerEvent, int | None], None],
        other_children: Callable[[], Collection[int]],
    ) -> None:
        """`send` sends an event to the supervisor, with a file descriptor or None.

        `other_children` returns the process ids of the fork server's children that are no workers.
        """
        self._send = send
        self._other_children = other_children
        self.attempt = 0
        self._alive: dict[int, _WorkerProcess] = {}
        #: Process ids of all workers of the attempt that were forked, by local rank.
        self._forked: dict[int, int] = {}
        #: All workers of the attempt, until they are reported as forked.
        self._unreported: tuple[WorkerSpec, ...] = ()
        self.survivors = Survivors()
        self._imports = -1
        self._killing = False
        #: Whether no process of the attempt is left that may be killed, but for survivors that have returned, as the
        #: latest `advance` after `kill` found.
        self.is_gone = False
        #: When workers that are to stop are killed; None: none is to stop, or `WorkersGone` has been sent.
        self._kill_at: float | None = None
        self._deferred = DeferredSignals()

    def begin(self, attempt: int, workers: tuple[WorkerSpec, ...] = (), imports: int = -1) -> None:
        """Begin an attempt with these workers. `fork` forks all but the survivors of the attempt before.

        No other process of that attempt may be left. `imports`: the file for import records, or -1.
        """
        survivors = {self._alive[pid].spec.local_rank: pid for pid in self.survivors.pids}
        self.attempt = attempt
        self._forked = {}
        self._unreported, self._imports = workers, imports
        for spec in workers:
            if (pid := survivors.get(spec.local_rank)) is not None:
                self.add(pid, spec, self._alive[pid].report, self._alive[pid].stacks)
        self.survivors.clear()
        self._killing = self.is_gone = False
        self._kill_at = None
        self._deferred = DeferredSignals()

    def fork(
        self,
        fork_by_zygote: Callable[[tuple[WorkerSpec, ...], list[tuple[int, ...]]], ForkedWorkers | None],
        run: Callable[[WorkerSpec, int, int, int], int],
    ) -> bool:
        """Fork the workers of the attempt, with `run` for each one unless the zygote forks them. Called in each turn.

        Returns True once, when all workers of the attempt are there, and no survivor writes. Workers that cannot be
        forked are reported as failed.
        """
        if not self._unreported:
            return False
        try:
            if unforked := self._unforked():
                self._fork(unforked, fork_by_zygote, run)
        except OSError as shortage:
            failed, self._unreported = self._unforked(), ()
            why = f"the process cannot be started: {limits.explained(shortage, 'the fork server')}"
            error = WorkerError(type="OSError", message=why, traceback="", timestamp=int(time.time()))
            for spec in failed:
                self._send(self._exit(spec, 0, 1, error), None)
            return False
        if self.survivors.until_completed() is not None:
            return False
        self._unreported = ()
        return True

    def _unforked(self) -> tuple[WorkerSpec, ...]:
        return tuple(spec for spec in self._unreported if spec.local_rank not in self._forked)

    def _fork(
        self,
        workers: tuple[WorkerSpec, ...],
        fork_by_zygote: Callable[[tuple[WorkerSpec, ...], list[tuple[int, ...]]], ForkedWorkers | None],
        run: Callable[[WorkerSpec, int, int, int], int],
    ) -> None:
        files: list[int] = []  # of each worker in turn, for its report and for its stacks
        try:
            files.extend(map(wire.memory_file, ("raylaunch-report", "raylaunch-stacks") * len(workers)))
            pairs = list(zip(files[::2], files[1::2], strict=True))
            forked = fork_by_zygote(workers, [(*own, self._imports) for own in pairs])
            for index, (spec, own) in enumerate(zip(workers, pairs, strict=True)):
                pid = processes.fork(partial(run, spec, *own, self._imports)) if forked is None else forked.pids[index]
                self.add(pid, spec, *own)
                del files[:2]
        except OSError:
            for file in files:
                os.close(file)
            raise
        if forked is not None:
            forked.start()

    def add(self, pid: int, spec: WorkerSpec, report: int, stacks: int) -> None:
        """Add a worker that was forked. The files for its report and its stacks are closed when it has ended."""
        self._alive[pid] = _WorkerProcess(spec, report, stacks)
        self._forked[spec.local_rank] = pid

    def pids(self) -> tuple[int, ...]:
        """Return the process ids of live workers, in the order of their local ranks."""
        return tuple(pid for pid in self.forked_pids() if pid in self._alive)

    def forked_pids(self) -> tuple[int, ...]:
        """Return the process ids of all workers that were forked, in the order of their local ranks."""
        return tuple(pid for _, pid in sorted(self._forked.items()))

    def stop(self, attempt: int, grace: float, number: Signals = signal.SIGTERM) -> None:
        """Send the signal; `advance` sends SIGKILL after `grace` seconds. Leads to `WorkersGone` in any case."""
        if attempt != self.attempt:
            self._send(WorkersGone(attempt=attempt), None)
            return
        self._unreported = ()
        self.survivors.clear()
        grace = max(0.0, grace)  # also for nan, with which no comparison would ever be true
        kill_at = time.monotonic() + grace
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if grace > 0 and not self._killing:
            for pid in self._alive:
                if not processes.signal_group(pid, number):  # it leads no group yet
                    os.kill(pid, number)
                processes.signal_group(pid, signal.SIGCONT)  # one that is stopped does not run its handler

    def signal(self, attempt: int, number: Signals) -> None:
        """Send a signal to the workers alone, not to what they started. Does nothing once they are to stop."""
        if attempt == self.attempt and not self._is_stopping:
            for pid, worker in self._alive.items():
                if worker.spec.kind == "command":  # what became another program may never answer it
                    os.kill(pid, number)
                else:
                    self._deferred.signal(pid, number)

    def dump_stacks(self, attempt: int, in_full: Collection[int]) -> None:
        """Make the workers write their stacks, unless the signal would kill them, or write to a file of the script.

        `in_full`: see `DumpStacks`.
        """
        started: list[tuple[StackDumpStarted, int]] = []
        for pid, worker in self._alive.items() if attempt == self.attempt else ():
            start = os.fstat(worker.stacks).st_size
            number = ALL_STACKS_SIGNAL if worker.spec.rank in in_full else STACK_SIGNAL
            has_handler = worker.spec.kind != "command" and procfs.catches(pid, number)
            is_closed = has_handler and not can_write(pid, worker.stacks)
            is_signalled = has_handler and not is_closed
            if is_signalled:
                os.kill(pid, number)
            rank = worker.spec.rank
            event = StackDumpStarted(
                attempt=attempt, rank=rank, start=start, is_signalled=is_signalled, is_closed=is_closed
            )
            started.append((event, worker.stacks))
        for event, file in started:
            self._send(event, file)

    def kill(self, survivors: Collection[int] = (), return_seconds: float = 0.0, to_complete: int = 0) -> None:
        """Kill all workers, their process groups, and what others left. `advance` finds out when they are gone.

        `survivors`, `return_seconds`, `to_complete`: see `StartWorkers`.
        """
        self._killing = True
        self.is_gone = False
        self._unreported = ()
        self.survivors.wait_for(survivors, return_seconds, to_complete)
        for pid in self.survivors.pids - self._alive.keys():
            self.survivors.remove(pid)
        for pid in self._alive.keys() - self.survivors.pids:
            processes.kill_with_group(pid)
        self._kill_orphans()

    @property
    def _is_stopping(self) -> bool:
        """Whether the workers are to end, by themselves or by a kill."""
        return self._killing or self._kill_at is not None

    def advance(self) -> None:
        """Do what is due: deliver deferred signals; kill what is out of time, and report `WorkersGone` at the end.

        It is called once in each turn.
        """
        if not self._is_stopping:
            self._deferred.deliver(self._alive)
            return
        out_of_time = self._kill_at is not None and time.monotonic() >= self._kill_at
        if not self._killing and (out_of_time or not self._alive):
            self.kill()
        if self._killing:
            for pid in self.survivors.late():
                self.survivors.remove(pid)
                processes.kill_with_group(pid)
            left = self._alive.keys() - self.survivors.returned
            self.is_gone = not left and not self._kill_orphans()
        if self.is_gone and self._kill_at is not None:
            self._kill_at = None
            self._send(WorkersGone(attempt=self.attempt), None)

    def _kill_orphans(self) -> bool:
        """Kill the children that are no workers of the attempt, with their groups. Return whether there were any."""
        orphans = processes.children() - self._alive.keys() - set(self._other_children())
        # Most are in the group of a worker that has ended. The group's number is not free, since they are members.
        for group in {os.getpgid(pid) for pid in orphans} - {os.getpgrp()}:
            processes.signal_group(group, signal.SIGKILL)
        return bool({pid for pid in orphans if processes.kill_with_group(pid)})

    def until_deadline(self) -> float | None:
        """Return the seconds until `advance` has something to do that no signal tells of. None: nothing."""
        if not self._is_stopping:
            left = self.survivors.until_completed() if self._unreported else None
            polls = self._deferred.until_poll()
            return min((seconds for seconds in (left, polls) if seconds is not None), default=None)
        if self._killing and not self.is_gone:
            return _POLL_SECONDS
        if self._kill_at is not None:
            return max(0.0, self._kill_at - time.monotonic())
        return None

    def reap(self) -> set[int]:
        """Reap every child that has ended, and report the workers. Returns the process ids of the others."""
        others = set()
        for pid, status in _reaped():
            worker = self._alive.pop(pid, None)
            self.survivors.remove(pid)
            if worker is None:
                others.add(pid)
                continue
            try:
                self._send(self._exit(worker.spec, pid, os.waitstatus_to_exitcode(status)), worker.report)
            finally:
                os.close(worker.report)
                os.close(worker.stacks)
        return others

    def _exit(self, spec: WorkerSpec, pid: int, code: int, error: WorkerError | None = None) -> WorkerExit:
        return WorkerExit(
            attempt=self.attempt,
            rank=spec.rank,
            local_rank=spec.local_rank,
            pid=pid,
            exit_code=code,
            stopped=self._is_stopping,
            at=NodeTime(time.monotonic()),
            error=error,
        )

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait until no process is left, without reporting. Returns False when the seconds are over."""
        self._send = lambda *_: None
        deadline = time.monotonic() + seconds
        while self._alive or self._kill_orphans():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS / 10)
            self.reap()
        return True


def _reaped() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(end)
    return found


def exec_boot(spec: WorkerSpec, files: boot.WorkerFiles) -> int:
    """In a worker of start method `spawn`: become a fresh interpreter that runs the script."""
    fds = (wire.memory_file("raylaunch-spec", pickle.dumps(spec)), files.report.fd, files.stacks.fd)
    for fd in fds:
        os.set_inheritable(fd, True)
    command = [sys.orig_argv[0], "-u", boot.__file__, *map(str, fds), encodable(spec.title)]
    os.execve(sys.executable, command, spec.env)


class Survivors:
    """Workers that may stay when the next attempt begins, by process id, and until when they are waited for.

    One of them may complete its last light commit, which is waited for also after the attempt has begun.
    """

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        #: Those that have left everything of their attempt.
        self.returned: set[int] = set()
        self._return_by = 0.0
        #: The one that completes its last light commit, and until when that is waited for; 0: there is none.
        self._completing = 0
        self._complete_by = 0.0

    @property
    def pids(self) -> set[int]:
        """All that may still stay."""
        return self._awaited | self.returned

    def wait_for(self, pids: Collection[int], return_seconds: float, to_complete: int) -> None:
        """Let these stay, and no others, if they return in time. The first of them then writes `to_complete` bytes."""
        self._awaited, self.returned = set(pids), set()
        # One may still write what it was told to before.
        self._return_by = return_seconds + max(time.monotonic(), self._complete_by)
        if to_complete and pids:
            self._completing = next(iter(pids))
            self._complete_by = self._return_by + to_complete / _COMPLETED_BYTES_PER_SECOND

    def record_return(self, pid: int) -> None:
        """Record that a worker has left everything of its attempt."""
        if pid in self._awaited:
            self._awaited.remove(pid)
            self.returned.add(pid)

    def record_completed(self, pid: int) -> None:
        """Record that a worker has written what it was told to, or will not."""
        if pid == self._completing:
            self._completing, self._complete_by = 0, 0.0

    def remove(self, pid: int) -> None:
        """Do not wait for this worker any more: it has ended, or is killed."""
        self._awaited.discard(pid)
        self.returned.discard(pid)
        self.record_completed(pid)

    def clear(self) -> None:
        """Let none stay any more. A commit is still waited for."""
        self._awaited, self.returned = set(), set()

    def late(self) -> set[int]:
        """Return those that have not returned in time."""
        return set(self._awaited) if time.monotonic() >= self._return_by else set()

    def until_completed(self) -> float | None:
        """Return for how many seconds the commit is still waited for; None: no longer."""
        left = self._complete_by - time.monotonic()
        return left if left > 0 else None


class DeferredSignals:
    """Signals that wait until a worker has a handler for them.

    A worker that has just been forked has none yet, and would be killed by a signal that its script is going to handle.
    The same signal waits only once for a worker, as a pending signal does in the kernel.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._latest: dict[tuple[int, Signals], float] = {}

    def signal(self, pid: int, number: Signals) -> None:
        """Send the signal at once if the process catches or ignores it, else defer it."""
        if procfs.catches_or_ignores(pid, number):
            os.kill(pid, number)
        else:
            self._latest.setdefault((pid, number), time.monotonic() + self._patience)

    def deliver(self, alive: Collection[int]) -> None:
        """Send what can be sent by now or has waited long enough. Signals for processes not in `alive` are dropped."""
        for (pid, number), latest in list(self._latest.items()):
            if pid not in alive:
                del self._latest[pid, number]
            elif procfs.catches_or_ignores(pid, number) or time.monotonic() >= latest:
                del self._latest[pid, number]
                os.kill(pid, number)

    def until_poll(self) -> float | None:
        """Return the seconds until `deliver` has something to do. None: nothing waits."""
        return _HANDLER_POLL_SECONDS if self._latest else None

"""The fork server: the parent of all workers of a node, a Python that has imported torch and forks.

The subreaper starts it by fork and exec, never by a fork of a Ray worker. It runs no threads, touches no CUDA and
checks both about itself; where it is not safe to fork, each worker gets a fresh interpreter. When its supervisor is
gone or the node's lease has expired, it kills everything that it started and exits.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from raylaunch.core.job.job import StartMethod
from raylaunch.core.machine.events_and_actions import RestartTimings
from raylaunch.core.newtypes import NodeTime
from raylaunch.node.forkserver import file_timer, store
from raylaunch.node.forkserver.file_timer import FileTimer
from raylaunch.node.forkserver.lifeline import remove_folders
from raylaunch.node.forkserver.store import StoreTable
from raylaunch.node.forkserver.worker_table import WorkerTable, exec_boot
from raylaunch.node.linux import command_line, limits, processes
from raylaunch.node.linux.processes import CLEANUP_SECONDS, fork, run_at_bottom
from raylaunch.node.preload.controller import PreloadController
from raylaunch.node.preload.initial import import_preloads
from raylaunch.node.preload.zygote import Zygote
from raylaunch.node.protocol import forkserver_messages, node_status, wire
from raylaunch.node.protocol.node_goal import DumpStacks, SignalWorkers, StopWorkers
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime import boot, entry, process_setup, staleness
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec

_MOST_SECONDS = 3600.0
"""The longest that one turn waits: epoll(7) refuses more than 24 days."""
_STATE_MODULES = ("raylaunch.worker.state.elastic_state", "raylaunch.worker.survivors.elastic_function")
"""What a worker would import for `State` and `elastic`, which takes 30 ms, with all that they import."""


def main(subreaper: int, control_fd: int, lifeline: int, folders: Sequence[str], started_at: float) -> int:
    """Serve until the supervisor or the subreaper, whose process id is given, is gone.

    `folders` are removed at the end, by whichever of the two is alive then. `started_at`: the time.time() before
    anything was imported. Returns the exit code, in each forked child that child's.
    """
    command_line.set_helper_title("fork server")
    processes.signal_on_parent_death(signal.SIGTERM, subreaper)
    processes.become_subreaper()
    entry.demote_bootstrap_path()
    serve = partial(_serve_and_end, socket.socket(fileno=control_fd), lifeline, folders, started_at)
    return run_at_bottom(serve)


def _serve_and_end(control: socket.socket, lifeline: int, folders: Sequence[str], started_at: float) -> int:
    server = None
    try:
        initialize, _ = wire.receive(control)
        server = ForkServer(control, initialize, _import_ahead(initialize), started_at)
        server.serve()
    except (EOFError, ConnectionError):
        pass  # the supervisor is gone
    except OSError as error:
        why = limits.explained(error, "the fork server")
        print(f"raylaunch: a fork server cannot go on: {why}", file=sys.stderr, flush=True)  # noqa: T201
        with contextlib.suppress(OSError):
            wire.send(control, forkserver_messages.ServerFailed(why=why))
    if server is not None:
        with contextlib.suppress(OSError):  # no file descriptor is left: the subreaper ends the rest
            server.end()
    control.close()  # an agent that is alive notices the end
    remove_folders(folders, lifeline)
    return 0


def _import_ahead(initialize: forkserver_messages.Initialize) -> node_status.Ready:
    """Import what the job preloads and, if the script may use them, the modules of `State` and `elastic`."""
    if initialize.start_method == StartMethod.FORKSERVER and _may_use_state(initialize.script):
        for module in _STATE_MODULES:
            import_module(module)
    ready = import_preloads(initialize)
    staleness.note_preloaded()
    return ready


def _may_use_state(script: str) -> bool:
    """Return whether a script names this package; True if it cannot be read, or workers run something else."""
    try:
        return not script or b"raylaunch" in Path(script).read_bytes()
    except OSError:
        return True


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
        #: An attempt that starts as soon as nothing of the attempts before it is alive. Then: when it was ordered, and
        #: when they had ended.
        self._launch: forkserver_messages.StartWorkers | None = None
        self._ordered_at = self._ended_at = NodeTime(0.0)
        #: How many workers of the present attempt are survivors.
        self._stayed = 0
        #: `ResetDone` is to be sent when nothing of the run is alive any more.
        self._resetting = False
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
        if self._launch is not None and not self.preloader.delays_start and self.workers.is_gone:
            self._begin_attempt(self._launch)
        self._fork_missing()
        if self._resetting and self.workers.is_gone:
            self._finish_reset()

    def _reap(self) -> None:
        """Reap all children that have ended, and do what follows for each that is no worker."""
        ended = self.workers.reap()
        for process in (self.timer, self.preloader.zygote):
            process.reaped(ended)
        for opened in self.stores.reaped(ended):
            self._send(opened)

    def _handle(self, order: forkserver_messages.ForkServerOrder) -> None:
        match order:
            case forkserver_messages.StartWorkers():
                self._launch, self._ordered_at = order, NodeTime(time.monotonic())
                self.workers.kill(order.survivors, order.return_seconds, order.to_complete)
            case forkserver_messages.SurvivorReturned() | forkserver_messages.SurvivorCompleted():
                self._handle_survivor(order)
            case StopWorkers():
                self._stop(order)
            case SignalWorkers():
                self.workers.signal(order.attempt, signal.Signals[order.signal])
            case forkserver_messages.StartStore():
                self._start_store(order)
            case DumpStacks():
                self.workers.dump_stacks(order.attempt, order.in_full)
            case forkserver_messages.Reset():
                self._reset()
            case forkserver_messages.Activate():
                self._activate()
            case _:
                assert isinstance(order, forkserver_messages.ReadPage)  # each turn reads the lease

    # The workers.

    def _handle_survivor(
        self, order: forkserver_messages.SurvivorReturned | forkserver_messages.SurvivorCompleted
    ) -> None:
        if order.attempt != (self._launch or self.workers).attempt:
            return
        if isinstance(order, forkserver_messages.SurvivorCompleted):
            self.workers.completed(order.pid)
        else:
            self.workers.returned(order.pid)

    def _stop(self, order: StopWorkers) -> None:
        if self._launch is not None and self._launch.attempt == order.attempt:
            self._launch = None
        self.workers.stop(order.attempt, order.grace, signal.Signals[order.signal])

    def _begin_attempt(self, order: forkserver_messages.StartWorkers) -> None:
        self._launch, self._ended_at = None, NodeTime(time.monotonic())
        self.stores.close_before(order.attempt)
        self._stayed = len(self.workers.survivors())
        self.page.reset(order.attempt, len(order.workers))
        self.workers.begin(order.attempt, order.workers, self.preloader.begin_attempt(order.workers))

    def _fork_workers(self) -> None:
        if self.workers.fork(self.preloader.fork_workers, self._run_worker):
            timings = RestartTimings(ordered=self._ordered_at, ended=self._ended_at, forked=NodeTime(time.monotonic()))
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

    def _reset(self) -> None:
        self._launch, self._resetting = None, True
        self.stores.close_all()
        self.workers.kill()

    def _finish_reset(self) -> None:
        self._resetting = False
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
            if self._launch is not None and self._launch.attempt < order.attempt:
                self._launch = None
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

    def end(self) -> None:
        """Kill every process that was started here, and what those started. Waits for that, for seconds at most."""
        self.stores.close_all()
        self.timer.kill()
        self.preloader.zygote.kill()
        self.workers.kill()
        self.workers.wait_until_gone(CLEANUP_SECONDS)

"""The warm parent of all workers of a node: a clean Python that imports torch once and forks.

Started by exec, never by a fork of a Ray worker. It runs no threads and touches no CUDA, and checks that about
itself; where it cannot be clean, workers get a fresh interpreter each. When its supervisor is gone, or the node's
lease is over, it ends everything it started and then itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial

from raylaunch.core.events import Turnover
from raylaunch.node import lease, messages, nameless, outdated, processes, store, timer, wire
from raylaunch.node.brood import Brood
from raylaunch.node.clean import what_forbids_forking
from raylaunch.node.learning import Learning
from raylaunch.node.understudy import Role, Understudy
from raylaunch.worker import agent_store, boot, entry
from raylaunch.worker.page import Page
from raylaunch.worker.spec import WorkerSpec


def warm_up(begin: messages.Begin) -> messages.Ready:
    """Import what was asked for, and find out whether this process may fork."""
    with processes.only_young_collected():
        why = [word for module in begin.preload if (word := _import(module))]
    wanted = any(module.partition(".")[0] == "torch" for module in begin.preload)
    torch = "torch" in sys.modules or (not wanted and importlib.util.find_spec("torch") is not None)
    method = begin.start_method
    if method == "forkserver" and (unclean := what_forbids_forking()):
        method = "spawn"
        why.append(f"workers start in fresh interpreters: after the preload, {unclean}")
    if method == "forkserver":
        nameless.ask_for_no_names()
    processes.get_ready_to_fork()
    return messages.Ready(start_method=method, why=tuple(why), torch=torch, pid=os.getpid())


def _import(module: str) -> str:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"cannot preload `{module}`: {type(error).__name__}: {error}"
    return ""


class ForkServer:
    """Obeys the supervisor's orders, one at a time, and says what became of the processes."""

    def __init__(self, control: socket.socket, begin: messages.Begin, ready: messages.Ready, began: float) -> None:
        """`began`: the time.time() before anything was imported."""
        self.pid = os.getpid()
        self.control = control
        self.page = Page.open(begin.page)
        self.ready = ready
        self.began = began
        self.start_method = ready.start_method
        self.stores: dict[int, int] = {}
        self.timer_file = timer.file_of(os.environ)
        self.timer = 0
        self.learning = Learning(replace(begin, learn=begin.learn and ready.start_method == "forkserver"), self._say)
        self.brood = Brood(self._say, spared=lambda: {self.timer, self.learning.standby.pid, *self.stores.values()})
        #: Attempts wait here until nothing of those before them is alive.
        self.next: messages.StartWorkers | None = None
        self.ordered = 0.0
        #: The run is over, and this is to be said when nothing of it is alive any more.
        self.resting = False
        self.ended = False

    def _say(self, word: messages.Word, fd: int | None = None) -> None:
        wire.send(self.control, word, fd=fd)

    def serve(self) -> Role:
        """Until the supervisor is gone, which raises EOFError or OSError, as if it were where the lease is over.

        Returns in a forked child: its role.
        """
        if self.timer_file:
            self.timer = os.fork()
            if self.timer == 0:
                return self._be_timer
        wake, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self.learning.standby, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._timeout())}
                if wake in ready:
                    os.read(wake, 4096)
                role = self._turn(has_order=self.control in ready)
                if role is not None:
                    return role

    def _timeout(self) -> float | None:
        """Seconds to the next thing that nobody tells. A lease that was renewed meanwhile is only looked at."""
        ends = (self.brood.until_deadline(), lease.seconds_left(self.page), self.learning.until_look())
        return min((max(0.0, end) for end in ends if end is not None), default=None)

    def _end(self, number: int, _frame: object) -> None:
        """SIGTERM, from a person or because the keeper died: end as if the supervisor were gone, at the next turn."""
        self.ended = True
        if os.getpid() != self.pid:  # a worker so young that the handler is still ours
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _turn(self, *, has_order: bool) -> Role | None:
        if self.ended or lease.is_over(self.page):
            raise EOFError
        self.brood.reap()
        if has_order:
            order, _ = wire.receive(self.control)
            role = self._obey(order)
            if role is not None:
                return role
        self.brood.press()
        line = self.learning.turn()
        if line is not None and (role := self._fork_understudy(line)) is not None:
            return role
        if self.next is not None and not self.learning.holds_up and self.brood.is_gone():
            return self._start(self.next)
        if self.resting and self.brood.is_gone():
            self._forget()
        return None

    def _obey(self, order: messages.Order) -> Role | None:
        match order:
            case messages.StartWorkers():
                self.next, self.ordered = order, time.monotonic()
                self.brood.kill()
            case messages.StopWorkers():
                self._stop(order)
            case messages.SignalWorkers():
                self.brood.forward(order.attempt, signal.Signals[order.signal])
            case messages.OpenStore():
                return self._open_store(order)
            case messages.DumpStacks():
                self.brood.dump(order.attempt)
            case messages.LookAtPage():
                pass  # each turn does
            case messages.Rest():
                self._rest()
            case messages.Wake():
                self._wake()
            case messages.Begin():
                raise AssertionError(order)
        return None

    def _stop(self, order: messages.StopWorkers) -> None:
        if self.next is not None and self.next.attempt == order.attempt:
            self.next = None
        self.brood.stop(order.attempt, order.grace, signal.Signals[order.signal])

    def _rest(self) -> None:
        self.next, self.resting = None, True
        for attempt in list(self.stores):
            self._close_store(attempt)
        self.brood.kill()

    def _wake(self) -> None:
        if outdated.since(self.began):
            raise EOFError  # as if nobody wanted us any more
        self._say(self.ready)

    def _forget(self) -> None:
        self.resting = False
        self.brood.begin(0)
        self.page.begin(0, 0)
        self._say(messages.Rested(pid=self.pid))

    def _start(self, order: messages.StartWorkers) -> Role | None:
        self.next, ended = None, time.monotonic()
        for attempt in [attempt for attempt in self.stores if attempt < order.attempt]:
            self._close_store(attempt)
        self.brood.begin(order.attempt)
        self.page.begin(order.attempt, len(order.workers))
        notes = self.learning.attempt(order.workers)
        files = [(wire.memory_file("raylaunch-report"), wire.memory_file("raylaunch-stacks")) for _ in order.workers]
        born = self.learning.fork(order.workers, [(*own, notes) for own in files])
        for index, (spec, own) in enumerate(zip(order.workers, files, strict=True)):
            pid = born.pids[index] if born is not None else os.fork()
            if pid == 0:
                return partial(self._be_worker, spec, *own, notes)
            self.brood.add(pid, spec, *own)
        if born is not None:
            born.begin()
        turnover = Turnover(ordered=self.ordered, ended=ended, forked=time.monotonic())
        self._say(messages.Started(attempt=order.attempt, pids=self.brood.pids(), turnover=turnover))
        return None

    def _be_worker(self, spec: WorkerSpec, report: int, stacks: int, notes: int) -> int:
        self._leave()
        spawns = self.start_method == "spawn" and spec.kind != "command"
        return boot.live(spec, report, stacks, notes, os.getppid(), _exec_boot if spawns else boot.run)

    def _leave(self) -> None:
        """In a child: no object is to close, some day, a file that is somebody else's by then."""
        self.control.detach()
        self.learning.standby.leave()

    def _fork_understudy(self, line: socket.socket) -> Role | None:
        pid = os.fork()
        if pid == 0:
            return partial(self._be_understudy, line)
        line.close()
        self.learning.standby.pid = pid
        return None

    def _be_understudy(self, line: socket.socket) -> Role:
        return Understudy(line, self._be_helper(line.fileno())).serve()

    def _open_store(self, order: messages.OpenStore) -> Role | None:
        if order.fixed:
            self._make_way(order.attempt)
        if order.attempt in self.stores:
            self._close_store(order.attempt)
        place = store.meeting_place(order.address, order.master_addr, several_nodes=order.several_nodes)
        try:
            listen = store.listen_soon if order.fixed else store.listen
            listening = listen(place.listens, order.port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            self._say(messages.StoreOpen(attempt=order.attempt, port=0, address=place.listens, why=why))
            return None
        port = listening.getsockname()[1]
        pid = os.fork()
        if pid == 0:
            return partial(self._be_store, place.listens, port, listening.detach())
        listening.close()
        self.stores[order.attempt] = pid
        self._say(messages.StoreOpen(attempt=order.attempt, port=port, address=place.told, why=place.why))
        return None

    def _make_way(self, attempt: int) -> None:
        """End earlier attempts here, and wait until their stores have left the port."""
        if self.next is not None and self.next.attempt < attempt:
            self.next = None
        if self.brood.attempt < attempt:
            self.brood.kill()
        for earlier in [number for number in self.stores if number <= attempt]:
            pid = self.stores[earlier]
            self._close_store(earlier)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _be_helper(self, *fds: int) -> int:
        """In a child that is no worker: it has these files, and ends with us. Our process id."""
        self._leave()
        parent = os.getppid()
        boot.die_with_parent(parent)
        boot.keep_only(*fds)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return parent

    def _be_store(self, address: str, port: int, listening: int) -> int:
        parent = self._be_helper(listening)
        if self.start_method == "spawn":
            os.set_inheritable(listening, True)
            os.execv(sys.executable, [sys.executable, store.__file__, str(parent), address, str(port), str(listening)])
        store.serve(address, port, listening)
        return 0

    def _be_timer(self) -> int:
        parent = self._be_helper()
        if self.start_method == "spawn":
            os.execv(sys.executable, [sys.executable, timer.__file__, str(parent), self.timer_file])
        timer.serve(self.timer_file)
        return 0

    def _close_store(self, attempt: int) -> None:
        processes.kill_tree(self.stores.pop(attempt))  # which may be gone already

    def end(self) -> None:
        """End every process that was started here, and what those started."""
        for attempt in list(self.stores):
            self._close_store(attempt)
        if self.timer:
            processes.kill_tree(self.timer)
            with contextlib.suppress(OSError):
                os.unlink(self.timer_file)
        self.learning.standby.dismiss()
        self.brood.kill()
        self.brood.wait_until_gone(seconds=5.0)


def _exec_boot(spec: WorkerSpec, report: int, stacks: int, _notes: int) -> int:
    fds = (wire.memory_file("raylaunch-spec", pickle.dumps(spec)), report, stacks)
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execve(sys.executable, [sys.executable, "-u", boot.__file__, *map(str, fds)], spec.env)


def main(control_fd: int) -> int:
    """Serve until the supervisor is gone. In a forked child it returns the worker's exit code."""
    control = socket.socket(fileno=control_fd)
    entry.forget_start()
    server = None
    role = None
    began = time.time()
    try:
        begin, _ = wire.receive(control)
        ready = warm_up(begin)
        agent_store.mend_private_groups()
        wire.send(control, ready)
        server = ForkServer(control, begin, ready, began)
        role = server.serve()
    except (EOFError, OSError):
        pass  # the supervisor is gone
    if role is not None:
        done: int | Role = role
        while callable(done):
            done = done()
        return done
    if server is not None:
        server.end()
    return 0

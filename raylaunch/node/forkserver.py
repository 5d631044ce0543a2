"""The warm parent of all workers of a node: a clean Python that imports torch once and forks.

Started by exec, never by a fork of a Ray worker. It runs no threads and touches no CUDA, and checks that about
itself; where it cannot be clean, workers get a fresh interpreter each. When its supervisor is gone, or the node's
lease is over, it ends everything it started and then itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

from raylaunch.node import lease, messages, processes, store, timer, wire
from raylaunch.node.brood import Brood
from raylaunch.worker import agent_store, boot, entry
from raylaunch.worker.page import Page
from raylaunch.worker.spec import WorkerSpec

Role = Callable[[], int]
"""What a forked child does instead of serving; it runs at the bottom of the stack, so that the interpreter's own
exit (atexit, threads, buffers) comes after it."""


def warm_up(begin: messages.Begin) -> messages.Ready:
    """Import what was asked for, and find out whether this process may fork."""
    why = [word for module in begin.preload if (word := _import(module))]
    wanted = any(module.partition(".")[0] == "torch" for module in begin.preload)
    torch = "torch" in sys.modules or (not wanted and importlib.util.find_spec("torch") is not None)
    method = begin.start_method
    if method == "forkserver" and (unclean := what_forbids_forking()):
        method = "spawn"
        why.append(f"workers start in fresh interpreters: after the preload, {unclean}")
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that all workers share
    processes.give_back_memory()
    return messages.Ready(start_method=method, why=tuple(why), torch=torch, pid=os.getpid())


def _import(module: str) -> str:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"cannot preload `{module}`: {type(error).__name__}: {error}"
    return ""


def what_forbids_forking() -> str:
    """`""`, or what a forked worker would inherit in a broken state."""
    _probe_fork()
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        return f"{threads} threads are running"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized"
    devices = [path for path in _open_files() if path.startswith(("/dev/nvidia", "/dev/kfd"))]
    return f"{devices[0]} is open" if devices else ""


def _probe_fork() -> None:
    """Fork once. Libraries that know about fork, as OpenBLAS does, end their threads for it; others keep them."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return found


class ForkServer:
    """Obeys the supervisor's orders, one at a time, and says what became of the processes."""

    def __init__(self, control: socket.socket, start_method: str, page: Page) -> None:
        self.pid = os.getpid()
        self.control = control
        self.page = page
        self.start_method = start_method
        self.stores: dict[int, int] = {}
        self.timer_file = timer.file_of(os.environ)
        self.timer = 0
        self.brood = Brood(self._say, spared=lambda: {self.timer, *self.stores.values()})
        #: Attempts wait here until nothing of those before them is alive.
        self.next: messages.StartWorkers | None = None
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
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._timeout())}
                if wake in ready:
                    os.read(wake, 4096)
                role = self._turn(has_order=self.control in ready)
                if role is not None:
                    return role

    def _timeout(self) -> float | None:
        """Seconds to the next thing that nobody tells. A lease that was renewed meanwhile is only looked at."""
        ends = (self.brood.until_deadline(), lease.seconds_left(self.page))
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
        if self.next is not None and self.brood.is_gone():
            return self._start(self.next)
        return None

    def _obey(self, order: messages.Order) -> Role | None:
        match order:
            case messages.StartWorkers():
                self.next = order
                self.brood.kill()
            case messages.StopWorkers():
                if self.next is not None and self.next.attempt == order.attempt:
                    self.next = None
                self.brood.stop(order.attempt, order.grace, signal.Signals[order.signal])
            case messages.SignalWorkers():
                self.brood.forward(order.attempt, signal.Signals[order.signal])
            case messages.OpenStore():
                return self._open_store(order)
            case messages.DumpStacks():
                self.brood.dump(order.attempt)
            case messages.LookAtPage():
                pass  # each turn does
            case messages.Begin():
                raise AssertionError(order)
        return None

    def _start(self, order: messages.StartWorkers) -> Role | None:
        self.next = None
        for attempt in [attempt for attempt in self.stores if attempt < order.attempt]:
            self._close_store(attempt)
        self.brood.begin(order.attempt)
        self.page.begin(order.attempt, len(order.workers))
        for spec in order.workers:
            report, stacks = wire.memory_file("raylaunch-report"), wire.memory_file("raylaunch-stacks")
            pid = os.fork()
            if pid == 0:
                return partial(self._be_worker, spec, report, stacks)
            self.brood.add(pid, spec, report, stacks)
        self._say(messages.Started(attempt=order.attempt, pids=self.brood.pids()))
        return None

    def _be_worker(self, spec: WorkerSpec, report: int, stacks: int) -> int:
        self.control.detach()
        try:
            boot.become(spec, report, stacks, os.getppid())
        except (OSError, ValueError) as error:
            boot.refuse(report, error)
            return 1
        if self.start_method == "spawn" and spec.kind != "command":
            _exec_boot(spec, report, stacks)
        return boot.run(spec, report, stacks)

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
        self.control.detach()
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
        self.brood.kill()
        self.brood.wait_until_gone(seconds=5.0)


def _exec_boot(spec: WorkerSpec, *files: int) -> None:
    fds = (wire.memory_file("raylaunch-spec", pickle.dumps(spec)), *files)
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execve(sys.executable, [sys.executable, "-u", boot.__file__, *map(str, fds)], spec.env)


def main(control_fd: int) -> int:
    """Serve until the supervisor is gone. In a forked child it returns the worker's exit code."""
    control = socket.socket(fileno=control_fd)
    entry.forget_start()
    server = None
    role = None
    try:
        begin, _ = wire.receive(control)
        ready = warm_up(begin)
        agent_store.mend_private_groups()
        wire.send(control, ready)
        server = ForkServer(control, ready.start_method, Page.open(begin.page))
        role = server.serve()
    except (EOFError, OSError):
        pass  # the supervisor is gone
    if role is not None:
        return role()
    if server is not None:
        server.end()
    return 0

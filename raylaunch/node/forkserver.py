"""The warm parent of all workers of a node: a clean Python that imports torch once and forks.

Started by exec, never by a fork of a Ray worker. It runs no threads and touches no CUDA, and checks that about
itself; where it cannot be clean, workers get a fresh interpreter each. When its supervisor is gone, or the node's
lease is over, it ends everything it started and then itself.
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
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from raylaunch.core.events import Turnover
from raylaunch.node import lease, messages, outdated, processes, store, timer, wire
from raylaunch.node.brood import Brood
from raylaunch.node.clean import what_forbids_forking
from raylaunch.node.learning import Learning
from raylaunch.node.lesson import Lesson
from raylaunch.node.patience import END_SECONDS
from raylaunch.node.preload import warm_up
from raylaunch.node.reserve import Post, Reserve, stand_by
from raylaunch.node.stores import Stores
from raylaunch.node.understudy import Role, Understudy
from raylaunch.worker import boot, entry
from raylaunch.worker.page import Page
from raylaunch.worker.spec import WorkerSpec


class ForkServer:
    """Obeys the supervisor's orders, one at a time, and says what became of the processes."""

    def __init__(
        self, post: Post, control: socket.socket, begin: messages.Begin, ready: messages.Ready, taught: Lesson | None
    ) -> None:
        """`taught`: what was imported of a script before, which is in the way of another script."""
        self.pid = os.getpid()
        self.post = post
        self.control = control
        self.page = Page.open(begin.page)
        self.ready = ready
        self.start_method = ready.start_method
        self.stores = Stores()
        self.timer_file = timer.file_of(os.environ)
        self.timer = 0
        self.taught = taught
        forks = ready.start_method == "forkserver"
        self.learning = Learning(replace(begin, learn=begin.learn and forks), self._say, taught)
        self.reserve = Reserve(wanted=forks, say=self._say)
        self.brood = Brood(self._say, spared=self._no_workers)
        #: Attempts wait here until nothing of those before them is alive.
        self.next: messages.StartWorkers | None = None
        self.ordered = 0.0
        #: The run is over, and this is to be said when nothing of it is alive any more.
        self.resting = False
        self.ended = False

    def _no_workers(self) -> set[int]:
        return {self.timer, self.reserve.pid, self.learning.standby.pid, *self.stores.pids()}

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
        if (role := self._renew_reserve()) is not None:
            return role
        self._say(self.ready)
        wake, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._end)
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
        """SIGTERM, from a person or because the keeper died: end as if the supervisor were gone, at the next turn.

        SIGHUP where we were stopped when the keeper died: the kernel has woken us (see `keeper`).
        """
        self.ended = True
        if os.getpid() != self.pid:  # a worker so young that the handler is still ours
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _turn(self, *, has_order: bool) -> Role | None:
        if self.ended or lease.is_over(self.page):
            raise EOFError
        self.reserve.ended(self.brood.reap())
        if (role := self._renew_reserve()) is not None:
            return role
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
        if self.taught is not None:
            raise EOFError  # as if nobody wanted us any more
        self.next, self.resting = None, True
        self.stores.close_all()
        self.brood.kill()

    def _wake(self) -> None:
        if outdated.since(self.post.began):
            raise EOFError  # as if nobody wanted us any more
        self._say(self.ready)

    def _forget(self) -> None:
        self.resting = False
        if self.reserve.lesson is not None:
            self.reserve.dismiss()
        self.brood.begin(0)
        self.page.begin(0, 0)
        self._say(messages.Rested(pid=self.pid))

    def _start(self, order: messages.StartWorkers) -> Role | None:
        self.next, ended = None, time.monotonic()
        self.stores.close_before(order.attempt)
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

    def _renew_reserve(self) -> Role | None:
        """Have one where there is none, or one that knows more."""
        known = self.learning.known if self.brood.attempt else None
        if not self.reserve.is_wanted or (self.reserve.pid and known in (None, self.reserve.lesson)):
            return None
        found = self.learning.fork_reserve() if known is not None else None
        if found is not None:
            self.reserve.adopt(*found, known)
            return None
        if self.reserve.pid:
            return None
        line = self.reserve.fork()
        return partial(self._be_reserve, line, self.taught) if line is not None else None

    def _be_reserve(self, line: socket.socket, taught: Lesson | None) -> int | Role:
        self._leave()
        if not stand_by(self.post, line) or what_forbids_forking():
            os._exit(0)  # without what the imported modules want to be done at exit
        self.post.take()
        return _live(self.post, line, lambda _: replace(self.ready, pid=os.getpid()), taught)

    def _fork_understudy(self, line: socket.socket) -> Role | None:
        pid = os.fork()
        if pid == 0:
            return partial(self._be_understudy, line)
        line.close()
        self.learning.standby.pid = pid
        return None

    def _be_understudy(self, line: socket.socket) -> Role:
        server = self._be_helper(line.fileno(), self.post.baton)
        return Understudy(line, server, self._be_reserve).serve()

    def _open_store(self, order: messages.OpenStore) -> Role | None:
        if order.fixed:
            self._make_way(order.attempt)
        opened = self.stores.open(order)
        if isinstance(opened, tuple):
            return partial(self._be_store, *opened)
        self._say(opened)
        return None

    def _make_way(self, attempt: int) -> None:
        """End earlier attempts here, and wait until their stores have left the port."""
        if self.next is not None and self.next.attempt < attempt:
            self.next = None
        if self.brood.attempt < attempt:
            self.brood.kill()
        self.stores.vacate(attempt)

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

    def end(self) -> None:
        """End every process that was started here, and what those started."""
        self.stores.close_all()
        if self.timer:
            processes.kill_tree(self.timer)
            with contextlib.suppress(OSError):
                os.unlink(self.timer_file)
        self.learning.standby.dismiss()
        self.reserve.dismiss()
        self.brood.kill()
        self.brood.wait_until_gone(END_SECONDS)


def _exec_boot(spec: WorkerSpec, report: int, stacks: int, _notes: int) -> int:
    fds = (wire.memory_file("raylaunch-spec", pickle.dumps(spec)), report, stacks)
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execve(sys.executable, [sys.executable, "-u", boot.__file__, *map(str, fds)], spec.env)


def _live(
    post: Post,
    control: socket.socket,
    warm: Callable[[messages.Begin], messages.Ready],
    taught: Lesson | None = None,
) -> int | Role:
    """A fork server, from its first word to its end. In a forked child it returns the child's role."""
    server = None
    try:
        begin, _ = wire.receive(control)
        server = ForkServer(post, control, begin, warm(begin), taught)
        return server.serve()
    except (EOFError, ConnectionError):
        pass  # the supervisor is gone
    except OSError as error:
        print(f"raylaunch: a fork server cannot go on: {error}", file=sys.stderr, flush=True)  # noqa: T201
    if server is not None:
        server.end()
    post.leave()
    return 0


def main(post: Post, control_fd: int) -> int:
    """Serve until the supervisor is gone. In a forked child it returns the worker's exit code."""
    entry.forget_start()
    done: int | Role = _live(post, socket.socket(fileno=control_fd), warm_up)
    while callable(done):
        done = done()
    return done

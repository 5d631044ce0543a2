"""A worker that can stay: it waits for word of the next attempt in a thread, and becomes a worker of that attempt."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from types import FrameType
from typing import Any, Final

from raylaunch.core.failures.failure import is_of_lost_peer
from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.core.text import text_of
from raylaunch.worker import torch_internals
from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.runtime import files_wait, output_order, process_setup, tcpstore_patch
from raylaunch.worker.runtime.staleness import ImportedFiles
from raylaunch.worker.state.device_copies import device_modules
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.snapshots.snapshot import Snapshot
from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.broken_collectives import break_collectives
from raylaunch.worker.survivors.light_commits import LightCommits
from raylaunch.worker.survivors.made_groups import MadeGroups
from raylaunch.worker.survivors.survivor_link import OwnSocket, Rejoin, SurvivorWord

UNWIND_SIGNAL: Final = signal.SIGRTMIN + 10
"""Sent to the main thread, whose Python code it interrupts, also in a system call such as a sleep."""
LEAVE_SECONDS: Final = 1
LEAVE_SECONDS_WITH_NCCL: Final = 10
"""How long this process may take to leave everything of an attempt. Then it is killed, and started again. An abort of
NCCL takes half a second and more, and what is queued on the device about a step.
"""
_UNWIND_AFTER = 0.1
"""Seconds that the main thread has for leaving by the exception of a broken collective, before the signal is sent."""
_UNWIND_BETWEEN_STEPS = 0.5
"""Seconds that a worker which waits at the end of a step has for leaving, before collectives are broken."""
_AGAIN_SECONDS = 0.05
_POLL_SECONDS = 0.001
_PATIENCE = 30.0
"""Seconds to wait for word of the next attempt, after an error that a lost peer may have caused."""


class WorldChanged(BaseException):
    """Leaves a function that is decorated with `elastic`, because the next attempt begins. Let it pass.

    As `KeyboardInterrupt`, it is no `Exception`, so that the script's own handlers let it pass.
    """


class Survivor:
    """A process that can stay, while it is in its elastic function. `explains` and `rejoin` are the main thread's."""

    def __init__(self, made: MadeGroups, writer: HeartbeatWriter, light: LightCommits) -> None:
        #: Whether the main thread is in the function.
        self.is_inside = False
        self._made = made
        self._writer = writer
        self._light = light
        self._files = ImportedFiles()
        sock = survivor_link.connect()
        self._link = OwnSocket(sock) if sock is not None else None
        #: The newest attempt that this process was told to take part in, with the changes of those before.
        self._order: Rejoin | None = None
        self._ordered = threading.Event()
        self._lock = threading.Lock()
        self._left = 0
        self._handler = signal.signal(UNWIND_SIGNAL, self._unwind)
        threading.Thread(target=self._listen, name="raylaunch-survivor", daemon=True).start()

    def announce(self) -> None:
        """Say that this worker can stay, since there is a commit from which all ranks can go on."""
        seconds = LEAVE_SECONDS_WITH_NCCL if torch_internals.has_nccl() else LEAVE_SECONDS
        self._send(SurvivorWord(word="ready", attempt=_present_attempt(), seconds=seconds))

    def _send(self, word: SurvivorWord) -> None:
        link = self._link
        if link is not None:
            try:
                link.get().send(survivor_link.encode(word))
            except OSError:
                self._link = None  # it cannot stay

    # The thread.

    def _listen(self) -> None:
        link = self._link
        while link is not None:
            try:
                order, fd = survivor_link.receive_rejoin(link.get())
            except (OSError, EOFError):
                return
            if fd >= 0:
                self._light.use(fd, order.newest)
            if self._files.have_changed():
                _give_up("the script was changed")
            self._order = order if self._order is None else order.after(self._order)
            self._ordered.set()
            self._break_off(order)

    def _break_off(self, order: Rejoin) -> None:
        """Interrupt the main thread until it has left the elastic function.

        Before a planned change, it waits in no collective, but at the end of a step. Then nothing is broken unless it
        stays in its function for long.
        """
        began = monotonic()
        is_between_steps = self._writer.is_ready_to_stop
        if is_between_steps:
            signal.pthread_kill(threading.main_thread().ident or 0, UNWIND_SIGNAL)
        patience = _UNWIND_BETWEEN_STEPS if is_between_steps else 0.0
        while True:
            with self._lock:
                if self._left >= order.attempt:
                    return
                seconds = monotonic() - began - patience
                if seconds >= 0:
                    try:
                        break_collectives(self._made.sockets)
                    except RuntimeError as error:
                        _give_up(f"NCCL could not be aborted ({error})")
                if seconds > _UNWIND_AFTER:
                    signal.pthread_kill(threading.main_thread().ident or 0, UNWIND_SIGNAL)
            sleep(_AGAIN_SECONDS if seconds > _AGAIN_SECONDS else _POLL_SECONDS)

    def _unwind(self, _number: int, _frame: FrameType | None) -> None:
        order = self._order
        if self.is_inside and order is not None and order.attempt > self._left:
            raise WorldChanged

    # The main thread.

    def leave_if_ordered(self) -> None:
        """Raise WorldChanged if another attempt begins: then collectives may have ended that had no result."""
        if self._is_ordered():
            raise WorldChanged

    def commit_light(self, buffers: RankBuffers, held: HeldCommit, found: Snapshot, interval: int) -> bool:
        """Make a light commit; see `LightCommits.commit`."""
        return self._light.commit(buffers, held, found, interval)

    def live(self, commit: Commit) -> dict[int, Any]:
        """Return the tensors of a light commit; see `LightCommits.live`."""
        return self._light.live(commit)

    def explains(self, error: BaseException) -> bool:
        """Return whether another attempt begins. If a lost peer may have caused the error, wait for word of it."""
        if self._is_ordered():
            return True
        texts = [f"{type(one).__name__}: {text_of(one)}" for one in _chain(error)]
        if self._link is None or not any(map(is_of_lost_peer, texts)):
            return False
        give_up_at = monotonic() + _PATIENCE
        while not self._is_ordered() and monotonic() < give_up_at:
            self._writer.record_alive()
            self._ordered.wait(_AGAIN_SECONDS)
        return self._is_ordered()

    def _is_ordered(self) -> bool:
        return self._order is not None and self._order.attempt > self._left

    def rejoin(self, backend: str | None) -> None:
        """Become a worker of the attempt that begins: the newest, if others fail meanwhile."""
        while (order := self._order) is not None and order.attempt > self._left:
            with self._lock:
                self._left = order.attempt
            self._ordered.clear()
            if why := _device_error():
                _give_up(f"its device cannot be used any more ({why})")
            # What follows does not delay the workers that are started meanwhile.
            self._send(SurvivorWord(word="returned", attempt=order.attempt))
            self._light.complete()
            self._send(SurvivorWord(word="completed", attempt=order.attempt))
            if self._wait_for(order):
                self._take_over(order)
                if self._wait_until(files_wait.awaited()):
                    self._join(backend)

    def _wait_for(self, order: Rejoin) -> bool:
        """Forget the process group, and wait until the attempt begins on this node. False: a later one does."""
        self._made.forget()
        return self._wait_until(lambda: self._writer.attempt >= order.attempt)

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Return True when the condition holds, and False when a later attempt begins before."""
        while not self._is_ordered():
            if condition():
                return True
            self._writer.record_alive()
            sleep(_POLL_SECONDS)
        return False

    def _take_over(self, order: Rejoin) -> None:
        os.environ.update(order.env)
        for name in order.removed:
            os.environ.pop(name, None)
        tcpstore_patch.remember(os.environ)
        if order.stdout:
            process_setup.append_output(order.stdout, order.stderr)
            output_order.begin()
        for show in process_setup.title_setters:
            show(order.title)
        self._writer.begin_attempt()

    def _join(self, backend: str | None) -> None:
        """Make the process group. An error while a later attempt begins is of no interest."""
        try:
            with self._made.sockets.opening():
                self._made.make_group(backend)
            self._made.renew_models()
        except Exception as error:
            if not self.explains(error):
                raise
            return
        self.announce()

    def close(self) -> None:
        """The function has come to its end: this process does not stay any more."""
        self.is_inside = False
        with self._lock:
            self._left = sys.maxsize
        signal.signal(UNWIND_SIGNAL, self._handler if self._handler is not None else signal.SIG_DFL)
        link, self._link = self._link, None
        if link is not None:
            link.close()  # ends the thread


def _give_up(why: str) -> None:
    """End this process, so that the attempt has another worker in its place."""
    print(f"raylaunch: {why}: this worker does not stay", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _device_error() -> str:
    """Wait for the device, such as CUDA's, and return what it says; "": it is sound, or none is used."""
    torch = sys.modules.get("torch")
    try:
        for module in device_modules(torch).values() if torch is not None else ():
            if module.is_initialized():
                module.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _present_attempt() -> int:
    text = os.environ.get(heartbeat_writer.ATTEMPT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and the exceptions that led to it."""
    seen: BaseException | None = error
    for _ in range(sys.getrecursionlimit()):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__

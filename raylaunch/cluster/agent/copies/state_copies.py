"""The agent's part of copies: pushes the commits of its ranks to another host, and fetches what its node lacks.

It does the same for files by `FileCopies`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import NoneType

from raylaunch.cluster.agent.copies.file_copies import FileCopies
from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.core.text import printable
from raylaunch.node.protocol import acceptor
from raylaunch.node.protocol.copy_messages import (
    CopiesServed,
    CopyAddress,
    CopyFailed,
    CopyOrder,
    CopyReport,
    CopyTo,
    FreeMemory,
    ServeCopies,
)
from raylaunch.node.protocol.messages import AnnounceCommit, LaunchWorkers
from raylaunch.node.state import transfer
from raylaunch.node.state.part_server import PartServer
from raylaunch.node.state.state_files import StateFiles
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.state.transfer import CopyRefusedError, TornError

_LOOK_SECONDS = 0.02
"""How often is looked whether there is another commit to copy."""
_RETRY_SECONDS = (0.1, 0.3, 1.0)
"""The pauses after failures in a row; the last one is repeated."""
_ORPHAN_TRIES = 4
"""How often a part is fetched from the subreaper of a killed agent, which may end."""


@dataclass(slots=True)
class _Work:
    """What threads are for. They end soon after `stop` is set."""

    stop: threading.Event = field(default_factory=threading.Event)


class StateCopies:
    """Copies of one node. Its methods are called in the agent's event loop, and return at once."""

    def __init__(
        self,
        memory: StateMemory,
        address: str,
        report: Callable[[CopyReport], None],
        in_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        """`address`: where to listen. `in_loop`: has a function called in the event loop; any thread may call it."""
        self._memory = memory
        self._address = address
        self._report = report
        self._in_loop = in_loop
        self._server: PartServer | None = None
        self._is_refused = False
        #: Whether it was said that the script uses `State`, and files.
        self._told: tuple[bool, bool] | None = None
        self._uses_files = self._has_other_hosts = False
        self._files = FileCopies(memory, self._say_in_loop, self._found_files)
        self._pushing, self._fetching = _Work(), _Work()

    def serve(self, *, is_asked: bool = False) -> None:
        """Begin to serve other agents, once the node has something of a script's `State` or files, or is asked to."""
        if self._told == (True, True) or self._is_refused:
            return
        uses_state = (self._told is not None and self._told[0]) or any(True for _ in self._memory.files)
        used = uses_state, self._uses_files and self._has_other_hosts
        if used == self._told or not (any(used) or is_asked):
            return
        if self._server is None:
            try:
                listener = acceptor.listen(self._address)
                server = PartServer(listener, self._memory.files, lambda: self._memory.spared)
                server.start()
            except (OSError, RuntimeError) as error:
                self._is_refused = True
                self._report(CopyFailed(why=f"no copies of the state are made: {error}"))
                return
            self._server = server
            self._memory.files.answer_when_killed(server.fileno(), server.address.secret)
        self._told, where = used, self._server.address
        self._report(
            CopiesServed(host=where.host, port=where.port, secret=where.secret, uses_state=used[0], uses_files=used[1])
        )

    def _found_files(self) -> None:
        def serve() -> None:
            self._uses_files = True
            self.serve()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._in_loop(serve)

    def _say_in_loop(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._in_loop(lambda: self._report(CopyFailed(why=why)))

    def launch(self, order: LaunchWorkers) -> LaunchWorkers:
        """Begin another attempt. Return the order with whether its workers wait for files."""
        self.begin()
        self._memory.adopt()
        self._has_other_hosts = order.assignment.nhosts > 1
        self.serve(is_asked=bool(order.peers))
        return self._files.launched(order)

    def handle(self, order: CopyOrder) -> None:
        """Carry out an order of the driver's."""
        match order:
            case CopyTo():
                self.copy_to(order)
            case ServeCopies():
                self.serve(is_asked=True)
            case FreeMemory():
                self.close()
                self._memory.files.folder.release()
                self._memory.files.close()

    def begin(self) -> None:
        """Begin another attempt: stop copying what the last one committed."""
        self._stop()
        self._pushing, self._fetching = _Work(), _Work()

    def _stop(self) -> None:
        self._pushing.stop.set()
        self._fetching.stop.set()

    def copy_to(self, order: CopyTo) -> None:
        """Copy the commits of an attempt to another agent from now on, or to another one than before."""
        self._pushing.stop.set()
        self._pushing = _Work()
        self._memory.begin_copies(order.attempt)
        if order.target is None:
            return
        self._files.copy_to(order.target)
        arguments = self._pushing, order.attempt, order.target
        threading.Thread(target=self._push_all, args=arguments, daemon=True, name="raylaunch-state-copies").start()

    def announce(self, order: AnnounceCommit, then: Callable[[], None]) -> None:
        """Call `then` when the node has all parts that it needs of the commit to restore."""
        if order.commit is None or not order.fetches:
            then()
            return
        by_source: defaultdict[CopyAddress, list[HeldCommit]] = defaultdict(list)
        for part, source in order.fetches:
            by_source[source].append(HeldCommit(rank=part, world_size=order.world_size, commit=order.commit))
        left = set(by_source)

        def fetched(source: CopyAddress) -> None:
            left.discard(source)
            if not left:
                then()

        for source, parts in by_source.items():
            arguments = (self._fetching, source, parts, (order.commit, order.kept), fetched)
            threading.Thread(target=self._fetch_all, args=arguments, daemon=True, name="raylaunch-state-fetch").start()

    def close(self) -> None:
        """Close the port and end the threads: nothing is copied or fetched any more."""
        self._stop()
        self._files.close()
        if self._server is not None:
            self._server.close()

    # In threads.

    def _push_all(self, work: _Work, attempt: int, target: CopyAddress) -> None:
        transfer.lower_priority()
        done: Commit | None = None
        failures = 0
        while not work.stop.wait(_LOOK_SECONDS):
            parts = self._memory.to_copy(attempt)
            if not parts or parts[0].commit == done:
                continue
            began = time.monotonic()
            try:
                self._push(work, target, parts)
            except (OSError, CopyRefusedError) as error:
                failures = self._failed(work, failures, f"has no copy of its state on {target.node}", error)
                continue
            failures, done = 0, parts[0].commit
            self._memory.copied(done)
            until = 2 * time.monotonic() - began
            while time.monotonic() < until and not self._memory.is_hurried and not work.stop.wait(_LOOK_SECONDS):
                pass

    def _push(self, work: _Work, target: CopyAddress, parts: tuple[HeldCommit, ...]) -> None:
        rate = float("inf") if self._memory.is_hurried else transfer.COPY_BYTES_PER_SECOND
        push(self._memory.files, target, parts, is_stopped=work.stop.is_set, rate=rate)

    def _fetch_all(
        self,
        work: _Work,
        source: CopyAddress,
        parts: list[HeldCommit],
        spared: tuple[Commit | None, ...],
        fetched: Callable[[CopyAddress], None],
    ) -> None:
        failures = 0
        while not work.stop.is_set():
            try:
                with transfer.connection(source) as line:
                    for part in parts:
                        fetch(self._memory.files, line, part, spared)
            except (OSError, CopyRefusedError) as error:
                failures = self._failed(work, failures, f"cannot get its state from {source.node}", error)
                if not source.orphaned or failures < _ORPHAN_TRIES:
                    continue  # else its workers say what they lack, and the next attempt goes on without it
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._in_loop(lambda: None if work.stop.is_set() else fetched(source))
            return

    def _failed(self, work: _Work, failures: int, what: str, error: Exception) -> int:
        """Wait before the next try. From the second failure on, say why."""
        if failures and not work.stop.is_set():
            why = printable(f"a node {what}: {error or type(error).__name__}")
            self._say_in_loop(why)
        work.stop.wait(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
        return failures + 1


def push(
    files: StateFiles,
    target: CopyAddress,
    parts: Iterable[HeldCommit],
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    rate: float = transfer.COPY_BYTES_PER_SECOND,
) -> None:
    """Copy parts to another agent, at most `rate` bytes per second.

    Raises CopyRefusedError, and OSError, also where it is stopped.
    """
    with transfer.connection(target) as line:
        for part in parts:
            with files.reading(part.rank, part.commit, part.world_size) as fd:
                if fd is None:
                    msg = "it was overwritten before it was copied"
                    raise TornError(msg)
                size = transfer.part_bytes(fd, part)
                transfer.ask(line, NoneType, "push", part=part, size=size)
                transfer.send_part(line, fd, part, size, is_stopped=is_stopped, rate=rate)
                transfer.read_answer(line, NoneType)


def fetch(files: StateFiles, line: socket.socket, part: HeldCommit, spared: Iterable[Commit | None]) -> None:
    """Get a part from another agent, unless it is there. Raises CopyRefusedError and OSError."""
    there = files.find(part.rank, part.commit, part.world_size)
    if there is not None and not there.is_light:  # of a light part, what is needed may be the whole one
        return
    size = transfer.ask(line, int, "fetch", part=part)
    with files.writing_copy(part, size, spared) as file:
        if isinstance(file, str):
            raise CopyRefusedError(file)
        transfer.receive_part(line, file, part, size)

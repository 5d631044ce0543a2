"""The supervisor's part of survivors: which workers can stay, and telling them what the next attempt is."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import msgspec

from raylaunch.node.protocol import wire
from raylaunch.node.protocol.forkserver_messages import StartWorkers, SurvivorReturned
from raylaunch.node.state.state_files import MemoryFile
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.worker.heartbeats.shared_page import PAGE_VARIABLE
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.survivor_link import Rejoin, SurvivorWord


@dataclass(slots=True)
class _ConnectedWorker:
    sock: socket.socket
    pid: int
    is_ready: bool = False
    seconds: int = 0
    """How long it may take to leave its attempt."""
    local_rank: int = -1
    """As the last attempt in which it was found had it; -1: none."""


class SurvivorTable:
    """The workers of a node that can stay. Its owner waits until `fileno()` is readable, and then calls `poll`."""

    def __init__(self) -> None:
        """Raise OSError where no socket can be opened."""
        #: Where workers connect: an abstract name, without its first byte.
        self._listener, self.address = wire.listen()
        self._candidates: dict[int, _ConnectedWorker] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something."""
        return self._epoll.fileno()

    def invited(self, worker: WorkerSpec) -> WorkerSpec:
        """Return the specification of a worker that is told where to say that it can stay.

        A command cannot, nor can a worker that shows no progress.
        """
        if worker.kind == "command" or PAGE_VARIABLE not in worker.env:
            return worker
        return replace(worker, env=worker.env | {survivor_link.ADDRESS_VARIABLE: self.address})

    def rejoin(
        self,
        start: StartWorkers,
        before: AttemptState,
        file_to_complete: Callable[[int, int, Collection[int]], tuple[MemoryFile | None, int]],
    ) -> StartWorkers:
        """Tell the workers that can stay to join the attempt that starts. Return the order with them.

        `before`: the attempt before. The first worker that stays is given what `file_to_complete` returns for that
        attempt, its rank, and the node's ranks that have died.
        """
        former, workers = before.workers, start.workers
        found: list[int] = []
        to_complete = return_seconds = 0
        for candidate in list(self._candidates.values()):
            local_rank = candidate.local_rank = _local_rank(candidate, before)
            if candidate.is_ready and 0 <= local_rank < min(len(workers), len(former)):
                rejoin, fds = _rejoin(start.attempt, former[local_rank], workers[local_rank]), []
                if not found:
                    file, newest = file_to_complete(before.attempt, former[local_rank].rank, before.ends.keys())
                    rejoin = replace(rejoin, newest=newest)
                    if file is not None:
                        fds, to_complete = [file.fd], file.size
                with contextlib.suppress(OSError):
                    socket.send_fds(candidate.sock, [survivor_link.encode(rejoin)], fds, socket.MSG_DONTWAIT)
                    found.append(candidate.pid)
                    return_seconds = max(return_seconds, candidate.seconds)
        return replace(start, survivors=tuple(found), return_seconds=return_seconds, to_complete=to_complete)

    def poll(self, state: AttemptState | None, send: Callable[[SurvivorReturned], None]) -> bool:
        """Send the fork server what survivors have done. Return whether a worker has said that it can stay."""
        can_stay = False
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                if (accepted := wire.accept(self._listener)) is not None:
                    self._candidates[accepted[0].fileno()] = _ConnectedWorker(*accepted)
                    self._epoll.register(accepted[0], select.EPOLLIN)
                continue
            candidate = self._candidates[fd]
            word = _received(candidate)
            if word is None:
                self._candidates.pop(fd).sock.close()
            elif word.word in ("returned", "completed"):
                completed = word.word == "completed"
                send(SurvivorReturned(attempt=word.attempt, pid=candidate.pid, completed=completed))
            elif state is not None and word.attempt == state.attempt:
                candidate.is_ready, candidate.seconds = True, word.seconds
                can_stay = True
        return can_stay

    def close(self) -> None:
        """Close the socket and the connections of all workers, none of which can stay any more."""
        for sock in (self._listener, *(candidate.sock for candidate in self._candidates.values())):
            sock.close()
        self._epoll.close()


def _received(candidate: _ConnectedWorker) -> SurvivorWord | None:
    """Return what a worker says; None: it is gone, or is no worker."""
    try:
        data = candidate.sock.recv(survivor_link.MESSAGE_BYTES, socket.MSG_DONTWAIT)
        return msgspec.json.decode(data, type=SurvivorWord)
    except (OSError, ValueError):
        return None


def _local_rank(candidate: _ConnectedWorker, state: AttemptState) -> int:
    """Return the local rank of a live worker; -1: there is no such worker."""
    if not state.pids:  # the attempt has not begun here
        return candidate.local_rank
    return next((local_rank for local_rank, _, pid in state.live() if pid == candidate.pid), -1)


def _rejoin(attempt: int, former: WorkerSpec, spec: WorkerSpec) -> Rejoin:
    changed = {name: value for name, value in spec.env.items() if former.env.get(name) != value}
    keeps_terminal = bool(spec.terminal or former.terminal)
    return Rejoin(
        attempt=attempt,
        env=changed,
        removed=[name for name in former.env if name not in spec.env],
        title=spec.title,
        stdout="" if keeps_terminal else spec.stdout,
        stderr="" if keeps_terminal else spec.stderr,
    )

"""The stores of the fork server: one TCPStore process per attempt."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial

from raylaunch.node.forkserver import store
from raylaunch.node.linux import processes
from raylaunch.node.linux.fork import fork
from raylaunch.node.protocol import messages


class StoreTable:
    """Store processes by attempt. `run` is what a store's process does, given address, port and listening socket."""

    def __init__(self, run: Callable[[str, int, int], int]) -> None:
        self._run = run
        self._pids: dict[int, int] = {}

    def pids(self) -> set[int]:
        """Return the process ids of stores that were not closed. Some may have died."""
        return set(self._pids.values())

    def open(self, order: messages.StartStore) -> messages.StoreOpened:
        """Bind the attempt's store and fork its process, in place of one that the attempt may have already."""
        self._close([number for number in self._pids if number == order.attempt])
        place = store.meeting_place(order.address, order.master_addr, several_nodes=order.several_nodes)
        try:
            listen = store.listen_soon if order.fixed else store.listen
            listening = listen(place.listens, order.port)
            port = listening.getsockname()[1]
            pid = fork(partial(self._serve, place.listens, port, listening))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            return messages.StoreOpened(attempt=order.attempt, port=0, address=place.listens, why=why)
        listening.close()
        self._pids[order.attempt] = pid
        return messages.StoreOpened(attempt=order.attempt, port=port, address=place.told, why=place.why)

    def _serve(self, address: str, port: int, listening: socket.socket) -> int:
        return self._run(address, port, listening.detach())

    def close_before(self, attempt: int) -> None:
        """Kill the stores of earlier attempts."""
        self._close([number for number in self._pids if number < attempt])

    def close_all(self) -> None:
        """Kill the processes of all stores."""
        self._close(list(self._pids))

    def vacate(self, attempt: int) -> None:
        """Kill the stores of attempts up to this one, and wait until they have left their port."""
        for pid in self._close([number for number in self._pids if number <= attempt]):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _close(self, attempts: list[int]) -> list[int]:
        pids = [self._pids.pop(attempt) for attempt in attempts if attempt in self._pids]
        for pid in pids:
            processes.kill_with_group(pid)
        return pids

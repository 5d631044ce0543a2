"""The stores that the fork server has: one process for each attempt that is to have one."""

from __future__ import annotations

import contextlib
import os

from raylaunch.node import messages, processes, store


class Stores:
    """By attempt."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}

    def pids(self) -> set[int]:
        """Of those that were not closed; some may be gone all the same."""
        return set(self._pids.values())

    def open(self, order: messages.OpenStore) -> messages.StoreOpen | tuple[str, int, int]:
        """Have one for the attempt. What is to be said of it; in the child that is to serve: address, port, socket."""
        self._close([number for number in self._pids if number == order.attempt])
        place = store.meeting_place(order.address, order.master_addr, several_nodes=order.several_nodes)
        try:
            listen = store.listen_soon if order.fixed else store.listen
            listening = listen(place.listens, order.port)
            port, pid = listening.getsockname()[1], os.fork()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            return messages.StoreOpen(attempt=order.attempt, port=0, address=place.listens, why=why)
        if pid == 0:
            return place.listens, port, listening.detach()
        listening.close()
        self._pids[order.attempt] = pid
        return messages.StoreOpen(attempt=order.attempt, port=port, address=place.told, why=place.why)

    def close_before(self, attempt: int) -> None:
        """End those of earlier attempts."""
        self._close([number for number in self._pids if number < attempt])

    def close_all(self) -> None:
        """End them."""
        self._close(list(self._pids))

    def vacate(self, attempt: int) -> None:
        """End those up to this attempt, and wait until they have left their port."""
        for pid in self._close([number for number in self._pids if number <= attempt]):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _close(self, attempts: list[int]) -> list[int]:
        pids = [self._pids.pop(attempt) for attempt in attempts if attempt in self._pids]
        for pid in pids:
            processes.kill_tree(pid)
        return pids

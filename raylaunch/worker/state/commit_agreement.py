"""Keeps the ranks of a world less than two commits apart, by the attempt's TCPStore.

A rank has two buffers. It overwrites the older one only when all ranks have the newer one whole, so there is always a
commit that all ranks have. In a script whose ranks wait for each other in collectives, this is so when they come to the
next commit, and costs two messages to the store. Other scripts wait here for their slowest rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from time import monotonic, sleep
from typing import Any

_PREFIX = "raylaunch/state"
_POLL_SECONDS = (0.0002, 0.01)
"""Between two looks, from the first to the longest."""
_PATIENCE = 30.0
"""Seconds of waiting after which it is said who waits for what."""
_STORE_SECONDS = 300.0
_SLOTS = 2
"""Keys are used again for every second commit. When rank 0 writes those of commit N, all ranks have read those of N-2,
since all have completed N-1."""


class CommitAgreement:
    """Counts the ranks that have each commit. Commits of an attempt are numbered 1, 2, 3, ... on all ranks alike."""

    def __init__(self, rank: int, world_size: int, alive: Callable[[], None]) -> None:
        """`alive` is called again and again while this waits."""
        self._rank = rank
        self._world_size = world_size
        self._alive = alive
        self._store: Any = None
        self._proposed = {0: 1}

    def announce(self, number: int, interval: int) -> None:
        """Say that this rank has this commit whole. `interval`: the one that rank 0 proposes; not used of others."""
        if self._world_size == 1:
            self._proposed = {number: interval}
            return
        store = self._connected()
        if self._rank == 0:
            store.set(f"{_PREFIX}/interval/{number % _SLOTS}", str(interval))
        store.add(f"{_PREFIX}/count/{number % _SLOTS}", 1)

    def wait(self, number: int) -> int:
        """Wait until all ranks have this commit, and return the interval that rank 0 proposed with it."""
        if number == 0 or self._world_size == 1:
            return self._proposed.get(number, 1)
        store = self._connected()
        wanted = self._world_size * ((number + 1) // _SLOTS)
        began, pause, told = monotonic(), _POLL_SECONDS[0], False
        while (having := store.add(f"{_PREFIX}/count/{number % _SLOTS}", 0)) < wanted:
            self._alive()
            sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
            if not told and monotonic() - began > _PATIENCE:
                told = True
                missing = wanted - having
                print(
                    f"raylaunch: rank {self._rank} waits in `State.commit`, since {missing} of {self._world_size} "
                    "ranks have not made the commit before; every rank must commit the same steps",
                    file=sys.stderr,
                    flush=True,
                )
        return int(store.get(f"{_PREFIX}/interval/{number % _SLOTS}"))

    def _connected(self) -> Any:
        if self._store is None:
            self._store = import_module("torch.distributed").TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_SECONDS),
            )
        return self._store

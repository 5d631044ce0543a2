"""The actor of a group on each Ray node: takes what its ranks share with Ray's object store from the one to the other.

Ranks are no processes of Ray, which has no client for others. Ray brings an object to the node once, as the argument of
a call of this actor; the ranks map it where it is. What they return is put into the store as what a call of this actor
returns, and so belongs to the caller. It takes no resources, and unpickles what agents should not.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raylaunch.cluster.ray_api.store_files import StoreFiles
from raylaunch.worker_group.rank import packing, shared_parts
from raylaunch.worker_group.rank.frames import Buffer
from raylaunch.worker_group.rank.shared_parts import SharedParts


class StoredParts:
    """A pickled value with its buffers, as an object of Ray's. Ray unpickles the parts only or, `as_value`, the value.

    That needs nothing of this package where it is read.
    """

    def __init__(self, stream: bytes, buffers: Sequence[Any], *, as_value: bool = False) -> None:
        self.parts: list[Buffer] = [stream, *(memoryview(buffer) for buffer in buffers)]
        self._as_value = as_value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        stream, buffers = bytes(self.parts[0]), [pickle.PickleBuffer(part) for part in self.parts[1:]]
        if self._as_value:
            return functools.partial(pickle.loads, buffers=buffers), (stream,)
        return StoredParts, (stream, buffers)


class ObjectLender:
    """See the module."""

    def __init__(self) -> None:
        #: The writing ends of the pipes that are leases, by the number of the call.
        self._leases: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return "raylaunch: objects of a WorkerGroup"

    def lend(self, number: int, value: Any) -> bytes:
        """Return a pickle that ranks of this node unpickle to the value. It lasts until they have dropped that.

        Those that have not unpickled it yet need the lease of the call with this number.
        """
        is_packed = isinstance(value, StoredParts)
        parts = value.parts if is_packed else packing.packed(value, packing.refuse_ref)
        store = StoreFiles()
        shared, own = shared_parts.share(parts, store.place)
        if not shared.buffers:
            return shared.dumped()
        files = (*store.descriptors, *(() if own is None else (own,)))
        held, lease = os.pipe2(os.O_CLOEXEC)
        self._leases.setdefault(number, []).append(lease)
        threading.Thread(target=_hold, args=(held, files, parts), daemon=True, name="raylaunch-lease").start()
        # Arrays of the caller's can be written to, and arrays in objects of Ray's cannot.
        kept = "" if is_packed else next(map(shared_parts.path_of, store.descriptors), "")
        return replace(shared, kept=kept, lease=shared_parts.path_of(lease)).dumped()

    def release(self, number: int) -> None:
        """A call is over: only what ranks still refer to is held."""
        for lease in self._leases.pop(number, ()):
            os.close(lease)

    def store(self, shared: SharedParts) -> tuple[Any, None]:
        """Return what a rank shares, which Ray puts into its store. The second value only tells that it is there."""
        stream, *buffers = shared.parts()
        return StoredParts(bytes(stream), buffers, as_value=True), None


def _hold(held: int, files: Sequence[int], parts: Sequence[Buffer]) -> None:
    """Keep parts until nobody has the lease: Ray does not use their memory again as long as they are referred to."""
    os.read(held, 1)
    for descriptor in (held, *files):
        os.close(descriptor)
    del parts

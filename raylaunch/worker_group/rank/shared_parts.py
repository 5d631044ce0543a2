"""Parts of a pickled value that processes of one machine share: they are mapped, and sent by no socket.

The buffers are in files without names, which the process that shares them has open: memory of its own
(`memfd_create(2)`), or Ray's object store. Other processes of the user open them as `/proc/PID/fd/N`.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raylaunch.worker_group.rank import packing
from raylaunch.worker_group.rank.frames import Buffer

_ALIGNMENT = 64
Find = Callable[[memoryview], "tuple[int, int] | None"]
"""Returns an open file that has a buffer's bytes already, and where in it; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """Where the parts of a value are."""

    stream: bytes
    """The first part, the pickle."""
    buffers: tuple[tuple[str, int, int], ...]
    """Of each other part: the path of its file, its offset there, and its length."""
    kept: str = ""
    """The file among them of which this process keeps a mapping, to read only, since others are to be in it, too."""
    lease: str = ""
    """The path of a pipe. As long as a process has its writing end open, the files do not change; "": they never do."""

    def parts(self) -> list[Buffer]:
        """Map the parts. Those in no kept file can be written to, which nobody else sees. Raises OSError."""
        spans: dict[str, tuple[int, int]] = {}
        for path, offset, length in self.buffers:
            low, high = spans.get(path, (offset, offset))
            spans[path] = min(low, offset - offset % mmap.ALLOCATIONGRANULARITY), max(high, offset + length)
        views = {path: self._mapped(path, *span) for path, span in spans.items()}
        found = [views[path][offset - spans[path][0] :][:length] for path, offset, length in self.buffers]
        return [self.stream, *found]

    def _mapped(self, path: str, low: int, high: int) -> memoryview:
        """Return a part of a file. The lease lasts as long as anything refers to it."""
        lease = os.open(self.lease, os.O_WRONLY | os.O_CLOEXEC) if self.lease else None
        try:
            with open(path, "rb", buffering=0) as file:
                mapped = _of_kept(file.fileno(), low, high) if path == self.kept else _mapping(file.fileno(), low, high)
        except BaseException:
            if lease is not None:
                os.close(lease)
            raise
        if lease is not None:
            _leases.add(lease)
            weakref.finalize(mapped, _end_lease, lease)
        return memoryview(mapped)

    def dumped(self) -> bytes:
        """Return a pickle of the value itself: it maps the parts when it is unpickled."""
        return pickle.dumps(_Value(self))


def share(parts: Sequence[Buffer], find: Find = lambda _: None) -> tuple[SharedParts, int | None]:
    """Return where the parts of a value are, and the file with those that were copied; None: there are none.

    Others can open that file as long as it is open here.
    """
    places: list[tuple[str, int, int]] = []
    own: int | None = None
    end = 0
    for part in parts[1:]:
        view = memoryview(part).cast("B")
        if view.nbytes and (place := find(view)) is not None:
            places.append((path_of(place[0]), place[1], view.nbytes))
            continue
        if own is None:
            own = os.memfd_create("raylaunch-parts", os.MFD_CLOEXEC)
        _write(own, view, end)
        places.append((path_of(own), end, view.nbytes))
        end += max(view.nbytes + -view.nbytes % _ALIGNMENT, _ALIGNMENT)
    if own is not None:
        os.ftruncate(own, end)  # an empty mapping is not possible
    return SharedParts(stream=bytes(parts[0]), buffers=tuple(places)), own


_leases: set[int] = set()
"""The writing ends of pipes, as long as this process has what they are leases for."""


def _end_lease(lease: int) -> None:
    _leases.remove(lease)
    os.close(lease)


def is_any_lost() -> bool:
    """Return whether a process has died that holds what this one has a lease for: the files may change from then on."""
    poll = select.poll()
    for lease in _leases.copy():
        poll.register(lease, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))  # nobody can read from the pipe


def path_of(descriptor: int) -> str:
    """Return the path by which other processes of this machine open what this one has open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _mapping(descriptor: int, low: int, high: int) -> mmap.mmap:
    both = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, high - low, flags=mmap.MAP_PRIVATE, prot=both, offset=low)


_kept: dict[tuple[int, int], Any] = {}
"""The mapping of the last kept file, by device and inode. What a process has looked at once, it need not map again."""


def _of_kept(descriptor: int, low: int, high: int) -> Any:
    import numpy as np  # noqa: PLC0415  # it has made what is there, and what its slices are can be referred to weakly

    status = os.fstat(descriptor)
    file = status.st_dev, status.st_ino
    if file not in _kept:
        _kept.clear()
        _kept[file] = np.frombuffer(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)
    return _kept[file][low:high]


class _Value:
    def __init__(self, shared: SharedParts) -> None:
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        return _value, (self._shared,)


def _value(shared: SharedParts) -> Any:
    return packing.unpacked(shared.parts())

"""Where Ray's object store has the buffers of objects, so that processes which are not Ray's can map them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from raylaunch.node.linux import mappings
from raylaunch.node.linux.mappings import MappedFile, Mappings


class StoreFiles:
    """The files of this node's object store that have buffers of objects which Ray has fetched for this process.

    Ray maps the store into its workers, and closes the file; the raylet, whose id they have in RAY_RAYLET_PID, has it
    open. That is so in Ray 2.44 to 2.60. Where it is not, no buffer is found, and callers copy.
    """

    def __init__(self) -> None:
        self._mappings = Mappings()
        self._open: dict[MappedFile, int | None] = {}

    def place(self, buffer: memoryview) -> tuple[int, int] | None:
        """Return an open file, which the caller is to close, and where in it the buffer is; None: in none."""
        numpy: Any = import_module("numpy")  # what is in the store are arrays, or like them
        found = self._mappings.at(numpy.frombuffer(buffer, numpy.uint8).ctypes.data, buffer.nbytes)
        if found is None:
            return None
        file, offset = found
        if file not in self._open:
            self._open[file] = mappings.opened_as(int(os.environ.get("RAY_RAYLET_PID", "-1")), file)
        descriptor = self._open[file]
        return None if descriptor is None else (descriptor, offset)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The files that were opened."""
        return tuple(descriptor for descriptor in self._open.values() if descriptor is not None)

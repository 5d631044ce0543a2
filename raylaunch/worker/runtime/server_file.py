"""A file that the fork server has made for a worker, which writes to it whatever its script does to descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from raylaunch.worker.descriptors import identity, is_still


class ServerFile:
    """A memory file of the fork server, which keeps it open as long as the worker lives.

    Scripts close descriptors that they have not opened (`os.closerange(3, ...)`), and the numbers then belong to files
    of theirs. So the file is written to by the descriptor only as long as that is of this file, and else by its path.
    """

    def __init__(self, fd: int, path: str) -> None:
        """`path`: of the same file in the fork server, `/proc/PID/fd/FD`."""
        self.fd = fd
        self._path = path
        self._identity = identity(fd)
        self._pid = os.getpid()

    @classmethod
    def inherited(cls, fd: int, server: int) -> ServerFile:
        """Return the file that has this descriptor in this process and in the fork server, its parent."""
        return cls(fd, f"/proc/{server}/fd/{fd}")

    @classmethod
    def opened(cls, path: str) -> ServerFile:
        """Open a file of the fork server. Raises OSError."""
        return cls(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC), path)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process is the worker, and no child that the script has forked."""
        return os.getpid() == self._pid

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Give a descriptor of the file. Raises OSError where neither its own nor the path leads to it any more."""
        if is_still(self.fd, self._identity):
            yield self.fd
            return
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            if not is_still(fd, self._identity):
                raise FileNotFoundError(errno.ENOENT, "it is another file", self._path)
            yield fd
        finally:
            os.close(fd)

    def append(self, line: bytes) -> None:
        """Write a line at the end of the file. Raises OSError as `descriptor` does."""
        with self.descriptor() as fd:
            os.write(fd, line)

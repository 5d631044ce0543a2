"""The folder of a node in memory: what is there outlives the workers.

Two locks (flock(2)) say who needs it. The agent's is on the folder `agent` in it, which no script sees: a script may
remove the folder that it was given, and make it again. The other one is on the folder itself. The subreaper has it from
the agent (`hold`), and keeps the folder for the next agent of the run.

Whoever ends last on the node removes it: the subreaper or the fork server (`lifeline.remove_folders`), or the agent. If
all of them are killed, the next run on the host does (`_remove_stale`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator

from raylaunch.node.linux import scratch

_MEMORY = "/dev/shm"  # noqa: S108
_PREFIX = "raylaunch-files-"
_STALE_SECONDS = 60.0
"""A folder without an owner that is younger may just be made."""
_FILES = "files"


class RamFolder:
    """The folder of one node. Any thread may call the methods."""

    def __init__(self) -> None:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
        #: What is removed in the end.
        self.root = os.path.join(parent, _PREFIX + secrets.token_hex(8))
        #: What workers get, as RAYLAUNCH_FAST_DIR.
        self.path = files_in(self.root)
        self._fd = self._held_fd = -1
        self._lock = threading.RLock()

    def create(self) -> None:
        """Make the folder, unless there is one. Where that is not possible, a script that uses it finds out why."""
        with contextlib.suppress(OSError):
            if self._fd < 0:
                _remove_stale(os.path.dirname(self.root))
            lock = os.path.join(self.root, scratch.AGENT_LOCK)
            for path in (self.root, lock, self.path):
                scratch.create(path)
            if self._fd < 0:
                self._fd = os.open(lock, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._fd, fcntl.LOCK_SH)

    def clear(self) -> None:
        """Remove all files: the run is over, and the next one may use the folder."""
        with self._lock, contextlib.suppress(OSError):
            for name in os.listdir(self.root):
                scratch.clear(os.path.join(self.root, name))

    def hold(self) -> int:
        """Return a descriptor with a lock, whose holder keeps the folder for the next agent of the run; -1: none."""
        with self._lock:
            if self._fd >= 0 and self._held_fd < 0:
                with contextlib.suppress(OSError):
                    self._held_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(self._held_fd, fcntl.LOCK_SH)
            return self._held_fd

    def abandon(self) -> None:
        """Let the next agent of the run take the folder over, as if this one was killed."""
        with self._lock:
            for fd in (self._fd, self._held_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._held_fd = -1

    def release(self) -> None:
        """Let the folder be removed by whoever ends last on the node. What killed agents have left there goes, too."""
        with self._lock:
            if self._fd >= 0:
                _remove_stale(os.path.dirname(self.root))
            self.abandon()

    def remove(self) -> None:
        """Remove the folder with all that is in it; somebody else may have done so."""
        self.release()
        with self._lock:
            scratch.remove(self.root)


def files_in(root: str) -> str:
    """Return the folder that the workers of a node were given, in its folder `root`."""
    return os.path.join(root, _FILES)


def all_on_host() -> Iterator[str]:
    """Yield the folders of all nodes on this host, of any user."""
    for parent in (_MEMORY, tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if name.startswith(_PREFIX):
                    yield os.path.join(parent, name)


def _remove_stale(parent: str) -> None:
    """Remove the folders of runs of which nothing is left on this host: nobody has a lock on them."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and _is_stale(entry):
                scratch.remove(entry.path)


def _is_stale(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _STALE_SECONDS:
            return not any(map(scratch.is_locked, (entry.path, os.path.join(entry.path, scratch.AGENT_LOCK))))
    return False

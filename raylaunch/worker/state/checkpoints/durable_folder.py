"""The folder in which checkpoints of `State` are on disk: its settings, and which checkpoints it has.

A checkpoint is a folder `step-N`, after N steps. While it is written, its name has an end that says so; being renamed
makes it complete. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from raylaunch.core.text import printable
from raylaunch.worker import path_owners

FOLDER_VARIABLE = "RAYLAUNCH_DURABLE"
EVERY_VARIABLE = "RAYLAUNCH_DURABLE_EVERY"
KEEP_VARIABLE = "RAYLAUNCH_DURABLE_KEEP"
"""In a worker's environment: the settings `durable`, `durable_every` and `durable_keep` of the job."""
EVERY = 600.0
"""Seconds between checkpoints by default."""
KEEP = 3
"""Checkpoints that stay by default."""
LOW_PRIORITY = 5
"""Of whatever writes checkpoints while training goes on: the nice value (setpriority(2)), for a third of the weight of
the workers. With 19, it starves where they use all CPUs.
"""
METADATA = ".metadata"
"""The file that `torch.distributed.checkpoint` writes last."""
_CHECKPOINT = re.compile(r"step-(0|[1-9][0-9]*)(\.incomplete-\w+)?")
_REMOVED = ".incomplete-removed"
"""The end of the name of a checkpoint that is being removed."""
_IN_USE = ".in-use"
"""The file on which the run that uses the folder has a lock (flock(2))."""
_RUN_VARIABLE = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, slots=True)
class DurableFolder:
    """Where checkpoints are written, and how often."""

    path: str
    """Absolute."""
    every: float
    """Least seconds from one checkpoint to the next."""
    keep: int
    """How many stay."""

    @classmethod
    def of(cls, path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> DurableFolder | None:
        """Return the folder that a script names or, if it names none, the environment; None: there is none.

        Raises ValueError where a number in the environment is none.
        """
        found = os.fspath(path) if path is not None else environ.get(FOLDER_VARIABLE, "")
        if not found:
            return None
        every, keep = environ.get(EVERY_VARIABLE, ""), environ.get(KEEP_VARIABLE, "")
        return cls(os.path.abspath(found), float(every or EVERY), max(1, int(keep or KEEP)))

    def check(self) -> None:
        """Raise NotADirectoryError if something else has the folder's place, and PermissionError as below.

        The folder need not exist yet.
        """
        part = self._nearest
        if not os.path.isdir(part):
            raise NotADirectoryError(errno.ENOTDIR, f"{part} is no folder")
        self.refuse_strangers(part)

    def check_writable(self) -> None:
        """Raise OSError if `check` does, or no folder can be made there. One is made, and removed again."""
        self.check()
        part = self._nearest
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".raylaunch-", dir=part))
        except OSError as error:
            raise OSError(error.errno, f"{part} cannot be written: {error.strerror}") from None

    @property
    def _nearest(self) -> str:
        """The folder or, where it does not exist yet, what exists of its path."""
        part = self.path
        while not os.path.lexists(part):
            part = os.path.dirname(part)
        return part

    def refuse_strangers(self, path: str) -> None:
        """Raise PermissionError if another user put this folder, or a file in it, where everybody may write.

        To read a checkpoint means to run what it says. On NFS, what root makes may belong to somebody else, as a new
        file shows.
        """
        parts = [path]
        if path != self.path and os.stat(path).st_mode & stat.S_IWOTH:
            parts += [os.path.join(path, name) for name in os.listdir(path)]
        try:
            for part in parts:
                path_owners.refuse_strangers(part, ())
        except PermissionError:
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path) as file:
                for part in parts:
                    path_owners.refuse_strangers(part, [os.fstat(file.fileno()).st_uid])
                return
            raise

    def claim(self, owner: object) -> None:
        """Say if another run uses the folder, as far as its file system has locks. Called by one rank of a run.

        This one uses it from now on, as long as the object `owner` exists.
        """
        run = f"{os.environ.get(_RUN_VARIABLE, '')} on {socket.gethostname()}"
        with contextlib.suppress(OSError):
            os.makedirs(self.path, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(os.path.join(self.path, _IN_USE), flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(fd, 1024, 0).decode(errors="replace")
                os.close(fd)
                if other.partition(" on ")[0] != run.partition(" on ")[0]:  # else this run has a survivor there
                    print(
                        f"raylaunch: another run, {printable(other)}, writes checkpoints to {self.path} too: each "
                        "removes the other's; give one of them another folder",
                        file=sys.stderr,
                        flush=True,
                    )
                return
            os.ftruncate(fd, 0)
            os.pwrite(fd, run.encode(), 0)
            weakref.finalize(owner, os.close, fd)

    def checkpoints(self) -> list[tuple[str, bool]]:
        """Return the names of all checkpoints, and whether they are complete. The newest is the first.

        Raises OSError where the folder cannot be read. One that does not exist has no checkpoints.
        """
        found = sorted(self._checkpoints(), reverse=True)
        return [(name, name == f"step-{steps}" and self.has(steps)) for steps, name in found]

    def has(self, steps: int) -> bool:
        """Return whether there is a complete checkpoint after `steps` steps."""
        try:
            return stat.S_ISREG(os.lstat(os.path.join(self.path, f"step-{steps}", METADATA)).st_mode)
        except OSError:
            return False

    def _checkpoints(self) -> list[tuple[int, str]]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [(int(match[1]), name) for name in names if (match := _CHECKPOINT.fullmatch(name))]

    def incomplete(self, steps: int, token: int) -> str:
        """Return the path of a checkpoint that is being written. `token`: see `CommitHeader.token`."""
        return os.path.join(self.path, f"step-{steps}.incomplete-{token:x}")

    def complete(self, incomplete: str, steps: int) -> str:
        """Rename a checkpoint that is whole, and remove older ones. Return its path. Raises OSError.

        One after the same number of steps is replaced: training has come there again since.
        """
        path = os.path.join(self.path, f"step-{steps}")
        _sync(incomplete)
        if os.path.exists(path):
            shutil.rmtree(incomplete + "0", ignore_errors=True)
            os.rename(path, incomplete + "0")
        os.rename(incomplete, path)
        _sync(self.path)
        self._remove_old(steps)
        return path

    def _remove_old(self, steps: int) -> None:
        """Remove what is older than the last checkpoints, and what others have left incomplete. Newer ones stay.

        So does a folder `step-N` that is no checkpoint: it is not of `State`, which renames what it removes.
        """
        found = sorted((one for one in self._checkpoints() if one[0] <= steps), reverse=True)
        complete = [name for number, name in found if name == f"step-{number}" and self.has(number)]
        for name in complete[self.keep :]:
            with contextlib.suppress(OSError):
                os.rename(os.path.join(self.path, name), os.path.join(self.path, name + _REMOVED))
        for number, name in self._checkpoints():
            if number <= steps and name != f"step-{number}":
                path = os.path.join(self.path, name)
                with contextlib.suppress(OSError):
                    os.unlink(path)  # a link to where somebody has moved it
                shutil.rmtree(path, ignore_errors=True)


def _sync(folder: str) -> None:
    """Write the names in a folder to the disk, where the file system does that."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

"""The folder in which checkpoints of `State` are on disk: its settings, and which checkpoints it has.

A checkpoint is a folder `step-N`, after N steps. While it is written, its name has an end that says so; being renamed
makes it complete. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

FOLDER_VARIABLE = "RAYLAUNCH_DURABLE"
EVERY_VARIABLE = "RAYLAUNCH_DURABLE_EVERY"
KEEP_VARIABLE = "RAYLAUNCH_DURABLE_KEEP"
"""In a worker's environment: the settings `durable`, `durable_every` and `durable_keep` of the job."""
EVERY = 600.0
"""Seconds between checkpoints, if nothing else is said."""
KEEP = 3
"""Checkpoints that stay, if nothing else is said."""
LOW_PRIORITY = 19
"""Of whatever writes checkpoints: the nice value (setpriority(2))."""
METADATA = ".metadata"
"""The file that `torch.distributed.checkpoint` writes last."""
_CHECKPOINT = re.compile(r"step-(\d+)(\.incomplete-\w+)?")


@dataclass(frozen=True, slots=True)
class DurableFolder:
    """Where checkpoints are written, and how often."""

    path: str
    """Absolute."""
    every: float
    """At least so many seconds between two."""
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

    def newest(self) -> tuple[str, list[str]]:
        """Return the path of the newest complete checkpoint, "" for none, and the names of incomplete newer ones.

        Raises OSError where the folder cannot be read. One that does not exist has no checkpoints.
        """
        incomplete: list[str] = []
        for steps, name in sorted(self._checkpoints(), reverse=True):
            if name == f"step-{steps}" and self.has(steps):
                return os.path.join(self.path, name), incomplete
            incomplete.append(name)
        return "", incomplete

    def has(self, steps: int) -> bool:
        """Return whether there is a complete checkpoint after so many steps."""
        return os.path.exists(os.path.join(self.path, f"step-{steps}", METADATA))

    def newest_told(self) -> str:
        """Return the path of the newest complete checkpoint, and name incomplete ones that are passed over."""
        path, incomplete = self.newest()
        if incomplete:
            instead = f"restores {os.path.basename(path)}" if path else "begins anew"
            print(
                f"raylaunch: in {self.path} these are incomplete: {', '.join(incomplete)}; `State` {instead}",
                file=sys.stderr,
                flush=True,
            )
        return path

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
        """Remove what is older than the last checkpoints, and what others have left incomplete. Newer ones stay."""
        found = sorted((one for one in self._checkpoints() if one[0] <= steps), reverse=True)
        kept = [name for number, name in found if name == f"step-{number}"][: self.keep]
        for _, name in found:
            if name not in kept:
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)


def _sync(folder: str) -> None:
    """Have the names in a folder on the disk, where the file system does that."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

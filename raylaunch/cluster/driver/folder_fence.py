"""The fence of a run folder: only the driver in command writes there, though an earlier one may still be alive.

A driver that takes over makes `events.jsonl` and `driver.log` anew under other names, and renames them. What an earlier
driver still writes then goes to files that have no name any more. No lock is needed, which may hang on a network file
system. The first line of the journal has the epoch of the driver that made it. A driver looks at it before it renames
a file of the folder, and ends if another driver has taken over.

One gap is left: a driver that stands still between this look and its rename, and goes on after a takeover, replaces
that one file once. Its successor writes `result.json` and `report.html` again at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from raylaunch.cluster.local.file_writer import opened
from raylaunch.core.record import run_layout

_FOLDER_MODE = 0o700
_SECONDS = 2.0
"""How long a driver that ends waits for a file system that does not answer."""


def _nothing() -> None:
    pass


class FolderFence:
    """The place of one driver of a detached run among those that have written into the folder."""

    def __init__(self, folder: Path | None, epoch: int) -> None:
        """`epoch`: the driver's epoch. `folder` None: the run keeps nothing."""
        self._folder = folder
        self.epoch = epoch
        #: Ends the nodes that obey no other driver: they would go on for a minute when this process is gone.
        self.on_leave: Callable[[], None] = _nothing

    def newer(self) -> int:
        """Return the epoch of the driver that has taken the folder over from this one; 0: none has."""
        if self._folder is None:
            return 0
        try:
            with (self._folder / run_layout.EVENTS).open("rb") as file:  # open: NFS then asks its server
                epoch = json.loads(file.readline())["epoch"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return epoch if isinstance(epoch, int) and epoch > self.epoch else 0

    def check(self) -> None:
        """End this process if another driver has taken the folder over."""
        if newer := self.newer():
            self.leave(f"driver {newer} has taken over")

    def leave(self, why: str) -> None:
        """End this process at once: what this driver decides is not the run's any more. Only its own log says so."""
        with contextlib.suppress(Exception):
            self.on_leave()
        thread = threading.Thread(
            target=self._say, args=(f"raylaunch: driver {self.epoch} ends: {why}\n",), daemon=True
        )
        thread.start()
        thread.join(_SECONDS)
        os._exit(1)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no stderr
            os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore[union-attr]
        if self._folder is not None:
            with contextlib.suppress(OSError):
                file = opened(self._folder / f"driver-{self.epoch}.log")
                os.write(file, text.encode())

    # What a driver does that takes over.

    def take_journal(self, header: str, kept: int, last: Iterable[str]) -> tuple[TextIO, int]:
        """Make the journal anew: with its first `kept` entries, and then `last`. Return it, and how many were missing.

        `header`: the first line where there is no journal. Raises OSError.
        """
        assert self._folder is not None
        self._folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        journal = self._folder / run_layout.EVENTS
        first, *lines = [header]
        with contextlib.suppress(FileNotFoundError):
            first, *lines = journal.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] or [header]
        aside = journal.with_name(f".{journal.name}.{self.epoch}")
        file = os.fdopen(opened(aside, os.O_TRUNC), "w", encoding="utf-8", errors="backslashreplace")
        try:
            file.writelines(f"{line}\n" for line in (self._marked(first, header), *lines[:kept], *last))
            file.flush()
            self.check()
            aside.replace(journal)
        except BaseException:
            file.close()
            aside.unlink(missing_ok=True)
            raise
        return file, max(0, kept - len(lines))

    def _marked(self, first: str, header: str) -> str:
        """Return a first line with the epoch of this driver."""
        try:
            return json.dumps(json.loads(first) | {"epoch": self.epoch})
        except (ValueError, TypeError):
            return header

    def remove(self, *names: str) -> None:
        """Remove what a driver has written that was wrong about the end of the run, and was cut off, for example."""
        for name in names:
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()


def take_log(path: Path, epoch: int) -> int:
    """Make a log anew, with what it has, for the driver of this epoch: no other appends to it. Raises OSError."""
    aside = path.with_name(f".{path.name}.{epoch}")
    path.parent.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
    fd = opened(aside, os.O_APPEND | os.O_TRUNC)
    with contextlib.suppress(FileNotFoundError), path.open("rb") as before, os.fdopen(os.dup(fd), "wb") as after:
        shutil.copyfileobj(before, after)
    aside.replace(path)
    return fd

"""What a process must not have got by its imports, if it is to fork workers."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass

from raylaunch.core.words import count
from raylaunch.node import processes

_SIGNALS = ("SigCgt:", "SigIgn:")
_AT_HOME_WITH_FORKS = ("jemalloc_bg_thd",)
"""Threads whose library sees to it that a child does well without: jemalloc's, which comes with pyarrow, so pandas."""
_THE_C_LIBRARYS = 0b11 << 31
"""Two signals that it catches from the first thread on."""


def what_forbids_forking() -> str:
    """`""`, or what a forked worker would inherit in a broken state."""
    if threads := _threads():
        return f"{threads} threads are running"
    if _cuda_is_initialized():
        return "CUDA is initialized"
    devices = [path for path in _open_files().values() if path.startswith(("/dev/nvidia", "/dev/kfd"))]
    return f"{devices[0]} is open" if devices else ""


def _threads() -> int:
    """Beside the main one. Libraries that know about fork, as OpenBLAS does, end theirs for it; others keep them."""
    if _count_threads():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _count_threads()


def _count_threads() -> int:
    return sum(_name(thread) not in _AT_HOME_WITH_FORKS for thread in os.listdir("/proc/self/task")) - 1


def _name(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # it ended


def _cuda_is_initialized() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the folder's own
    return found


def _in_words(path: str) -> str:
    return "a socket" if path.startswith("socket:") else path


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What an import that is made ahead of the script's own may not change, since the script could tell."""

    files: dict[str, str]
    signals: tuple[object, ...]
    handlers: tuple[object, ...]
    folder: str

    @classmethod
    def take(cls) -> State:
        """As it is."""
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            lines = [line.split() for line in status if line.startswith(_SIGNALS)]
        masks = [int(mask, 16) & ~_THE_C_LIBRARYS for _, mask in lines]
        return cls(
            files=_open_files(),
            signals=(*masks, *(signal.getsignal(number) for number in signal.valid_signals())),
            handlers=(logging.root.level, *logging.root.handlers),
            folder=os.getcwd(),
        )

    def spoiled(self) -> str:
        """`""`, or what an import has done since, to follow its name: `starts 3 threads`."""
        now = State.take()
        opened = [_in_words(path) for fd, path in now.files.items() if self.files.get(fd) != path]
        threads = _threads()
        found = (
            (processes.children(), "starts a process"),
            (threads, f"starts {count(threads, 'thread')}"),
            (_cuda_is_initialized(), "initializes CUDA"),
            (opened, f"opens {', '.join(opened)}"),
            (now.signals != self.signals, "changes what signals do"),
            (now.handlers != self.handlers, "sets up logging"),
            (now.folder != self.folder, "changes the working directory"),
        )
        return next((why for is_so, why in found if is_so), "")

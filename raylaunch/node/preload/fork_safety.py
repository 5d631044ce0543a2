"""Finds what makes it unsafe to fork workers from this process, and what an import has changed in it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial

from raylaunch.core.text import count
from raylaunch.node.linux import processes, procfs
from raylaunch.worker.runtime.process_setup import environment_default, is_of_nvml

asks_nvml = partial(environment_default, "PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""Makes `torch.cuda.is_available()` in a block ask NVML. Modules call it when they are imported; CUDA forbids forks."""

_FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Names of threads whose library handles forks itself: jemalloc, which pyarrow, and so pandas, contains."""
_GLIBC_SIGNALS = 0b11 << 31
"""SIGCANCEL and SIGSETXID (32 and 33), which glibc catches from the first thread on."""
_DEVICES = ("/dev/nvidia", "/dev/kfd")


def why_fork_is_unsafe() -> str:
    """Return what a forked worker would inherit in a broken state (`3 threads are running`), or `""`."""
    if threads := _count_other_threads():
        return f"{threads} threads are running"
    if _cuda_is_initialized():
        return "CUDA is initialized"
    devices = [path for path in _open_files().values() if path.startswith(_DEVICES) and not is_of_nvml(path)]
    return f"{devices[0]} is open" if devices else ""


def _count_other_threads() -> int:
    """Return how many threads beside the main one stay at a fork. Some libraries, such as OpenBLAS, end theirs."""
    if _count_threads_now():
        with contextlib.suppress(OSError):  # then all threads count
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
    return _count_threads_now()


def _count_threads_now() -> int:
    return sum(_thread_name(thread) not in _FORK_SAFE_THREADS for thread in os.listdir("/proc/self/task")) - 1


def _thread_name(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # the thread has ended


def _cuda_is_initialized() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _open_files() -> dict[str, str]:
    """Return what each open file descriptor refers to."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor that listed the folder
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """The state of this process that an import ahead of the script must not change, because the script could tell."""

    files: dict[str, str]
    """What each open file descriptor refers to."""
    signals: tuple[object, ...]
    """The masks of ignored and caught signals, and the Python handlers."""
    handlers: tuple[object, ...]
    """The level and the handlers of the root logger."""
    folder: str
    """The working directory."""

    @classmethod
    def take(cls) -> ProcessSnapshot:
        """Return the state of this process now."""
        masks = procfs.signal_masks(os.getpid())
        return cls(
            files=_open_files(),
            signals=(
                *(masks[name] & ~_GLIBC_SIGNALS for name in ("SigIgn", "SigCgt")),
                *(signal.getsignal(number) for number in signal.valid_signals()),
            ),
            handlers=(logging.root.level, *logging.root.handlers),
            folder=os.getcwd(),
        )

    def side_effect(self) -> str:
        """Return what has happened since this snapshot, as a predicate (`starts 3 threads`), or `""`."""
        now = ProcessSnapshot.take()
        new = [path for fd, path in now.files.items() if self.files.get(fd) != path]
        opened = [_file_text(path) for path in new if not is_of_nvml(path)]
        threads = _count_other_threads()
        found = (
            (processes.children(), "starts a process"),
            (threads, f"starts {count(threads, 'thread')}"),
            (_cuda_is_initialized(), "initializes CUDA"),
            (opened, f"opens {', '.join(opened)}"),
            (now.signals != self.signals, "changes what signals do"),
            (now.handlers != self.handlers, "sets up logging"),
            (now.folder != self.folder, "changes the working directory"),
        )
        return next((text for happened, text in found if happened), "")


def _file_text(path: str) -> str:
    return "a socket" if path.startswith("socket:") else path

"""Processes of the benches. Each carries its bench's mark in its environment, by which its descendants are found too.

A launcher's parent and group say little of what it leaves behind (torchrun's workers outlive its SIGKILL, Ray's
daemons lead sessions of their own), but all inherit the environment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.private_cluster import MARK

_OTHERS = ("RAY_", "PET_", "TORCHELASTIC_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMP_NUM_THREADS")
"""Variables of whoever started the benches that would make them measure something else."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for all files of the benches, which is removed afterwards.

    Its path is short, since a Ray that is started below it binds sockets there: a path of more than 107 bytes is none.
    """
    with tempfile.TemporaryDirectory(prefix="rlb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class BenchError(Exception):
    """A bench could not be run."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of some processes together, in MB (10^6 bytes). `pss` counts a page that N processes share as 1/N in each."""

    pss: float
    rss: float
    processes: int


@dataclass(frozen=True, slots=True)
class Held:
    """What some processes hold together."""

    processes: int = 0
    descriptors: int = 0
    watches: int = 0
    """Of all inotify instances."""
    threads: int = 0
    kilobytes: float = 0.0
    """Anonymous memory."""

    def __add__(self, other: Held) -> Held:
        """Both together."""
        return Held(
            processes=self.processes + other.processes,
            descriptors=self.descriptors + other.descriptors,
            watches=self.watches + other.watches,
            threads=self.threads + other.threads,
            kilobytes=self.kilobytes + other.kilobytes,
        )


def held(pid: int) -> Held:
    """What a process holds now."""
    rollup = _rollup(pid)
    return Held(
        processes=1 if rollup else 0,
        descriptors=len(_names(pid, "fd")),
        watches=sum(_read(pid, f"fdinfo/{number}").count(b"inotify wd:") for number in _names(pid, "fdinfo")),
        threads=len(_names(pid, "task")),
        kilobytes=1000 * rollup.get("Anonymous", 0.0),
    )


def _names(pid: int, folder: str) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/{folder}")
    except OSError:
        return []  # it ended


def start(command: Sequence[str], mark: str, extra: Mapping[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; what it prints goes to the log."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env=environment(mark, extra),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def environment(mark: str, extra: Mapping[str, str]) -> dict[str, str]:
    """For a process that is to carry the mark."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    return kept | dict(extra) | {MARK: mark}


def wait_until(condition: Callable[[], bool], *, seconds: float, every: float = 0.05) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


def command_line(pid: int) -> str:
    """Its arguments, or the title it gave itself."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def command_name(pid: int) -> str:
    """What `ps -o comm` shows."""
    return _read(pid, "comm").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it ended


def memory(pids: Iterable[int]) -> Memory:
    """Proportional and resident set size, from smaps_rollup."""
    found = [rollup for pid in pids if (rollup := _rollup(pid))]
    return Memory(
        pss=sum(rollup["Pss"] for rollup in found),
        rss=sum(rollup["Rss"] for rollup in found),
        processes=len(found),
    )


def _rollup(pid: int) -> dict[str, float]:
    rows = (line.split() for line in _read(pid, "smaps_rollup").decode().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 / 1e6 for row in rows if row[-1] == "kB"}

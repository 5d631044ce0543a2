"""What processes take of the CPUs, and how often they wake up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_OF_A_PROCESS = 2
"""CPUCLOCK_SCHED: the clock of all threads that a process has and had."""
_OF_RAY = (
    "worker.io",
    "client.poll",
    "server.poll",
    "nexting_thread",
    "timer_manager",
    "event_engine",
    "grpc_",
    "task_event",
)
"""How the threads of Ray's and gRPC's own libraries are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Up to some time: seconds on a CPU, those in threads of Ray's libraries, and how often a thread woke up."""

    seconds: float = 0.0
    of_ray: float = 0.0
    wakes: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(
            seconds=self.seconds + other.seconds, of_ray=self.of_ray + other.of_ray, wakes=self.wakes + other.wakes
        )

    def __sub__(self, other: Use) -> Use:
        return Use(
            seconds=self.seconds - other.seconds, of_ray=self.of_ray - other.of_ray, wakes=self.wakes - other.wakes
        )


def seconds(pid: int) -> float:
    """On a CPU so far; 0: it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | _OF_A_PROCESS)
    return 0.0


def use(pids: Iterable[int]) -> Use:
    """Of these processes together; nothing of one that has ended."""
    return sum(map(_use, pids), start=Use())


def _use(pid: int) -> Use:
    threads = sum((_thread(path) for path in Path(f"/proc/{pid}/task").glob("*")), start=Use())
    return Use(seconds=seconds(pid), of_ray=threads.of_ray, wakes=threads.wakes)


def _thread(path: Path) -> Use:
    with contextlib.suppress(OSError):
        rows = dict(row.split(":", 1) for row in (path / "status").read_text().splitlines() if ":" in row)
        took = int((path / "schedstat").read_text().split()[0]) / 1e9
        name = rows["Name"].strip()
        main_of_actor = name.startswith("ray::") and path.name == rows["Tgid"].strip()
        of_ray = took if name.startswith(_OF_RAY) or main_of_actor else 0.0
        return Use(seconds=took, of_ray=of_ray, wakes=int(rows.get("voluntary_ctxt_switches", 0)))
    return Use()

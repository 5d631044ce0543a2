"""What one worker is to run, and what it reports when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker process, complete: nothing else decides how it starts."""

    rank: int
    local_rank: int
    kind: str
    """`script`, `module`, `function`, `command`, or `pickle` for a function object."""
    target: str
    args: tuple[Any, ...] = field(default=(), repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)
    """For `pickle`: cloudpickle of (function, args, kwargs)."""
    env: dict[str, str] = field(repr=False)
    """The whole environment, beside what imports of the preload added to it."""
    cwd: str
    stdout: str
    stderr: str
    """Paths of the files that its output is appended to."""
    backend: str | None = None
    """For functions: the process group's backend; `none`: they get no process group."""
    numa_binding: str | None = None
    """Which CPUs near its GPU the worker is bound to, in torchrun's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A worker's last words, left in a memory file, so that a full disk does not swallow them."""

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    hopeless: bool = False
    value: bytes = b""
    """What a function returned, or the exception it raised, pickled."""

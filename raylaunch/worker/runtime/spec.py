"""What one worker process runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything that decides how one worker process starts."""

    rank: int
    local_rank: int
    kind: str
    """`script`, `module`, `function`, `command`, or `pickle` for a function object."""
    target: str
    """The script's path, the module's name, `module:function`, the command, or the function object's name."""
    args: tuple[Any, ...] = field(default=(), repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)
    """For `pickle`: cloudpickle of (function, args, kwargs)."""
    env: dict[str, str] = field(repr=False)
    """The whole environment, except for variables that preloaded modules set."""
    cwd: str
    stdout: str
    """Path of the log file that the worker's stdout is appended to."""
    stderr: str
    """Path of the log file that the worker's stderr is appended to."""
    backend: str | None = None
    """For functions: the backend of the process group; `none` for no group; None for the device's own, as nccl."""
    numa_binding: str | None = None
    """Which CPUs near its GPU the worker is bound to, as a value of torchrun's `--numa-binding`."""
    gpus: range = range(0)
    """The indices of its GPUs on the node. Without any it is empty, and begins at `local_rank`."""
    node_devices: dict[str, str] = field(default_factory=dict)
    """The variables that name the GPUs of the node. With `virtual_local_rank`, `env` names the worker's own only."""
    terminal: str = ""
    """The path of the terminal that stdout and stderr are instead of the files; `""`: none."""
    takes_input: bool = False
    """Whether stdin is that terminal too."""
    timeout: float = 0.0
    """Seconds that process groups wait by default; 0: as torch has it."""
    must_return: bool = False
    """For functions: an exit with code 0 before they have returned is a failure."""
    title: str = ""
    """What people see of the process in `ps`: no argument of the script is in it."""

"""What the supervisor and the fork server say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.worker.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """First word to the fork server: what to import."""

    preload: tuple[str, ...]
    start_method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Kill what is left of earlier attempts, wait until it is gone, then start these."""

    attempt: int
    workers: tuple[WorkerSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """The signal, and SIGKILL after `grace` seconds, to all of the attempt."""

    attempt: int
    grace: float
    signal: str = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorkers:
    """The signal to the attempt's workers, and nothing else."""

    attempt: int
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Have a store listening for the attempt; stores of attempts before the present one go."""

    attempt: int
    address: str
    """The node's own."""
    master_addr: str = ""
    """Where the job wants the workers to meet."""
    several_nodes: bool = False
    """Workers of other nodes must reach it too."""
    port: int = 0
    """0: any. A store that died with its fork server comes back where it was."""
    fixed: bool = False
    """All attempts use the same port: what is left of those before must leave it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The fork server has imported everything. `why`: what stood in the way of forking, and imports that failed.

    `torch`: it is there, without which there is no store.
    """

    start_method: str
    why: tuple[str, ...]
    torch: bool
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """All workers of the attempt are forked; their process ids by local rank."""

    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker ended; its report comes as a file descriptor beside this. `at` is CLOCK_MONOTONIC of the machine."""

    attempt: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    stopped: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Nothing of the attempt is alive any more."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpen:
    """The store of the attempt listens. `port` 0: it could not be opened."""

    attempt: int
    port: int
    address: str = ""
    """What the workers are told. Empty: the node's address."""
    why: str = ""
    """Why it could not be opened, or why not where the job wants it."""


Order = Begin | StartWorkers | StopWorkers | SignalWorkers | OpenStore
Word = Ready | Started | Exited | Stopped | StoreOpen

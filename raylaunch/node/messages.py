"""What the supervisor and the fork server say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.events import Turnover
from raylaunch.core.stacks import Stack
from raylaunch.node.lesson import Lesson
from raylaunch.worker.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """First word to the fork server: what to import, and where the node's page is."""

    preload: tuple[str, ...]
    start_method: str
    page: str
    learn: bool = False
    """Have what workers import ready for those of the next attempt."""
    lesson: Lesson | None = None
    """What a fork server that died had learned."""


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
class DumpStacks:
    """Ask each of the attempt's workers what it is doing; they write it to a file of their own. Answer: `Asked`."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtPage:
    """Something is there on the node's page that cannot wait to be found."""


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
class Rest:
    """The run is over: end all its processes and forget them. Answer: `Rested`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """After `Rest`: there is another run. Answer: `Ready`, unless what was imported has changed since: then the end."""


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
class Reserve:
    """There is a process that takes the fork server's place when it dies. Its line comes beside this.

    It wants to hear `Begin`, and then says `Ready` when nothing of the dead one is left.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What can be had ready for the next attempt. `why`: a module that cannot, in words."""

    lesson: Lesson | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """All workers of the attempt are forked; their process ids by local rank."""

    attempt: int
    pids: tuple[int, ...]
    turnover: Turnover


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
class Rested:
    """Nothing of the run is alive any more, nor known."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpen:
    """The store of the attempt listens. `port` 0: it could not be opened."""

    attempt: int
    port: int
    address: str = ""
    """What the workers are told. Empty: the node's address."""
    why: str = ""
    """Why it could not be opened, or why not where the job wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A worker was asked for its stacks; its file comes beside this."""

    attempt: int
    rank: int
    start: int
    """Where in the file the answer will begin."""
    hears: bool
    """False: it has no handler for the question, and was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A step was proposed to the node's workers. The supervisor says so to its owner."""

    node: str
    attempt: int
    step: int
    reached: int
    """The last step that any of them had asked about when it could first know of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStacks:
    """What every live worker of the node's part of the attempt was doing. The supervisor says so to its owner."""

    node: str
    attempt: int
    stacks: tuple[Stack, ...]


Order = Begin | StartWorkers | StopWorkers | SignalWorkers | DumpStacks | LookAtPage | OpenStore | Rest | Wake
Word = Ready | Reserve | Started | Exited | Stopped | StoreOpen | Asked | Rested | Learned

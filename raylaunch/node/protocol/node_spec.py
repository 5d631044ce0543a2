"""What workers are started from: the template that the driver sends, and the specification that a node makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from raylaunch.core.job.job import StartMethod
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement import devices
from raylaunch.core.placement.environment import Assignment, Rendezvous, worker_env
from raylaunch.core.record.run_layout import ERROR, LAYOUTS, STDERR, STDOUT
from raylaunch.core.text import printable
from raylaunch.node.protocol.forkserver_messages import StartStore
from raylaunch.node.protocol.messages import LaunchWorkers
from raylaunch.node.protocol.terminal_messages import LONG_TIMEOUT, TerminalSpec
from raylaunch.worker import RUN_DIR_VARIABLE
from raylaunch.worker.heartbeats import shared_page, slot_owner
from raylaunch.worker.runtime import entry, files_wait
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker.state import buffer_client
from raylaunch.worker.survivors import survivor_link

PER_RUN = {"lasts": "run"}
"""Metadata of a field that each run sets anew, also for an agent that an earlier run left idle."""
PER_PROCESS = {"lasts": "process"}
"""Metadata of a field that the fork server is started with: only runs with an equal value can use an idle agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """What workers of all nodes and attempts have in common. The driver sends it to every agent."""

    run_dir: str = field(metadata=PER_RUN)
    """The folder for logs. Not used where they are not kept."""
    layout: str = field(default="raylaunch", metadata=PER_RUN)
    """A key of `LAYOUTS`: where files are in `run_dir`."""
    name: str = field(default="", metadata=PER_RUN)
    """The job's name, for people."""
    kept: bool = field(default=True, metadata=PER_PROCESS)
    """False: logs go to a temporary folder of each node, which is removed at the end of the run."""
    kind: str = field(metadata=PER_RUN)
    target: str = field(metadata=PER_RUN)
    args: tuple[Any, ...] = field(repr=False, metadata=PER_RUN)
    pass_local_rank: bool = field(default=False, metadata=PER_RUN)
    numa_binding: str | None = field(default=None, metadata=PER_RUN)
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False, metadata=PER_RUN)
    payload: bytes = field(default=b"", repr=False, metadata=PER_RUN)
    env: dict[str, str] = field(repr=False, metadata=PER_PROCESS)
    """The job's own variables."""
    cpus_per_worker: float = field(default=1.0, metadata=PER_PROCESS)
    gpus_per_worker: float = field(default=0.0, metadata=PER_RUN)
    virtual_local_rank: bool = field(default=False, metadata=PER_RUN)
    master_addr: str = field(default="", metadata=PER_RUN)
    master_port: int = field(default=0, metadata=PER_RUN)
    """0: each attempt's store takes a free port."""
    several_nodes: bool = field(default=False, metadata=PER_RUN)
    """The job may use more than one node."""
    backend: str | None = field(metadata=PER_RUN)
    preload: tuple[str, ...] = field(metadata=PER_PROCESS)
    preload_auto: bool = field(default=False, metadata=PER_PROCESS)
    """`preload: auto`: also preload what an attempt's workers import, for the next attempt's workers."""
    start_method: StartMethod = field(metadata=PER_PROCESS)
    terminal: TerminalSpec | None = field(default=None, metadata=PER_RUN)
    """Which rank has a terminal; None: none has."""
    state_bytes: int | None = field(default=None, metadata=PER_RUN)
    """What `State` may use of each node's memory; None: a share of what is free."""
    state_secret: str = field(default="", repr=False, metadata=PER_RUN)
    """By it an agent finds what one of the run that was killed on its host has left; `""`: there cannot be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """The template, and what the node itself found out. Nothing in it changes from attempt to attempt."""

    template: WorkerTemplate
    node: NodeId
    address: str
    """Where the node's stores listen, and what its workers are told."""
    env: dict[str, str]
    """The workers' environment, without per-attempt variables."""
    interface_env: dict[str, str] = field(default_factory=dict)
    """More variables, for an attempt on several hosts; see `core/placement/environment.py`."""
    cwd: str
    run_dir: str
    """The template's, or a temporary folder where logs are not kept."""
    terminal: str = ""
    """The path of the terminal for the rank that has one; `""`: there is none."""
    page: str
    """Path of the shared page on which workers show their progress."""
    fast_dir: str
    """What workers get as RAYLAUNCH_FAST_DIR, in a folder that has copies of other nodes' files too."""
    state_address: str = ""
    """Where workers ask for memory; see `worker/state/buffer_client.py`."""
    survivors_address: str = ""
    """Where workers say that they can stay; see `worker/survivors/survivor_link.py`."""

    def rank_dir(self, attempt: int, rank: int) -> PurePath:
        """Return the folder for a worker's files."""
        return LAYOUTS[self.template.layout].rank_dir(self.run_dir, attempt, rank)

    def temporary_folders(self) -> list[str]:
        """Return the folders that are removed at the end of the run."""
        files = str(PurePath(self.fast_dir).parent)
        return [files] if self.template.kept else [files, self.run_dir]

    def workers(self, order: LaunchWorkers) -> tuple[WorkerSpec, ...]:
        """Return the specifications of the workers of an attempt, by local rank."""
        shared = {slot_owner.WITH_SURVIVORS_VARIABLE: "1"} if order.has_survivors else {}
        shared |= {files_wait.WAIT_VARIABLE: str(order.attempt)} if order.awaits_files else {}
        found = (self.worker(order.assignment, rank, order.rendezvous) for rank in range(order.assignment.nproc))
        return tuple(replace(spec, env=spec.env | shared) for spec in found)

    def worker(self, assignment: Assignment, local_rank: int, rendezvous: Rendezvous) -> WorkerSpec:
        """Return the specification of one worker of an attempt. Raises ValueError where there are too few GPUs."""
        template, terminal = self.template, self.template.terminal
        rank = assignment.ranks[local_rank]
        folder = self.rank_dir(assignment.attempt, rank)
        error_file = str(folder / ERROR) if template.kept else ""
        ranks = worker_env(assignment, local_rank, rendezvous, error_file=error_file, given=self.env)
        gpus = devices.indices(local_rank, assignment.nproc, template.gpus_per_worker)
        if template.virtual_local_rank:
            ranks |= {"LOCAL_RANK": "0", **devices.own(gpus, self.env)}
        interface = self.interface_env if assignment.nhosts > 1 else {}
        env = self.env | interface | ranks | self._own_env(assignment.attempt, local_rank)
        if not template.kept:
            env.pop(RUN_DIR_VARIABLE, None)  # of a run whose worker started this one
        return WorkerSpec(
            rank=rank,
            local_rank=local_rank,
            kind=template.kind,
            target=template.target,
            args=entry.worker_args(template.args, local_rank, pass_local_rank=template.pass_local_rank),
            kwargs=template.kwargs,
            payload=template.payload,
            env=env,
            cwd=self.cwd,
            stdout=str(folder / STDOUT),
            stderr=str(folder / STDERR),
            backend=template.backend,
            numa_binding=template.numa_binding,
            gpus=gpus,
            node_devices={name: self.env[name] for name in devices.VARIABLES if name in self.env},
            title=self._title(rank, assignment.world_size),
            terminal=self.terminal if terminal is not None and terminal.rank == rank else "",
            takes_input=terminal is not None and terminal.is_debugged,
            timeout=LONG_TIMEOUT if terminal is not None and terminal.is_debugged else 0.0,
        )

    def _title(self, rank: int, world_size: int) -> str:
        """Return what `ps` shows of a worker: `raylaunch: train.py rank 3 of 8 (charlm)`."""
        target = PurePath(self.template.target).name
        return printable(f"raylaunch: {target} rank {rank} of {world_size} ({self.template.name})")

    def _own_env(self, attempt: int, local_rank: int) -> dict[str, str]:
        """Variables that `raylaunch.worker` reads. A worker beyond the page's slots shows no progress."""
        has_slot = local_rank < shared_page.MAX_WORKERS
        slot = {shared_page.PAGE_VARIABLE: f"{self.page}:{local_rank}"} if has_slot else {}
        run_dir = {RUN_DIR_VARIABLE: self.run_dir} if self.template.kept else {}
        state = {buffer_client.ADDRESS_VARIABLE: self.state_address, files_wait.FOLDER_VARIABLE: self.fast_dir}
        if has_slot and self.template.kind != "command":
            state[survivor_link.ADDRESS_VARIABLE] = self.survivors_address
        return slot | run_dir | state | {slot_owner.ATTEMPT_VARIABLE: str(attempt)}

    def store(self, attempt: int, port: int) -> StartStore:
        """Return the order for the store of an attempt. `port` counts where the job fixes none; 0: any."""
        template = self.template
        return StartStore(
            attempt=attempt,
            address=self.address,
            master_addr=template.master_addr,
            several_nodes=template.several_nodes,
            port=template.master_port or port,
            fixed=template.master_port != 0,
        )

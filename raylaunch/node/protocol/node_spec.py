"""What workers are started from: what the driver tells an agent, and the specification that a node makes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from string import Template
from typing import Any

from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.newtypes import NO_NODE, NodeId
from raylaunch.core.placement import devices
from raylaunch.core.placement.environment import Assignment, Rendezvous, worker_env
from raylaunch.core.record.run_layout import ERROR, LAYOUTS, STDERR, STDOUT
from raylaunch.core.text import printable
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.forkserver_messages import StartStore
from raylaunch.node.protocol.node_goal import LaunchWorkers
from raylaunch.worker import RUN_DIR_VARIABLE
from raylaunch.worker.heartbeats import heartbeat_writer, shared_page
from raylaunch.worker.runtime import files_wait
from raylaunch.worker.runtime.spec import WorkerSpec

_RECORDED = "flight_recorder_rank_"
RECORDER_PIPE, RECORDER_DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
"""Variables of torch's Flight Recorder: see `NodeSpec.recorder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """What an agent is told at its start: the job itself, and what the driver knows besides."""

    job: Job = field(repr=False)
    """With the numbers that the plan has for it, and a name in which no hidden value is."""
    run_dir: str
    """The folder for logs; `""`: they go to a temporary folder of each node, which is removed at the end of the run."""
    payload: bytes = field(default=b"", repr=False)
    """Runs instead of the job's entry point, unless it is empty: cloudpickle of (function, args, kwargs)."""
    parts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What begins each capability in the agent, by its name: `Capability.agent`."""
    copy_secret: str = field(default="", repr=False)
    """What agents of the run say to each other when they copy commits and files."""
    state_secret: str = field(default="", repr=False)
    """By it an agent finds what one of the run that was killed on its host has left; `""`: there cannot be one."""
    node: NodeId = NO_NODE
    """The node's name in the run. The fleet gives each agent its own."""
    nproc: int = 0
    """Workers of this agent. The fleet gives each agent its own number."""
    address: str | None
    """Where the node's stores listen; None: at the node's own address, as its cluster knows it."""
    submitter_env: dict[str, str] = field(repr=False)
    """The environment of the process that submitted the run. Each agent makes its workers' of it and of its node's."""
    niceness: int = 0
    """That of the process that submitted the run, which all processes of the node get (nice(1))."""
    cwd: str | None
    """The submitter's working folder; None: the folder into which Ray unpacked its copy."""
    ray_address: str
    """Where scripts find Ray; `""`: there is none, and RAY_ADDRESS is not set."""
    link_address: SecretAddress | None = None
    """Where the agent opens its link to the driver; None: nowhere."""
    epoch: int = 0
    """Epoch of the driver's calls; calls of an earlier run have a lower one. 0: any, since the run is detached."""
    token: str = ""
    """Part of the names of all that a detached run has in the cluster; `""`: agents end with their driver."""

    @property
    def kept(self) -> bool:
        """Whether logs are kept."""
        return self.run_dir != ""

    @property
    def kind(self) -> str:
        """What workers run, as in `WorkerSpec`."""
        return "pickle" if self.payload else self.job.entrypoint.kind

    @property
    def gpus_per_worker(self) -> float:
        """How many GPUs each worker has."""
        return float(self.job.gpus_per_worker)

    @property
    def backend(self) -> str | None:
        """The backend of functions: NCCL needs a GPU for each rank. None: the device's own."""
        return self.job.backend or (None if self.gpus_per_worker >= 1 else "gloo")

    @property
    def state_bytes(self) -> int | None:
        """What `State` may use of the node's memory; None: a share of what is free."""
        return None if self.job.state_memory is None else int(self.job.state_memory * 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What the agent was told, and what the node itself found out. Nothing in it changes from attempt to attempt."""

    agent: AgentSpec
    address: str
    """Where the node's stores listen, and what its workers are told."""
    env: dict[str, str]
    """The workers' environment, without per-attempt variables."""
    interface_env: dict[str, str] = field(default_factory=dict)
    """More variables, for an attempt on several hosts; see `core/placement/environment.py`."""
    cwd: str
    run_dir: str
    """The agent's, or a temporary folder where logs are not kept."""
    page: str
    """Path of the shared page on which workers show their progress."""
    fast_dir: str
    """What workers get as RAYLAUNCH_FAST_DIR, in a folder that has copies of other nodes' files too."""

    def rank_dir(self, attempt: int, rank: int) -> PurePath:
        """Return the folder for a worker's files."""
        return LAYOUTS[self.agent.job.log_layout].rank_dir(self.run_dir, attempt, rank)

    def recorder(self, attempt: int) -> dict[str, str]:
        """Return the variables by which torch's Flight Recorder is asked, and says where it writes.

        Paths without the rank, which torch appends; `.pipe` follows in the first one. It is on this node, since torch
        ends a process that cannot make a pipe there.
        """
        pipes = str(PurePath(self.fast_dir).parent / "recorder-")
        dumps = str(LAYOUTS[self.agent.job.log_layout].attempt_dir(self.run_dir, attempt) / _RECORDED)
        found = {RECORDER_PIPE: pipes, RECORDER_DUMP: dumps}
        return {name: self.env.get(name, value) for name, value in found.items()}

    def temporary_folders(self) -> list[str]:
        """Return the folders that are removed at the end of the run."""
        files = str(PurePath(self.fast_dir).parent)
        return [files] if self.agent.kept else [files, self.run_dir]

    def workers(self, order: LaunchWorkers) -> tuple[WorkerSpec, ...]:
        """Return the specifications of the workers of an attempt, by local rank."""
        shared = {heartbeat_writer.WITH_SURVIVORS_VARIABLE: "1"} if order.has_survivors else {}
        found = (self.worker(order.assignment, rank, order.rendezvous) for rank in range(order.assignment.nproc))
        return tuple(replace(spec, env=spec.env | shared) for spec in found)

    def worker(self, assignment: Assignment, local_rank: int, rendezvous: Rendezvous) -> WorkerSpec:
        """Return the specification of one worker of an attempt. Raises ValueError where there are too few GPUs."""
        agent, job = self.agent, self.agent.job
        rank = assignment.ranks[local_rank]
        folder = self.rank_dir(assignment.attempt, rank)
        error_file = str(folder / ERROR) if agent.kept else ""
        ranks = worker_env(assignment, local_rank, rendezvous, error_file=error_file, given=self.env)
        gpus = devices.indices(local_rank, assignment.nproc, agent.gpus_per_worker)
        if job.virtual_local_rank:
            ranks |= {"LOCAL_RANK": "0", **devices.own(gpus, self.env)}
        interface = self.interface_env if assignment.nhosts > 1 else {}
        env = self.env | interface | ranks | self._own_env(assignment.attempt, local_rank)
        if not agent.kept:
            env.pop(RUN_DIR_VARIABLE, None)  # of a run whose worker started this one
        return WorkerSpec(
            rank=rank,
            local_rank=local_rank,
            kind=agent.kind,
            target=job.entrypoint.target,
            args=_arguments(job.entrypoint, local_rank),
            kwargs=job.entrypoint.kwargs,
            payload=agent.payload,
            env=env,
            cwd=self.cwd,
            stdout=str(folder / STDOUT),
            stderr=str(folder / STDERR),
            backend=agent.backend,
            numa_binding=job.numa_binding,
            gpus=gpus,
            node_devices={name: self.env[name] for name in devices.VARIABLES if name in self.env},
            title=self._title(rank, assignment.world_size),
        )

    def _title(self, rank: int, world_size: int) -> str:
        """Return what `ps` shows of a worker: `raylaunch: train.py rank 3 of 8 (charlm)`."""
        target = PurePath(self.agent.job.entrypoint.target).name
        return printable(f"raylaunch: {target} rank {rank} of {world_size} ({self.agent.job.title})")

    def _own_env(self, attempt: int, local_rank: int) -> dict[str, str]:
        """Variables that `raylaunch.worker` reads. A worker beyond the page's slots shows no progress."""
        has_slot = local_rank < shared_page.MAX_WORKERS
        slot = {shared_page.PAGE_VARIABLE: f"{self.page}:{local_rank}"} if has_slot else {}
        run_dir = {RUN_DIR_VARIABLE: self.run_dir} if self.agent.kept else {}
        files = {files_wait.FOLDER_VARIABLE: self.fast_dir}
        files |= self.recorder(attempt) if os.path.isdir(PurePath(self.fast_dir).parent) else {}
        return slot | run_dir | files | {heartbeat_writer.ATTEMPT_VARIABLE: str(attempt)}

    def store(self, attempt: int, port: int) -> StartStore:
        """Return the order for the store of an attempt. `port` counts where the job fixes none; 0: any."""
        job = self.agent.job
        return StartStore(
            attempt=attempt,
            address=self.address,
            master_addr=job.master_addr or "",
            several_nodes=job.max_nodes > 1,
            port=job.master_port or port,
            fixed=job.master_port != 0,
        )


def _arguments(entrypoint: Entrypoint, local_rank: int) -> tuple[Any, ...]:
    """Return the arguments of one worker.

    `${local_rank}` is replaced as torchrun does it, with `string.Template` (`torch/distributed/elastic/utils/api.py`),
    so `$$` becomes `$`. `pass_local_rank` puts `--local-rank=N` before them, as `torch.distributed.launch` does.
    """
    given = entrypoint.args
    own = [Template(word).safe_substitute(local_rank=local_rank) if isinstance(word, str) else word for word in given]
    return (f"--local-rank={local_rank}", *own) if entrypoint.pass_local_rank else tuple(own)

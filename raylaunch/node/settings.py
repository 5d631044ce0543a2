"""What a node is told once, and what follows from it for each worker: its files, its arguments, its environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from raylaunch.core.contract import ERROR, LAYOUTS, STDERR, STDOUT
from raylaunch.core.ranks import Assignment, Rendezvous, worker_env
from raylaunch.node import messages
from raylaunch.worker import attach, entry, page
from raylaunch.worker.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """All that stays the same for a node's workers from attempt to attempt."""

    node: str
    address: str
    run_dir: str
    """Where logs go. Of no meaning where they are not kept."""
    layout: str = "raylaunch"
    kept: bool = True
    """False: logs go to a temporary folder of the node, and are gone when the run is over."""
    run_id: str
    max_restarts: int
    kind: str
    target: str
    args: tuple[Any, ...] = field(repr=False)
    pass_local_rank: bool = False
    numa_binding: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)
    env: dict[str, str] = field(repr=False)
    master_addr: str = ""
    master_port: int = 0
    several_nodes: bool = False
    """The job may use more nodes than one."""
    cwd: str
    backend: str | None
    preload: tuple[str, ...]
    learn: bool = False
    """Preload what the workers of an attempt import for those of the next, too."""
    start_method: str
    page: str = ""
    """Where the node's page of signs of life is."""

    def folder(self, attempt: int, rank: int) -> PurePath:
        """Where a worker's files are."""
        return LAYOUTS[self.layout].rank_dir(self.run_dir, attempt, rank)

    def temporary(self) -> list[str]:
        """Folders that go with the run."""
        return [] if self.kept else [self.run_dir]

    def worker(self, part: Assignment, local_rank: int, meeting: Rendezvous) -> WorkerSpec:
        """One worker of an attempt."""
        rank = part.base_rank + local_rank
        folder = self.folder(part.attempt, rank)
        error_file = str(folder / ERROR) if self.kept else ""
        ranks = worker_env(part, local_rank, meeting, error_file=error_file, given=self.env)
        return WorkerSpec(
            rank=rank,
            local_rank=local_rank,
            kind=self.kind,
            target=self.target,
            args=entry.arguments(self.args, local_rank, pass_local_rank=self.pass_local_rank),
            kwargs=self.kwargs,
            payload=self.payload,
            env=self.env | ranks | self._watched(part.attempt, local_rank),
            cwd=self.cwd,
            stdout=str(folder / STDOUT),
            stderr=str(folder / STDERR),
            backend=self.backend,
            numa_binding=self.numa_binding,
        )

    def _watched(self, attempt: int, local_rank: int) -> dict[str, str]:
        """What `raylaunch.worker` needs to know."""
        has_slot = self.page and local_rank < page.MOST_WORKERS
        where = {page.VARIABLE: f"{self.page}:{local_rank}"} if has_slot else {}
        return where | {attach.ATTEMPT: str(attempt)}

    def store(self, attempt: int, port: int) -> messages.OpenStore:
        """The store of an attempt; `port` 0: any."""
        return messages.OpenStore(
            attempt=attempt,
            address=self.address,
            master_addr=self.master_addr,
            several_nodes=self.several_nodes,
            port=self.master_port or port,
            fixed=self.master_port != 0,
        )

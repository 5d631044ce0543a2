"""Who would run where, with which ranks, and why the other nodes would not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raylaunch.core.job import Job
from raylaunch.core.ranks import natural_key


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What Ray says of one of its nodes. Resources are Ray's logical ones."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One agent's place, and the ranks it would get."""

    node_id: str
    address: str
    node_rank: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A node that takes no agent (or no more of them), and why."""

    node_id: str
    address: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be asked of the cluster, and what it would give right now."""

    min_nodes: int
    max_nodes: int
    nproc: int
    gpus: float
    cpus: float
    spread: bool
    seats: tuple[Seat, ...]
    skipped: tuple[Skipped, ...]
    assumed: tuple[str, ...]
    """What the job left open, and what was taken."""

    @property
    def feasible(self) -> bool:
        """Whether the cluster could start the job now."""
        return len(self.seats) >= self.min_nodes

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one agent with its workers, as Ray's placement groups want them."""
        return {name: amount for name, amount in (("GPU", self.gpus), ("CPU", self.cpus)) if amount}

    @property
    def asked(self) -> str:
        """The request in words."""
        low, high = self.min_nodes, self.max_nodes
        count = f"{low}" if low == high else f"{low} to {high}"
        each = " and ".join(f"{amount:g} {name}s" for name, amount in self.bundle.items()) or "no resources"
        place = ", each on a node of its own" if self.spread else ""
        return f"{count} x {self.nproc} workers ({each}){place}"

    @property
    def shortage(self) -> str:
        """What is missing, with what each node has free."""
        lines = [f"asked: {self.asked}", f"fits now: {len(self.seats)} of {self.min_nodes}"]
        lines += [f"{node.address}: {node.why}" for node in self.skipped]
        if not self.skipped and not self.seats:
            lines.append("the cluster has no nodes")
        return "\n".join(lines)


def make_plan(job: Job, nodes: Sequence[NodeFacts], *, local: bool) -> Plan:
    """Lay the job out on the nodes. `local`: Ray was started by us, on this machine only.

    Raises ValueError where `nproc_per_node: gpu` meets a cluster without GPUs.
    """
    spread = job.placement == "spread" or (job.placement == "auto" and not local)
    nproc, assumed = _nproc(job, nodes)
    gpus_each, more = _gpus_per_worker(job, nodes, nproc)
    assumed += more
    if job.placement == "auto":
        assumed.append(f"placement: {'spread' if spread else 'pack'} ({'a cluster' if spread else 'one machine'})")
    gpus, cpus = gpus_each * nproc, job.cpus_per_worker * nproc
    seats, skipped = _seat(nodes, job.max_nodes, nproc, gpus, cpus, spread=spread)
    return Plan(
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        nproc=nproc,
        gpus=gpus,
        cpus=cpus,
        spread=spread,
        seats=seats,
        skipped=skipped,
        assumed=tuple(assumed),
    )


def _nproc(job: Job, nodes: Sequence[NodeFacts]) -> tuple[int, list[str]]:
    """The workers of each node; for a word, what the smallest of the best MAX nodes has."""
    asked = str(job.nproc_per_node)
    if asked.isdecimal():
        return int(asked), []
    has_gpus = any(node.gpus >= 1 for node in nodes)
    if asked == "gpu" and nodes and not has_gpus:
        msg = "`nproc_per_node: gpu`, but no node of the cluster has a GPU"
        raise ValueError(msg)
    use_gpus = asked == "gpu" or (asked == "auto" and has_gpus)
    counts = sorted((int(node.gpus if use_gpus else node.cpus) for node in nodes), reverse=True)
    counts = [count for count in counts if count][: job.max_nodes]
    nproc = min(counts, default=1)
    return nproc, [f"nproc_per_node: {nproc} ({'GPUs' if use_gpus else 'CPUs'} of a node)"]


def _gpus_per_worker(job: Job, nodes: Sequence[NodeFacts], nproc: int) -> tuple[float, list[str]]:
    asked = str(job.gpus_per_worker)
    if asked.isdecimal():
        return float(asked), []
    if str(job.nproc_per_node) == "cpu":
        return 0.0, ["gpus_per_worker: 0 (one worker for each CPU)"]
    most = max((node.gpus for node in nodes), default=0.0)
    if most and most >= nproc:
        return 1.0, ["gpus_per_worker: 1"]
    why = f"no node has {nproc} GPUs" if most else "the nodes have no GPUs"
    return 0.0, [f"gpus_per_worker: 0 ({why})"]


def _seat(
    nodes: Sequence[NodeFacts], wanted: int, nproc: int, gpus: float, cpus: float, *, spread: bool
) -> tuple[tuple[Seat, ...], tuple[Skipped, ...]]:
    seats: list[Seat] = []
    skipped: list[Skipped] = []
    for node in sorted(nodes, key=lambda node: (natural_key(node.address), node.node_id)):
        room = _room(node, gpus, cpus)
        take = min(room, 1 if spread else room, wanted - len(seats))
        for _ in range(take):
            base = len(seats) * nproc
            ranks = tuple(range(base, base + nproc))
            seats.append(Seat(node_id=node.node_id, address=node.address, node_rank=len(seats), ranks=ranks))
        if take == 0 or (not spread and len(seats) < wanted):
            why = _why_not(node, gpus, cpus) if len(seats) < wanted else "not needed"
            skipped.append(Skipped(node_id=node.node_id, address=node.address, why=why))
    return tuple(seats), tuple(skipped)


_ANY_NUMBER = 1_000_000


def _room(node: NodeFacts, gpus: float, cpus: float) -> int:
    fits = [free // need for free, need in ((node.free_gpus, gpus), (node.free_cpus, cpus)) if need]
    return int(min(fits, default=_ANY_NUMBER))


def _why_not(node: NodeFacts, gpus: float, cpus: float) -> str:
    rows = (("GPUs", gpus, node.free_gpus, node.gpus), ("CPUs", cpus, node.free_cpus, node.cpus))
    return ", ".join(f"{free:g} of {total:g} {name} free, {need:g} needed" for name, need, free, total in rows if need)

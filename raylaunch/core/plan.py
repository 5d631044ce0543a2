"""Who would run where, with which ranks, and why the other nodes would not do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raylaunch.core import rules
from raylaunch.core.job import Job
from raylaunch.core.layout import Bundle, Layout, NodeFacts, by_address, by_node, by_total, why_not
from raylaunch.core.words import count

NOT_NEEDED = "not needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One agent's place, and the ranks it would get."""

    node_id: str
    address: str
    node_rank: int
    ranks: tuple[int, ...]
    rules: tuple[str, ...] = ()
    """Keys of `nodes` that match it, as far as the driver can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """A node that would be kept warm, without ranks."""

    node_id: str
    address: str


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
    bundles: tuple[Bundle, ...]
    """MAX of them, the first MIN of which are asked for as one gang; then those of the spare nodes."""
    spread: bool
    seats: tuple[Seat, ...]
    spares: tuple[Spare, ...]
    skipped: tuple[Skipped, ...]
    assumed: tuple[str, ...]
    """What the job left open, and what was taken."""
    warnings: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether the cluster could start the job now."""
        return len(self.seats) >= self.min_nodes

    @property
    def workers(self) -> int:
        """How many would start now."""
        return sum(len(seat.ranks) for seat in self.seats)

    @property
    def asked(self) -> str:
        """The request in words."""
        low, high = self.min_nodes, self.max_nodes
        kinds = Counter(bundle.asked for bundle in self.bundles[:high])
        many = f"{low}" if low == high else f"{low} to {high}"
        place = ", each on a node of its own" if self.spread else ""
        if spares := len(self.bundles) - high:
            place += f", and {count(spares, 'spare node')}"
        if len(kinds) == 1:
            return f"{many} x {next(iter(kinds))}{place}"
        some = "" if low == high else f"{many} of "
        return some + " and ".join(f"{number} x {asked}" for asked, number in kinds.items()) + place

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
    if job.nprocs is None:
        layout = by_node(job, nodes, spread=spread)
    else:
        layout = by_total(job, nodes, job.nprocs, spread=spread, local=local)
    assumed = layout.assumed
    if job.placement == "auto":
        assumed += (f"placement: {'spread' if spread else 'pack'} ({'a cluster' if spread else 'one machine'})",)
    return Plan(
        min_nodes=layout.min_nodes,
        max_nodes=len(layout.bundles) - job.spares,
        bundles=layout.bundles,
        spread=spread,
        seats=tuple(_seats(job, layout)),
        spares=tuple(Spare(node_id=node.node_id, address=node.address) for node, _ in layout.spare),
        skipped=tuple(_skipped(nodes, layout, spread=spread)),
        assumed=assumed,
        warnings=tuple(_warnings(job, nodes)),
    )


def settled(job: Job, plan: Plan) -> Job:
    """The job with what the plan found: how many nodes `nprocs` takes, and whether agents share machines.

    Where they do, a machine that fails cannot be left out without its neighbours.
    """
    if job.nprocs is not None:
        job = replace(job, nnodes=plan.max_nodes)
    return job if plan.spread else replace(job, exclude_after=0)


def _seats(job: Job, layout: Layout) -> Iterator[Seat]:
    base = 0
    for node_rank, (node, bundle) in enumerate(layout.seated):
        yield Seat(
            node_id=node.node_id,
            address=node.address,
            node_rank=node_rank,
            ranks=tuple(range(base, base + bundle.nproc)),
            rules=tuple(rules.matching(job.nodes, node.place)),
        )
        base += bundle.nproc


def _skipped(nodes: Sequence[NodeFacts], layout: Layout, *, spread: bool) -> Iterator[Skipped]:
    held_by = (*layout.seated, *layout.spare)
    wanting = len(held_by) < len(layout.bundles)
    for node in sorted(nodes, key=by_address):
        held = [bundle for host, bundle in held_by if host is node]
        if not held or (wanting and not spread):
            why = why_not(node, held, layout.missing[node.node_id]) if wanting else NOT_NEEDED
            yield Skipped(node_id=node.node_id, address=node.address, why=why)


def _warnings(job: Job, nodes: Sequence[NodeFacts]) -> Iterator[str]:
    if nodes:
        for key in rules.matching_nobody(job.nodes, [node.place for node in nodes]):
            yield f"`nodes`: `{key}` matches no node of the cluster"

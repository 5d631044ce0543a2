"""The plan of a job: which nodes would run which ranks now, and why other nodes are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from raylaunch.core.job import node_rules
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.packing import Bundle, NodeFacts, Packing, by_address, pack, why_not
from raylaunch.core.text import count

NOT_NEEDED = "not needed"
_Number = TypeVar("_Number", int, float)
_MOST_SHARING = 64
"""Bundles on one node that are considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node of the world, and its ranks."""

    node_id: HostId
    address: str
    node_rank: int
    ranks: tuple[int, ...]
    rules: tuple[str, ...] = ()
    """Keys of `nodes` that match the node. The driver cannot tell for subnets of other interfaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareNode:
    """A spare node: it has an agent and no ranks."""

    node_id: HostId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedNode:
    """A node that takes no agent, or no more agents, and why."""

    node_id: HostId
    address: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to reserve in the cluster, and what it has room for now."""

    min_nodes: int
    max_nodes: int
    bundles: tuple[Bundle, ...]
    """MAX bundles, the first MIN of which are reserved together as a gang; then the spare nodes' bundles."""
    spread: bool
    seats: tuple[NodePlan, ...]
    spares: tuple[SpareNode, ...]
    skipped: tuple[SkippedNode, ...]
    assumed: tuple[str, ...]
    """The settings that the job left open, and the values assumed for them."""
    warnings: tuple[str, ...]
    gpus_per_worker: float = 0.0
    possible: bool = True
    """Whether these nodes could start the job if all their resources were free."""
    obstacles: tuple[str, ...] = ()
    """Why there are too few nodes, besides what each skipped one lacks."""
    remedies: tuple[str, ...] = ()
    """Settings, such as `placement=pack`, with each of which the job could start now."""
    lacks_gpus: bool = False
    """Whether the job needs GPUs, and no node has any."""
    cluster: str = ""
    """The address of the Ray cluster; `""`: there is only this machine."""
    fallback: str = ""
    """The sentence that several nodes run on this machine because no cluster was found; `""`: they do not."""

    @property
    def feasible(self) -> bool:
        """Whether the cluster could start the job now."""
        return len(self.seats) >= self.min_nodes

    @property
    def workers(self) -> int:
        """The number of workers that would start now."""
        return sum(len(seat.ranks) for seat in self.seats)

    @property
    def asked(self) -> str:
        """The requested nodes as text, such as `2 nodes with 8 workers each (8 GPUs per node)`."""
        low, high = self.min_nodes, self.max_nodes
        kinds = Counter((bundle.nproc, bundle.amounts) for bundle in self.bundles[:high])
        place = ", on different Ray nodes" if self.spread and high > 1 else ""
        if spares := len(self.bundles) - high:
            place += f", and {count(spares, 'spare node')}"
        if len(kinds) == 1:
            ((nproc, amounts),) = kinds
            nodes = count(high, "node") if low == high else f"{low} to {high} nodes"
            return nodes + _each(high, nproc, amounts) + place
        some = "" if low == high else f"{low} to {high} of these nodes: "
        groups = (count(number, "node") + _each(number, *kind) for kind, number in kinds.items())
        return some + " and ".join(groups) + place

    @property
    def shortage(self) -> str:
        """What is requested, what there is room for, and what each skipped node has free."""
        lines = [f"requested: {self.asked}", f"room for: {len(self.seats)} of {self.min_nodes} nodes"]
        lines += [f"{node.address}: {node.why}" for node in self.skipped]
        if not self.skipped and not self.seats:
            lines.append("the cluster has no nodes")
        return "\n".join([*lines, *self.advice])

    @property
    def advice(self) -> tuple[str, ...]:
        """Lines that say why there are too few nodes, and what would help."""
        return (*self.obstacles, *([f"it could start now with {_either(self.remedies)}"] if self.remedies else []))


def _either(settings: Sequence[str]) -> str:
    *others, last = (f"`{setting}`" for setting in settings)
    return f"{', '.join(others)} or {last}" if others else last


def _each(nodes: int, nproc: int, amounts: str) -> str:
    each, per_node = ("", "") if nodes == 1 else (" each", " per node")
    return f" with {count(nproc, 'worker')}{each} ({amounts}{per_node})"


def make_plan(job: Job, nodes: Sequence[NodeFacts], *, local: bool) -> Plan:
    """Plan a job on these nodes. `local`: there is only this machine, with or without Ray.

    Raise ValueError for `nproc_per_node: gpu` if no node of the cluster has a GPU.
    """
    spread = job.placement == "spread" or (job.placement == "auto" and not local)
    packing = pack(job, nodes, spread=spread, local=local)
    all_free = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes]
    possible = packing.feasible or pack(job, all_free, spread=spread, local=local).feasible
    obstacles = (_missing_gpus(nodes, packing), _too_few_nodes(nodes, packing, spread=spread))
    assumed = packing.assumed
    if job.placement == "auto":
        assumed += (f"placement: {'spread' if spread else 'pack'} ({'a cluster' if spread else 'one machine'})",)
    return Plan(
        min_nodes=packing.min_nodes,
        max_nodes=len(packing.bundles) - job.spares,
        bundles=packing.bundles,
        spread=spread,
        seats=tuple(_seats(job, packing)),
        spares=tuple(SpareNode(node_id=node.node_id, address=node.address) for node, _ in packing.spare),
        skipped=tuple(_skipped(nodes, packing, spread=spread)),
        assumed=assumed,
        warnings=tuple(_warnings(job, nodes)),
        gpus_per_worker=packing.gpus_per_worker,
        possible=possible,
        obstacles=() if packing.feasible else tuple(filter(None, obstacles)),
        remedies=() if packing.feasible else tuple(_remedies(job, nodes, packing, spread=spread, local=local)),
        lacks_gpus=obstacles[0] != "" and not packing.feasible,
    )


def settled(job: Job, plan: Plan) -> Job:
    """Return the job with what the plan has decided: the number of nodes that `nprocs` takes, and GPUs of each worker.

    If agents share hosts, hosts are not excluded for failures: that would take out healthy agents too.
    """
    job = replace(job, gpus_per_worker=plan.gpus_per_worker)
    if job.nprocs is not None:
        job = replace(job, nnodes=plan.max_nodes)
    return job if plan.spread else replace(job, exclude_after=0)


def _seats(job: Job, packing: Packing) -> Iterator[NodePlan]:
    base = 0
    for node_rank, (node, bundle) in enumerate(packing.seated):
        yield NodePlan(
            node_id=node.node_id,
            address=node.address,
            node_rank=node_rank,
            ranks=tuple(range(base, base + bundle.nproc)),
            rules=tuple(node_rules.matching(job.nodes, node.place)),
        )
        base += bundle.nproc


def _skipped(nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool) -> Iterator[SkippedNode]:
    held_by = (*packing.seated, *packing.spare)
    wanting = len(held_by) < len(packing.bundles)
    for node in sorted(nodes, key=by_address):
        held = [bundle for host, bundle in held_by if host is node]
        if not held or (wanting and not spread):
            why = why_not(node, held, packing.missing[node.node_id]) if wanting else NOT_NEEDED
            yield SkippedNode(node_id=node.node_id, address=node.address, why=why)


def _warnings(job: Job, nodes: Sequence[NodeFacts]) -> Iterator[str]:
    if nodes:
        for key in node_rules.unmatched(job.nodes, [node.place for node in nodes]):
            yield f"`nodes`: `{key}` matches no node of the cluster"


def _missing_gpus(nodes: Sequence[NodeFacts], packing: Packing) -> str:
    """Return that the job needs GPUs where no node has any; "" if that is not so."""
    needs = any(bundle.gpus for bundle in packing.bundles[: packing.min_nodes])
    return "the job needs GPUs, and no node of the cluster has any" if needs and not _have_gpus(nodes) else ""


def _too_few_nodes(nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool) -> str:
    """Return that each node of the job must be another one than there are; "" if that is not so."""
    if not spread or not 0 < len(nodes) < packing.min_nodes:
        return ""
    have = "there is 1" if len(nodes) == 1 else f"there are {len(nodes)}"
    return f"{count(packing.min_nodes, 'different Ray node')} are needed, and {have}"


def _remedies(job: Job, nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool, local: bool) -> Iterator[str]:
    """Yield changes of the job, as written on the command line, each of which would let it start now.

    Each change is tried by packing the job again. Each setting gets the value that is nearest to the job's. No change
    takes its GPUs away.
    """
    if not nodes or _missing_gpus(nodes, packing):
        return

    def helps(changed: Job, *, spread: bool = spread) -> bool:
        return pack(changed, nodes, spread=spread, local=local).feasible

    if spread and helps(replace(job, placement="pack"), spread=False):
        yield "placement=pack"
    cpus = _most(
        _fewer_cpus(job, nodes, packing, spread=spread), lambda value: helps(replace(job, cpus_per_worker=value))
    )
    if cpus is not None:
        yield f"cpus_per_worker={cpus:g}"
    fewer = _fewer_workers(job, nodes, packing, spread=spread)
    if job.nprocs is not None:
        workers = _most(fewer, lambda value: helps(replace(job, nprocs=value)))
    else:
        workers = _most(fewer, lambda value: helps(replace(job, nproc_per_node=value)))
    if workers is not None:
        yield f"{'nproc_per_node' if job.nprocs is None else 'nprocs'}={workers}"
    if packing.seated and job.nprocs is None:
        yield f"nnodes={len(packing.seated)}:{job.max_nodes}"


def _have_gpus(nodes: Sequence[NodeFacts]) -> bool:
    return any(node.gpus for node in nodes)


def _most(values: Collection[_Number], helps: Callable[[_Number], bool]) -> _Number | None:
    """Return the largest value that helps, if smaller ones help too; None: none does."""
    ordered = sorted(values)
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if helps(ordered[middle]) else (low, middle)
    return ordered[low - 1] if low else None


def _fewer_cpus(job: Job, nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool) -> set[float]:
    """Return what each worker could have if the free CPUs of a node were divided among some of them; also none."""
    sizes = {bundle.nproc * number for bundle in packing.bundles for number in _per_node(packing, spread=spread)}
    shares = {node.free_cpus / size for node in nodes for size in sizes if size}
    found = {float(int(share)) if share >= 1 else int(share * 10) / 10 for share in shares} | {0.0}
    return {cpus for cpus in found if cpus < job.cpus_per_worker}


def _fewer_workers(job: Job, nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool) -> set[int]:
    """Return numbers of workers for which a node, or with `nprocs` all nodes, may have room."""
    workers = sum(bundle.nproc for bundle in packing.bundles) or 1
    gpus = sum(bundle.gpus for bundle in packing.bundles) / workers
    cpus = sum(bundle.cpus for bundle in packing.bundles) / workers
    fits = [
        [int(free / need) for free, need in ((node.free_gpus, gpus), (node.free_cpus, cpus)) if need] for node in nodes
    ]
    rooms = [min(each) for each in fits if each]
    most = job.nprocs if job.nprocs is not None else max(bundle.nproc for bundle in packing.bundles)
    found = {room // number for room in rooms for number in _per_node(packing, spread=spread)} | {sum(rooms)}
    return {room for room in found if 0 < room < most}


def _per_node(packing: Packing, *, spread: bool) -> range:
    """Return how many bundles may share a node."""
    return range(1, 2 if spread else min(len(packing.bundles), _MOST_SHARING) + 1)

"""The plan of a job: which nodes would run which ranks now, and why other nodes are skipped.

The job is packed onto the nodes, by its workers on each node (`_by_node`) or in total (`_by_total`). Of the
packing, a plan is made, which people see and the allocator follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from raylaunch.core.job import node_rules
from raylaunch.core.job.job import Job
from raylaunch.core.job.node_rules import NodeAttributes
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.environment import natural_key
from raylaunch.core.text import count

NOT_NEEDED = "not needed"
_Number = TypeVar("_Number", int, float)
_MOST_SHARING = 64
"""Bundles on one node that are considered."""
_GPU_WORDS = ("gpu", "xpu")
_NO_WORKERS = "no workers are meant for it"
_UNLIMITED = 1_000_000
_ROUNDING = 1e-6
"""Ten tenths of a GPU fit into one, which a division of floats does not always find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node of the Ray cluster. Resources are Ray's logical resources."""

    node_id: HostId
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> NodeAttributes:
        """The attributes that rules of `nodes` match."""
        return NodeAttributes(address=self.address, labels=self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The resources of one agent and its workers: a bundle of a Ray placement group."""

    nproc: int
    gpus: float
    cpus: float
    avoid: tuple[HostId, ...] = ()
    """Ids of nodes where the bundle fits, but which have to run another number of workers."""

    @property
    def resources(self) -> dict[str, float]:
        """The bundle as Ray's placement groups take it."""
        return {name: amount for name, amount in (("GPU", self.gpus), ("CPU", self.cpus)) if amount}

    @property
    def amounts(self) -> str:
        """The resources as text, such as `8 GPUs and 8 CPUs`."""
        return " and ".join(count(amount, name) for name, amount in self.resources.items()) or "no resources"


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
    packing = _pack(job, nodes, spread=spread, local=local)
    all_free = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes]
    possible = packing.feasible or _pack(job, all_free, spread=spread, local=local).feasible
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


def _seats(job: Job, packing: _Packing) -> Iterator[NodePlan]:
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


def _skipped(nodes: Sequence[NodeFacts], packing: _Packing, *, spread: bool) -> Iterator[SkippedNode]:
    held_by = (*packing.seated, *packing.spare)
    wanting = len(held_by) < len(packing.bundles)
    for node in sorted(nodes, key=_by_address):
        held = [bundle for host, bundle in held_by if host is node]
        if not held or (wanting and not spread):
            why = _why_not(node, held, packing.missing[node.node_id]) if wanting else NOT_NEEDED
            yield SkippedNode(node_id=node.node_id, address=node.address, why=why)


def _warnings(job: Job, nodes: Sequence[NodeFacts]) -> Iterator[str]:
    if nodes:
        for key in node_rules.unmatched(job.nodes, [node.place for node in nodes]):
            yield f"`nodes`: `{key}` matches no node of the cluster"


def _missing_gpus(nodes: Sequence[NodeFacts], packing: _Packing) -> str:
    """Return that the job needs GPUs where no node has any; "" if that is not so."""
    needs = any(bundle.gpus for bundle in packing.bundles[: packing.min_nodes])
    return "the job needs GPUs, and no node of the cluster has any" if needs and not _have_gpus(nodes) else ""


def _too_few_nodes(nodes: Sequence[NodeFacts], packing: _Packing, *, spread: bool) -> str:
    """Return that each node of the job must be another one than there are; "" if that is not so."""
    if not spread or not 0 < len(nodes) < packing.min_nodes:
        return ""
    have = "there is 1" if len(nodes) == 1 else f"there are {len(nodes)}"
    return f"{count(packing.min_nodes, 'different Ray node')} are needed, and {have}"


def _remedies(job: Job, nodes: Sequence[NodeFacts], packing: _Packing, *, spread: bool, local: bool) -> Iterator[str]:
    """Yield changes of the job, as written on the command line, each of which would let it start now.

    Each change is tried by packing the job again. Each setting gets the value that is nearest to the job's. No change
    takes its GPUs away.
    """
    if not nodes or _missing_gpus(nodes, packing):
        return

    def helps(changed: Job, *, spread: bool = spread) -> bool:
        return _pack(changed, nodes, spread=spread, local=local).feasible

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


def _fewer_cpus(job: Job, nodes: Sequence[NodeFacts], packing: _Packing, *, spread: bool) -> set[float]:
    """Return what each worker could have if the free CPUs of a node were divided among some of them; also none."""
    sizes = {bundle.nproc * number for bundle in packing.bundles for number in _per_node(packing, spread=spread)}
    shares = {node.free_cpus / size for node in nodes for size in sizes if size}
    found = {float(int(share)) if share >= 1 else int(share * 10) / 10 for share in shares} | {0.0}
    return {cpus for cpus in found if cpus < job.cpus_per_worker}


def _fewer_workers(job: Job, nodes: Sequence[NodeFacts], packing: _Packing, *, spread: bool) -> set[int]:
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


def _per_node(packing: _Packing, *, spread: bool) -> range:
    """Return how many bundles may share a node."""
    return range(1, 2 if spread else min(len(packing.bundles), _MOST_SHARING) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """The bundles to reserve, and the nodes that have room for them now."""

    min_nodes: int
    bundles: tuple[Bundle, ...]
    """MAX bundles, the first MIN of which are needed to start; then the spare nodes' bundles."""
    seated: tuple[tuple[NodeFacts, Bundle], ...]
    spare: tuple[tuple[NodeFacts, Bundle], ...]
    missing: Mapping[HostId, Bundle | str]
    """By node id: the bundle that the node would have to take, or why there is none for it."""
    gpus_per_worker: float
    assumed: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether there is room for as many nodes as the job needs to start."""
        return len(self.seated) >= self.min_nodes


def _pack(job: Job, nodes: Sequence[NodeFacts], *, spread: bool, local: bool) -> _Packing:
    """Pack a job by its workers on each node, or by those in total. `local`: there is only this machine.

    Raise ValueError for `nproc_per_node: gpu` if no node has a GPU.
    """
    if job.nprocs is None:
        return _by_node(job, nodes, spread=spread)
    return _by_total(job, nodes, job.nprocs, spread=spread, local=local)


def _by_node(job: Job, nodes: Sequence[NodeFacts], *, spread: bool) -> _Packing:
    """Pack a job with `nproc_per_node` workers on each node, or as rules of `nodes` say.

    Nodes with more workers are preferred.

    Raise ValueError for `nproc_per_node: gpu` if no node has a GPU.
    """
    counts = _counts(job, nodes)
    gpus, assumed = _gpus_by_node(job, nodes, counts)
    bundles = {node.node_id: _bundle(job, counts[node.node_id], gpus, nodes, counts) for node in nodes}
    best = sorted(
        (node for node in nodes if counts[node.node_id]), key=lambda node: (-counts[node.node_id], _by_address(node))
    )
    most = job.max_nodes + job.spares
    seated: list[tuple[NodeFacts, Bundle]] = []
    for node in best:
        room = _room(node.free_gpus, node.free_cpus, bundles[node.node_id])
        take = min(room, 1 if spread else room, most - len(seated))
        seated += [(node, bundles[node.node_id])] * take
    taken = {node.node_id for node, _ in seated}
    busy = [(node, bundles[node.node_id]) for node in best if node.node_id not in taken and _could_hold(node, bundles)]
    wanted = (seated + busy)[:most]
    usual = (
        _most_frequent([bundle.nproc for _, bundle in wanted]) or _most_frequent(list(counts.values())) or _default(job)
    )
    unknown = [_bundle(job, usual, gpus, nodes, counts)] * (most - len(wanted))
    if not str(job.nproc_per_node).isdecimal():
        assumed = [_resolved_nproc(job, nodes, [(node, bundle.nproc) for node, bundle in wanted], usual), *assumed]
    seated.sort(key=lambda seat: _by_address(seat[0]))
    return _Packing(
        min_nodes=job.min_nodes,
        bundles=(*_sorted(wanted[: job.min_nodes]), *_sorted(wanted[job.min_nodes :]), *unknown),
        seated=tuple(seated[: job.max_nodes]),
        spare=tuple(seated[job.max_nodes :]),
        missing={node.node_id: bundles[node.node_id] if counts[node.node_id] else _NO_WORKERS for node in nodes},
        gpus_per_worker=gpus,
        assumed=tuple(assumed),
    )


def _by_total(job: Job, nodes: Sequence[NodeFacts], total: int, *, spread: bool, local: bool) -> _Packing:
    """Pack a job of `nprocs` workers: on as few nodes as hold them or, if `nnodes` is not 1, evenly on MAX nodes.

    The bundles are not bound to nodes: any nodes with enough room will do.
    """
    as_needed = str(job.nnodes) == "1"
    even = _even(total, 1 if as_needed else job.max_nodes)
    gpus, assumed = _gpus_in_all(job, nodes, even, spread=spread)
    one = _bundle(job, 1, gpus)
    roomy = sorted(nodes, key=lambda node: (-_room(node.free_gpus, node.free_cpus, one), _by_address(node)))
    shares = even
    if as_needed and not local:
        free = [_room(node.free_gpus, node.free_cpus, one) for node in roomy]
        whole = sorted((_room(node.gpus, node.cpus, one) for node in nodes), reverse=True)
        shares = _filled(total, free if sum(free) >= total else whole)
        assumed = [f"nnodes: {len(shares)} (for {count(total, 'worker')})", *assumed]
    bundles = [_bundle(job, share, gpus) for share in [*shares, *[max(shares)] * job.spares]]
    seated, _ = _first_fit(roomy, bundles[: len(shares)], spread=spread)
    with_spare, left = _first_fit(roomy, bundles, spread=spread)
    return _Packing(
        min_nodes=len(shares),
        bundles=tuple(bundles),
        seated=tuple(sorted(seated, key=lambda seat: _by_address(seat[0]))),
        spare=tuple(with_spare[len(seated) :]) if len(seated) == len(shares) else (),
        missing={node.node_id: (left or bundles)[-1] for node in nodes},
        gpus_per_worker=gpus,
        assumed=tuple(assumed),
    )


def _why_not(node: NodeFacts, held: Sequence[Bundle], missing: Bundle | str) -> str:
    """Return why a node takes no more than the bundles `held`: what is free, and what would be needed."""
    if isinstance(missing, str):
        return missing
    gpus, cpus = _left(node, held)
    rows = (("GPUs", missing.gpus, gpus, node.gpus), ("CPUs", missing.cpus, cpus, node.cpus))
    return ", ".join(f"{free:g} of {total:g} {name} free, {need:g} needed" for name, need, free, total in rows if need)


def _left(node: NodeFacts, held: Sequence[Bundle]) -> tuple[float, float]:
    """Return the free GPUs and CPUs of a node with these bundles."""
    gpus, cpus = sum(bundle.gpus for bundle in held), sum(bundle.cpus for bundle in held)
    return node.free_gpus - gpus, node.free_cpus - cpus


def _by_address(node: NodeFacts) -> tuple[object, str]:
    """Return a sort key: natural order of the address, then the node id."""
    return natural_key(node.address), node.node_id


def _sorted(wanted: Sequence[tuple[NodeFacts, Bundle]]) -> Iterator[Bundle]:
    """Sort by address, as ranks are."""
    return (bundle for _, bundle in sorted(wanted, key=lambda pair: _by_address(pair[0])))


# Workers by node


def _default(job: Job) -> int:
    given = str(job.nproc_per_node)
    return int(given) if given.isdecimal() else 1


def _uses_gpus(job: Job, nodes: Sequence[NodeFacts]) -> bool:
    return job.nproc_per_node in _GPU_WORDS or (job.nproc_per_node == "auto" and any(node.gpus >= 1 for node in nodes))


def _counts(job: Job, nodes: Sequence[NodeFacts]) -> dict[HostId, int]:
    """Return the number of workers by node id. `auto` counts GPUs on all nodes if any node has one, else CPUs."""
    if job.nproc_per_node in _GPU_WORDS and nodes and not any(node.gpus >= 1 for node in nodes):
        msg = f"`nproc_per_node: {job.nproc_per_node}`, but there is no GPU on any node"
        raise ValueError(msg)
    use_gpus = _uses_gpus(job, nodes)
    counts = {}
    for node in nodes:
        ruled = node_rules.nproc(job.nodes, node.place)
        resolved = int(node.gpus if use_gpus else node.cpus)
        given = str(job.nproc_per_node)
        counts[node.node_id] = ruled if ruled is not None else int(given) if given.isdecimal() else resolved
    return counts


def _resolved_nproc(job: Job, nodes: Sequence[NodeFacts], wanted: Sequence[tuple[NodeFacts, int]], usual: int) -> str:
    resolved = {count for node, count in wanted if node_rules.nproc(job.nodes, node.place) is None} or {usual}
    text = " or ".join(map(str, sorted(resolved)))
    whose = "GPUs" if _uses_gpus(job, nodes) else "CPUs"
    return f"nproc_per_node: {text} ({whose} of {'a' if len(resolved) == 1 else 'each'} node)"


def _most_frequent(counts: Sequence[int]) -> int:
    """Return the most frequent number, the largest of several; 0 if there is none."""
    return max(Counter(counts).items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]


def _gpus_by_node(job: Job, nodes: Sequence[NodeFacts], counts: Mapping[HostId, int]) -> tuple[float, list[str]]:
    if job.gpus_per_worker != "auto":
        return float(job.gpus_per_worker), []
    if job.nproc_per_node == "cpu":
        return 0.0, ["gpus_per_worker: 0 (one worker for each CPU)"]
    if any(node.gpus >= counts[node.node_id] > 0 for node in nodes):
        return 1.0, ["gpus_per_worker: 1"]
    different = set(counts.values())
    many = f"{next(iter(different))}" if len(different) == 1 else "as many"
    has_some = any(node.gpus for node in nodes)
    return 0.0, [f"gpus_per_worker: 0 ({f'no node has {many} GPUs' if has_some else 'the nodes have no GPUs'})"]


def _bundle(
    job: Job, count: int, gpus: float, nodes: Sequence[NodeFacts] = (), counts: Mapping[HostId, int] | None = None
) -> Bundle:
    bundle = Bundle(nproc=count, gpus=_whole(gpus * count), cpus=job.cpus_per_worker * count)
    others = [node for node in nodes if counts is not None and counts[node.node_id] != count]
    avoid = sorted(node.node_id for node in others if _room(node.gpus, node.cpus, bundle))
    return replace(bundle, avoid=tuple(avoid))


def _whole(gpus: float) -> float:
    """Round to GPUs that Ray can reserve: above one a whole number, below in steps of 0.0001."""
    gpus = round(gpus, 4)
    return gpus if gpus <= 1 else float(math.ceil(gpus))


def _could_hold(node: NodeFacts, bundles: Mapping[HostId, Bundle]) -> bool:
    return _room(node.gpus, node.cpus, bundles[node.node_id]) > 0


def _room(gpus: float, cpus: float, bundle: Bundle) -> int:
    """Return how many such bundles fit."""
    fits = [have / need + _ROUNDING for have, need in ((gpus, bundle.gpus), (cpus, bundle.cpus)) if need]
    return int(min(fits, default=_UNLIMITED))


# Workers in total


def _even(total: int, nodes: int) -> list[int]:
    """Divide the workers among the nodes: shares differ by one at most, the larger first, and none is 0."""
    nodes = min(nodes, total)
    return [total // nodes + (index < total % nodes) for index in range(nodes)]


def _filled(total: int, rooms: Sequence[int]) -> list[int]:
    """Fill one node after the other; put the rest on further nodes like the largest."""
    shares: list[int] = []
    for room in rooms:
        if room and total:
            shares.append(min(room, total))
            total -= shares[-1]
    like = max(rooms, default=0) or total
    while total:
        shares.append(min(like, total))
        total -= shares[-1]
    return shares


def _gpus_in_all(
    job: Job, nodes: Sequence[NodeFacts], shares: Sequence[int], *, spread: bool
) -> tuple[float, list[str]]:
    """Return the GPUs of each worker, and what was assumed. A single share stands for all workers on any nodes."""
    if job.gpus_per_worker != "auto":
        return float(job.gpus_per_worker), []
    if len(shares) == 1:
        enough = sum(int(node.gpus) for node in nodes) >= shares[0]
    else:
        rooms = [int(node.gpus) // shares[0] for node in nodes]
        enough = sum(min(room, 1) if spread else room for room in rooms) >= len(shares)
    if enough:
        return 1.0, ["gpus_per_worker: 1"]
    has_some = any(node.gpus for node in nodes)
    why = "the nodes do not have one for each" if has_some else "the nodes have no GPUs"
    return 0.0, [f"gpus_per_worker: 0 ({why})"]


def _first_fit(
    nodes: Sequence[NodeFacts], bundles: Sequence[Bundle], *, spread: bool
) -> tuple[list[tuple[NodeFacts, Bundle]], list[Bundle]]:
    """Put each bundle on the first node with room. Return (node, bundle) pairs, and the bundles left over.

    `spread`: no two bundles on one node.
    """
    seated: list[tuple[NodeFacts, Bundle]] = []
    left: list[Bundle] = []
    for bundle in bundles:
        for node in nodes:
            held = [other for host, other in seated if host is node]
            if not (spread and held) and _room(*_left(node, held), bundle):
                seated.append((node, bundle))
                break
        else:
            left.append(bundle)
    return seated, left

"""Why a job has too few nodes, and with which other settings it could start now: each is tried by packing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from raylaunch.core.job.job import Job
from raylaunch.core.placement.packing import NodeFacts, Packing, pack
from raylaunch.core.text import count

Number = TypeVar("Number", int, float)

_MOST_SHARING = 64
"""Bundles on one node that are considered."""


def missing_gpus(nodes: Sequence[NodeFacts], packing: Packing) -> str:
    """Return that the job needs GPUs where no node has any; "" if that is not so."""
    needs = any(bundle.gpus for bundle in packing.bundles[: packing.min_nodes])
    return "the job needs GPUs, and no node of the cluster has any" if needs and not _have_gpus(nodes) else ""


def too_few_nodes(nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool) -> str:
    """Return that each node of the job must be another one than there are; "" if that is not so."""
    if not spread or not 0 < len(nodes) < packing.min_nodes:
        return ""
    have = "there is 1" if len(nodes) == 1 else f"there are {len(nodes)}"
    return f"{count(packing.min_nodes, 'different Ray node')} are needed, and {have}"


def remedies(job: Job, nodes: Sequence[NodeFacts], packing: Packing, *, spread: bool, local: bool) -> Iterator[str]:
    """Yield changes of the job, as written on the command line, each of which would let it start now.

    Each setting gets the value that is nearest to the job's. No change takes its GPUs away.
    """
    if not nodes or missing_gpus(nodes, packing):
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


def _most(values: Collection[Number], helps: Callable[[Number], bool]) -> Number | None:
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

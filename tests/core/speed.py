"""How many events a second the machine takes with thousands of nodes: `PYTHONPATH=. python -m tests.core.speed`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from story import begun, checkpointed, failed, finished, job, joined, lost, started, stopped, tick

from raylaunch.core.events import Event
from raylaunch.core.machine import Machine

NODES = 10_000
WORLDS = ("losses while running, with a spare each",)
"""Flows in which every event leads to a world of all nodes."""


def names(number: int = NODES, first: int = 0) -> list[str]:
    return [f"node-{index}" for index in range(first, first + number)]


def arrive(nodes: Sequence[str], at: float = 1.0, *, sizes: Sequence[int] = (2,)) -> list[Event]:
    return [joined(node, at, nproc=sizes[index % len(sizes)]) for index, node in enumerate(nodes)]


def up(**settings: object) -> Machine:
    """A machine whose first attempt runs on all nodes."""
    machine = begun(job(**({"nnodes": NODES, "max_restarts": 9} | settings)))
    for event in [*arrive(names()), *(started(node, 2.0) for node in names())]:
        machine.handle(event)
    return machine


def asked_to_save() -> Machine:
    machine = up(nnodes=f"1:{NODES + 1}")
    machine.handle(joined("another", 5.0))
    return machine


def stopping() -> Machine:
    machine = up(max_restarts=0)
    machine.handle(failed("node-0", 5.0))
    return machine


def flows() -> Iterator[tuple[str, Machine, list[Event]]]:
    """What happens, the machine it happens to, and its events."""
    few = f"1:{2 * NODES}"
    yield "joins while gathering", begun(job(NODES)), arrive(names())
    yield "joins while gathering, elastic", begun(job(few)), arrive(names())
    mixed = {"sizes": (2, 3, 4)}
    yield "joins, multiple of 8, three sizes", begun(job(few, multiple_of=8)), arrive(names(), **mixed)
    gathering = begun(job(few))
    for event in arrive(names()):
        gathering.handle(event)
    yield "losses while gathering", gathering, [lost(node, 2.0) for node in names(2_000)]
    machine = begun(job(NODES))
    for event in arrive(names()):
        machine.handle(event)
    yield "started", machine, [started(node, 2.0) for node in names()]
    yield "finished", up(), [finished(node, 9.0) for node in names()]
    yield "stopped", stopping(), [stopped(node, 9.0) for node in names()]
    yield "saved", asked_to_save(), [checkpointed(node, 6.0) for node in names()]
    spares = arrive(names(NODES, NODES), 9.0)
    running = begun(job(f"1:{3 * NODES}"))
    for event in arrive(names()):
        running.handle(event)
    running.handle(tick(6.0))
    for node in names():
        running.handle(started(node, 2.0))
    yield "joins while running, below MAX", running, spares
    yield "joins while running, at MAX", up(), spares
    yield WORLDS[0], _with_spares(), [lost(node, 9.0) for node in names(20)]


def _with_spares() -> Machine:
    machine = up(spares=20)
    for event in arrive(names(20, NODES), 9.0):
        machine.handle(event)
    return machine


def seconds(machine: Machine, events: Sequence[Event], clock: Callable[[], float] = time.process_time) -> float:
    gc.collect()
    began = clock()
    for event in events:
        machine.handle(event)
    return clock() - began


if __name__ == "__main__":
    for what, machine, events in flows():
        rate = len(events) / max(seconds(machine, events), 1e-9)
        print(f"{what:42} {len(events):6} events  {rate:10,.0f} a second")

"""Measure how many events per second the machine handles with 10,000 nodes: `PYTHONPATH=. python -m tests.core.speed`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from machine_helpers import checkpointed, failed, finished, gathering_machine, job, joined, lost, started, stopped, tick

from raylaunch.core.machine.events_and_actions import Event
from raylaunch.core.machine.machine import Machine

NODES = 10_000
WORLDS = ("losses while running, with a spare each",)
"""Flows in which each event launches another attempt on all nodes."""


def names(number: int = NODES, first: int = 0) -> list[str]:
    return [f"node-{index}" for index in range(first, first + number)]


def joins(nodes: Sequence[str], at: float = 1.0, *, sizes: Sequence[int] = (2,)) -> list[Event]:
    return [joined(node, at, nproc=sizes[index % len(sizes)]) for index, node in enumerate(nodes)]


def running_on_all(**settings: object) -> Machine:
    """Return a machine whose first attempt runs on all nodes."""
    machine = gathering_machine(job(**({"nnodes": NODES, "max_restarts": 9} | settings)))
    for event in [*joins(names()), *(started(node, 2.0) for node in names())]:
        machine.handle(event)
    return machine


def saving_machine() -> Machine:
    """Return a machine that waits for the checkpoints of all nodes."""
    machine = running_on_all(nnodes=f"1:{NODES + 1}")
    machine.handle(joined("another", 5.0))
    return machine


def stopping_machine() -> Machine:
    """Return a machine that waits for all nodes to stop."""
    machine = running_on_all(max_restarts=0)
    machine.handle(failed("node-0", 5.0))
    return machine


def flows() -> Iterator[tuple[str, Machine, list[Event]]]:
    """Yield the name of each flow, a machine, and the events to handle."""
    few = f"1:{2 * NODES}"
    yield "joins while gathering", gathering_machine(job(NODES)), joins(names())
    yield "joins while gathering, elastic", gathering_machine(job(few)), joins(names())
    mixed = {"sizes": (2, 3, 4)}
    yield "joins, multiple of 8, three sizes", gathering_machine(job(few, multiple_of=8)), joins(names(), **mixed)
    gathering = gathering_machine(job(few))
    for event in joins(names()):
        gathering.handle(event)
    yield "losses while gathering", gathering, [lost(node, 2.0) for node in names(2_000)]
    machine = gathering_machine(job(NODES))
    for event in joins(names()):
        machine.handle(event)
    yield "started", machine, [started(node, 2.0) for node in names()]
    yield "finished", running_on_all(), [finished(node, 9.0) for node in names()]
    yield "stopped", stopping_machine(), [stopped(node, 9.0) for node in names()]
    yield "saved", saving_machine(), [checkpointed(node, 6.0) for node in names()]
    spares = joins(names(NODES, NODES), 9.0)
    running = gathering_machine(job(f"1:{3 * NODES}"))
    for event in joins(names()):
        running.handle(event)
    running.handle(tick(6.0))
    for node in names():
        running.handle(started(node, 2.0))
    yield "joins while running, below MAX", running, spares
    yield "joins while running, at MAX", running_on_all(), spares
    yield WORLDS[0], _running_with_spares(), [lost(node, 9.0) for node in names(20)]


def _running_with_spares() -> Machine:
    """Return a machine whose attempt runs on all nodes, with 20 spare nodes."""
    machine = running_on_all(spares=20)
    for event in joins(names(20, NODES), 9.0):
        machine.handle(event)
    return machine


def seconds(machine: Machine, events: Sequence[Event], clock: Callable[[], float] = time.process_time) -> float:
    """Return the CPU seconds in which the machine handles these events."""
    gc.collect()
    began = clock()
    for event in events:
        machine.handle(event)
    return clock() - began


if __name__ == "__main__":
    for what, machine, events in flows():
        rate = len(events) / max(seconds(machine, events), 1e-9)
        print(f"{what:42} {len(events):6} events  {rate:10,.0f} a second")

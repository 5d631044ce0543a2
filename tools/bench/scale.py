"""From a worker's failure until the last of 1,000 agents (8,000 ranks) has its order to launch the next attempt.

On a private Ray cluster, by the real driver and fleet; the agents are played by four actors (`driven.py`, `crowd.py`),
so what Ray takes in the driver is real, and so is what it takes on the agents' side, which shares this machine's CPUs
here and has a machine for each agent elsewhere. Then the same with agents in the driver's own process: what is left
is the driver. Then the machine alone, with 10,000 nodes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import Any

from tests.core import speed
from tests.private_cluster import Cluster, end_marked
from tools.bench import figures, processes
from tools.bench.contenders import RAYLAUNCH, access
from tools.bench.figures import Bench, Detail, Figure, Goal, Outcome
from tools.bench.processes import BenchError

_SECONDS = 150.0
_LEAST_RATE = 20_000.0

Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    agents: int = 1000
    faults: int = 20
    steady: float = 8.0
    """Seconds in which the driver is looked at while all is well."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """There is nobody to compare with: neither torchrun nor Ray Train has a driver that can be fed like this."""
    on_ray = _driven(scratch / "scale-on-ray", size, access(cluster), cluster.address)
    alone = _driven(scratch / "scale-alone", size, {}, "")
    rates = {what: len(events) / speed.seconds(machine, events) for what, machine, events in speed.flows()}
    return Outcome(
        figures=(*_latencies(on_ray, alone), *_costs(on_ray, size), _events(rates)),
        details=(_spread(on_ray, alone, size), _margins(on_ray), _flows(rates)),
        more={
            "scale": {"agents": size.agents, "rates": rates, "steady": on_ray["steady"], "margins": on_ray["margins"]}
        },
    )


def _driven(folder: Path, size: Size, extra: dict[str, str], address: str) -> Found:
    folder.mkdir()
    mark, log = token_hex(8), folder / "log.txt"
    numbers = (str(size.agents), str(size.faults), str(size.steady))
    command = [sys.executable, "-m", "tools.bench.driven", str(folder), *numbers, address]
    root = Path(__file__).resolve().parents[2]
    try:
        ended = processes.start(command, mark, extra, root, log)
        processes.wait_until(lambda: ended.poll() is not None, seconds=_SECONDS)
    finally:
        end_marked(mark)
    result = folder / "scale.json"
    found: Found = json.loads(result.read_text()) if result.exists() else {"error": "it did not end"}
    if "error" in found or found["lost"]:
        why = found.get("error") or f"{found['lost']} nodes were lost: is the machine busy with something else?"
        raise BenchError(f"{why}\n{log.read_text()[-1500:]}")
    return found


def _latencies(on_ray: Found, alone: Found) -> tuple[Figure, ...]:
    what = figures.first_line(__doc__)
    running = "... until the driver knows that all their workers have started."
    return (
        _figure("scale", what, "s", _last(on_ray), figures.worst_at_most(1.0)),
        _figure("  all started", running, "s", [fault["running"] for fault in on_ray["faults"]]),
        _figure("  driver alone", "the same without Ray.", "s", _last(alone), figures.worst_at_most(1.0)),
    )


def _costs(on_ray: Found, size: Size) -> tuple[Figure, ...]:
    most = [float(fault["most"]) for fault in on_ray["faults"]]
    steady = f"CPU seconds of the driver's process, Ray included, a second: {size.agents} agents beat, {size.agents * 8} ranks step."
    return (
        _figure("  messages", "to one node in one restart, at the most.", "orders", most, figures.worst_at_most(1.0)),
        _figure("  driver's CPU", steady, "s/s", [on_ray["steady"]["cpu"]]),
        _figure("  memory", "what the driver's process grows by, for each agent.", "MB", [on_ray["memory_per_node"]]),
    )


def _events(rates: dict[str, float]) -> Figure:
    """A loss in a world that runs is a new world: what counts there are its orders."""
    what = f"events a second that the machine takes, with {speed.NODES} nodes; where one leads to a world, its orders."
    goal = Goal(words=">= 20,000", bound=_LEAST_RATE, value=lambda figure: figure.worst(RAYLAUNCH), is_floor=True)
    samples = [rate * (speed.NODES if what in speed.WORLDS else 1) for what, rate in rates.items()]
    return _figure("  machine", what, "1/s", samples, goal, more_is_better=True)


def _figure(
    name: str, what: str, unit: str, samples: Sequence[float], *goals: Goal, more_is_better: bool = False
) -> Figure:
    return Figure(
        name=name,
        what=what,
        unit=unit,
        samples={RAYLAUNCH: tuple(samples)},
        goals=goals,
        more_is_better=more_is_better,
    )


def _last(found: Found) -> list[float]:
    return [fault["launched"][-1] for fault in found["faults"]]


def _spread(on_ray: Found, alone: Found, size: Size) -> Detail:
    """Over all agents and faults."""
    rows = {
        "a worker is killed": on_ray["faults"],
        "... and all others fail 5 ms later": on_ray["storms"],
        "a worker is killed, without Ray": alone["faults"],
    }
    return Detail(
        title=f"from the failure to the order, {size.agents} agents, seconds:",
        columns=("", "p50", "p99", "worst", "all started"),
        rows=tuple((words, *_quantiles(faults)) for words, faults in rows.items()),
    )


def _quantiles(faults: list[Found]) -> tuple[str, ...]:
    times = sorted(time for fault in faults for time in fault["launched"])
    chosen = (times[int((len(times) - 1) * part)] for part in (0.5, 0.99, 1.0))
    return (*(f"{time:.3f}" for time in chosen), f"{median(fault['running'] for fault in faults):.3f}")


def _margins(on_ray: Found) -> Detail:
    rows = ((what, f"{one['silent']:.2f}", f"{one['lease']:.2f}") for what, one in on_ray["margins"].items())
    return Detail(
        title="how near an agent came to being lost, seconds (5 s of silence; a lease of 4.5 s):",
        columns=("the driver", "longest silence", "least left of a lease"),
        rows=tuple(rows),
    )


def _flows(rates: dict[str, float]) -> Detail:
    return Detail(
        title=f"the machine, {speed.NODES} nodes, events a second:",
        columns=("", "events"),
        rows=tuple((what, f"{rate:,.0f}") for what, rate in rates.items()),
    )


BENCH = Bench(measure=measure, full=Size(), smoke=Size(agents=20, faults=4, steady=0.5))

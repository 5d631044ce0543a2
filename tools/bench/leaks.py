"""What the processes of a run hold after 50, 500 and 1,000 restarts in a row: descriptors, watches, threads, memory.

One node with two workers. Each attempt prints to both streams, then one worker is killed or raises an exception. First
without Ray, where the agent is in the driver's process; then on a Ray cluster, with 10, 50 and 100 restarts. Memory is
the anonymous pages (`Anonymous` in smaps_rollup), which do not depend on who else has a page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.private_cluster import Cluster, marked
from tools.bench import figures, launches, processes
from tools.bench.contenders import RAYLAUNCH, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.launches import Launch
from tools.bench.processes import Held

_SECONDS_EACH = 2.0
_SCRIPT = Path(__file__).with_name("leaker.py")
_MOST_KB, _MOST_KB_ON_RAY = 1.0, 10.0
"""For each restart. After a few restarts, one page more counts as much as a leak would after many."""
_RENEWED = ("store",)
"""Forks of the fork server that are renewed: they have what it has."""
_NAMES = ("descriptors", "watches", "threads")

Sample = dict[str, Held]
"""What the processes hold, by their name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    stops: tuple[int, ...] = (50, 500, 1000)
    stops_on_ray: tuple[int, ...] = (10, 50, 100)
    """Restarts after which the processes are looked at."""
    settle: float = 4.0
    """Seconds: the zygote is renewed within seconds after a restart."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """There is nobody to compare with: torchrun's agents do not restart a thousand times in these minutes."""
    alone = _samples(new_folder(scratch, RAYLAUNCH), size.stops, "none", size.settle, {})
    on_ray = _samples(new_folder(scratch, RAYLAUNCH), size.stops_on_ray, cluster.address, size.settle, access(cluster))
    return Outcome(
        figures=(
            *_figures(
                "leaks",
                f"descriptors, watches and threads that came since restart {size.stops[0]}.",
                alone,
                size.stops,
                _MOST_KB,
            ),
            *_figures(
                "leaks on Ray",
                f"the same since restart {size.stops_on_ray[0]}.",
                on_ray,
                size.stops_on_ray,
                _MOST_KB_ON_RAY,
            ),
        ),
        details=(_detail("without Ray", alone, size.stops), _detail("on a Ray cluster", on_ray, size.stops_on_ray)),
    )


def _samples(folder: Path, stops: Sequence[int], address: str, settle: float, extra: dict[str, str]) -> list[Sample]:
    settings = {"max_restarts": stops[-1], "exclude_after": 0, "show": "all", "ray": {"address": address}}
    job = launches.job(folder, _SCRIPT, str(folder), *map(str, stops), workers=2, **settings)
    found: list[Sample] = []
    with launches.started([*launches.COMMAND, str(job)], folder, extra=extra) as launch:
        for before, stop in zip((-30, *stops), stops, strict=False):
            launch.wait_for(f"there-{stop}", seconds=_SECONDS_EACH * (stop - before))
            time.sleep(settle)
            found.append(_sample(launch))
            (folder / f"go-{stop}").touch()
        launch.wait(30.0)
    return found


def _sample(launch: Launch) -> Sample:
    """What all of the run's processes hold, but not its workers, which are others in each attempt."""
    agents = launch.agents()
    named = {pid: _name(pid) for pid in marked(launch.mark)}
    named |= {launch.process.pid: "driver", **dict.fromkeys(agents, "agent")}
    found: Sample = {}
    for pid, name in named.items():
        if name:
            found[name] = found.get(name, Held()) + processes.held(pid)
    return found


def _name(pid: int) -> str:
    """Return what a process is; "": a worker, or a process that the script has started."""
    name = processes.command_name(pid)
    return name.removeprefix("rl:") if name.startswith("rl:") else ""


def _figures(name: str, what: str, found: Sequence[Sample], stops: Sequence[int], most_kb: float) -> tuple[Figure, ...]:
    total = [sum(sample.values(), Held()) for sample in found]
    lasting = [sum((held for of, held in sample.items() if of not in _RENEWED), Held()) for sample in found]
    more = sum(max(0, getattr(total[-1], kind) - getattr(total[0], kind)) for kind in _NAMES)
    return (
        Figure(
            name=name,
            what=what,
            unit="more",
            samples={RAYLAUNCH: (float(more),)},
            goals=(figures.median_at_most(0.0),),
        ),
        Figure(
            name=f"  {name}: memory",
            what="kB for each restart, of the processes that are not renewed, in the second half of these restarts.",
            unit="kB",
            samples={RAYLAUNCH: (_slope(lasting, stops),)},
            goals=(figures.median_at_most(most_kb),),
        ),
    )


def _slope(found: Sequence[Held], stops: Sequence[int]) -> float:
    return (found[-1].kilobytes - found[-2].kilobytes) / (stops[-1] - stops[-2])


def _detail(where: str, found: Sequence[Sample], stops: Sequence[int]) -> Detail:
    rows = []
    for name in dict.fromkeys(name for sample in found for name in sample):
        held = [sample.get(name, Held()) for sample in found]
        counts = [" ".join(str(getattr(one, kind)) for one in held) for kind in ("processes", *_NAMES)]
        memory = " ".join(f"{one.kilobytes / 1000:.1f}" for one in held)
        rows.append((name, *counts, memory, f"{_slope(held, stops):.2f}"))
    return Detail(
        title=f"{where}, after {', '.join(map(str, stops))} restarts:",
        columns=("", "processes", *_NAMES, "MB", "kB each"),
        rows=tuple(rows),
    )


BENCH = Bench(measure=measure, full=Size(), smoke=Size(stops=(1, 3, 5), stops_on_ray=(1, 2, 3), settle=0.5))

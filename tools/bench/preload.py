"""What the default of `preload` costs and saves with the torch at hand, against `preload: [torch, torch.distributed]`.

With the default, the fork server also imports the compiler of torch, which DDP and every optimizer import. One node
without a cluster; a script without an optimizer, and one with DDP and an optimizer, with either setting in turn:

start     from the start of the command until all of 2 ranks have passed: their first `all_reduce`, or optimizer step
CPU       of all processes of that job together, from the start to the end of the command
restart   from the SIGKILL of a rank that has trained for 3 s until all of 2 ranks have passed again
memory    PSS of all processes, with 8 ranks that have passed and are idle
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.private_cluster import Cluster, marked
from tools.bench import contenders, processes, starts
from tools.bench.contenders import DDP_SCRIPT, SCRIPT, Started, Task
from tools.bench.figures import Bench, Detail, Outcome

_SETTINGS = {"auto": "auto", "[torch, torch.distributed]": ["torch", "torch.distributed"]}
_OPTIONS = ("--width", "64")
_SECONDS = 120.0
_COLUMNS = ("start, s", "CPU, s", "restart, s", "memory, MB")

Sample = tuple[float, ...]
"""One number for each column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    scripts: Mapping[str, Path] = field(
        default_factory=lambda: {"without an optimizer": SCRIPT, "with DDP and an optimizer": DDP_SCRIPT}
    )
    rounds: int = 2
    workers: int = 8
    """Whose memory is looked at."""
    seconds: float = 3.0
    """Of training before a rank is killed, and before memory is looked at."""


def measure(_: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run each script with each setting in turn."""
    found: dict[tuple[str, str], list[Sample]] = {(script, name): [] for script in size.scripts for name in _SETTINGS}
    for _ in range(size.rounds):
        for (script, name), samples in found.items():
            start = partial(_start, scratch, size, size.scripts[script], _SETTINGS[name])
            samples.append((*_first_start(start), _restart(start), _memory(start, size)))
    rows = tuple(
        (f"{script}, preload: {name}", *map("{:.2f}".format, map(statistics.median, zip(*samples, strict=True))))
        for (script, name), samples in found.items()
    )
    title = f"a script, by what is imported ahead (medians of {size.rounds}):"
    return Outcome(
        figures=(),
        details=(Detail(title=title, columns=("", *_COLUMNS), rows=rows),),
        more={"samples": {f"{script}, {name}": samples for (script, name), samples in found.items()}},
    )


def _start(
    scratch: Path, size: Size, script: Path, preload: object, *, workers: int = 2, deaths: int = 0, stay: bool = False
) -> AbstractContextManager[Started]:
    task = Task(
        agents=1, workers=workers, deaths=deaths, stay=stay, first=size.seconds, script=script, options=_OPTIONS
    )
    return contenders.raylaunch_alone(scratch, task, settings={"preload": preload})


def _first_start(start: partial[AbstractContextManager[Started]]) -> tuple[float, float]:
    before = _cpu_of_children()
    with start() as started:
        passed = starts.times(started)["passed"]
    return passed, _cpu_of_children() - before


def _cpu_of_children() -> float:
    """Seconds of all processes that have ended, and for which their parents have waited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _restart(start: partial[AbstractContextManager[Started]]) -> float:
    with start(deaths=1) as started:
        if not all(started.wait_for(generation, _SECONDS) for generation in (0, 1)):
            raise started.complaint("it did not restart")
        death = started.death(0)
        assert death is not None
        passed = started.times(1, since=death)["passed"]
        _end(started)
    return passed


def _memory(start: partial[AbstractContextManager[Started]], size: Size) -> float:
    with start(workers=size.workers, stay=True) as started:
        if not started.wait_for(0, _SECONDS):
            raise started.complaint("it did not start")
        time.sleep(size.seconds)
        found = processes.memory(marked(started.mark)).pss
        (started.folder / "leave").touch()
        _end(started)
    return found


def _end(started: Started) -> None:
    if started.wait_for_end() != [0]:
        raise started.complaint("it did not end well")


BENCH = Bench(
    measure=measure,
    full=Size(),
    smoke=Size(scripts={"without an optimizer": SCRIPT}, rounds=1, workers=2, seconds=0.2),
    needs_cluster=False,
)

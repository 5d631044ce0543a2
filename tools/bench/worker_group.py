"""Calls of a `WorkerGroup` with four ranks, beside `ray.get` of calls of four bare actors on the same node, in turn.

First without arguments, then with one object of 100 MB, of which each rank reads each page. Then four ranks read a dataset
of 100 MB, in turn with four workers of Ray Train. Then rank 1 of 2 x 2 dies in a
call with `retry=True`: a DDP model of 10 MB, 100 MB of `State` on each rank, and the other ranks stay; beside it, Ray Train
v2 builds its workers again, of a script without a model. Last, a group of 2 x 2 is started, in turn with `launch`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, launches, restart, tables
from tools.bench.contenders import RAY_TRAIN, RAYLAUNCH, Task, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome, Samples

ACTORS, LAUNCH = "bare actors", "launch"
_SCRIPT = Path(__file__).with_name("group_caller.py")
_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How often each is measured."""

    calls: int = 300
    objects: int = 20
    megabytes: int = 100
    deaths: int = 30
    starts: int = 4
    readers: int = 3
    epochs: int = 5
    """Of a dataset, by each group that reads it."""
    of_ray_train: int = 1
    """Deaths that Ray Train is to survive."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the program, and Ray Train."""
    folder = new_folder(scratch, "group")
    command = [sys.executable, str(_SCRIPT), str(folder), json.dumps(dataclasses.asdict(size))]
    extra = access(cluster) | {"RAY_ADDRESS": cluster.address}
    with launches.started(command, folder, extra=extra) as launch:
        launch.wait(_SECONDS)
    found = json.loads((folder / "found.json").read_text())
    deaths: dict[str, Samples] = {name: tuple(times) for name, times in found["death"].items()}
    if size.of_ray_train:
        task = Task(agents=2, workers=2, deaths=size.of_ray_train, first=3.0)
        deaths[RAY_TRAIN] = restart.samples([restart.ray_train(cluster, scratch, task)])
    parts = (
        Figure(
            name="call without arguments",
            what="From a call of four ranks until all have answered.",
            unit="ms",
            samples={name: tuple(1000 * each for each in times) for name, times in found["call"].items()},
            goals=(figures.more_at_most(2, ACTORS),),
        ),
        Figure(
            name=f"call with {size.megabytes} MB",
            what="The same with one ObjectRef, which four ranks of a node get.",
            unit="s",
            samples={name: tuple(times) for name, times in found["object"].items()},
            goals=(figures.ratio(1, ACTORS),),
        ),
        Figure(
            name=f"epoch of {size.megabytes} MB",
            what="From the begin of an epoch of a dataset of Ray Data until four ranks have read their parts.",
            unit="s",
            samples={name: tuple(times) for name, times in found["data"].items()},
            goals=(figures.ratio(1.11, RAY_TRAIN),),
        ),
        Figure(
            name="call in which a rank dies",
            what="From the SIGKILL of a rank of 2 x 2 in a call with `retry=True` until all have answered it.",
            unit="s",
            samples=deaths,
            goals=(figures.worst_at_most(0.5),),
        ),
        Figure(
            name="start, 2 x 2",
            what="Until all ranks of a new group can be called.",
            unit="s",
            samples={name: tuple(times) for name, times in found["start"].items()},
            goals=(figures.ratio(1.2, LAUNCH),),
        ),
    )
    return Outcome(figures=parts, details=(_beside(parts),), more={"times": found})


def _beside(parts: tuple[Figure, ...]) -> Detail:
    """What the table has no column for."""
    names = (RAYLAUNCH, ACTORS, LAUNCH)
    cells = [[part.median(name) for name in names] for part in parts]
    return Detail(
        title="worker-group, medians:",
        columns=("", *names),
        rows=tuple(
            (f"{part.name}, {part.unit}", *("-" if value is None else tables.number(value) for value in row))
            for part, row in zip(parts, cells, strict=True)
        ),
    )


BENCH = Bench(
    measure=measure,
    full=Size(),
    smoke=Size(calls=3, objects=1, megabytes=8, deaths=1, starts=2, readers=1, epochs=1, of_ray_train=0),
)

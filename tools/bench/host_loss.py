"""A host is lost: from the driver's notice until all ranks have made a step from the copies that other hosts have.

3 hosts of network namespaces, of which two have a node with 2 workers each, and one has a spare node. The state is 100
MB per rank; ranks meet in an `all_reduce` of gloo in each step. A node's host, not the driver's, is killed.
All hosts are on this machine, so copies between them go through its memory and share its CPUs with the workers. The
cost of the copies is measured against the same steps after they are turned off by a limit of memory that does not suffice.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from raylaunch.core.machine.events_and_actions import NodeJoined, NodeLost, WorkersStarted
from tests.hosts.host import why_not
from tests.hosts.hosts import Hosts, inside
from tests.private_cluster import Cluster
from tools.bench import event_log, figures, launches, processes
from tools.bench.contenders import RAYLAUNCH, new_folder
from tools.bench.event_log import EventLog
from tools.bench.figures import Bench, Detail, Figure, Outcome

_SCRIPT = Path(__file__).with_name("keeper.py")
_SECONDS = 180.0
_STATIONS = {
    "launched": "the driver orders the next attempt",
    "started": "all workers are forked",
    "restored": "all ranks have their part of the commit",
    "step": "all ranks have made a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    losses: int = 3
    megabytes: int = 100
    """Of state, of each rank."""
    warm_steps: int = 150


class _Run:
    """A run on the hosts, and what its workers have noted."""

    def __init__(self, hosts: Hosts, folder: Path, megabytes: int, **settings: Any) -> None:
        self.folder = folder
        job = launches.job(
            folder,
            _SCRIPT,
            str(folder),
            str(megabytes),
            workers=2,
            nnodes=2,
            spares=1,
            placement="spread",
            cpus_per_worker=0.5,
            exclude_after=0,
            **settings,
        )
        self.out = (folder / "out.txt").open("wb")
        command = [sys.executable, "-m", "raylaunch", str(job)]
        self.process = hosts.popen(
            hosts.head, command, cwd=folder, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.out
        )

    def log(self) -> EventLog:
        """What the driver has seen and done."""
        return event_log.read(next(iter(self.folder.glob("**/events.jsonl")), None))

    def notes(self) -> list[tuple[int, int, str, float, str]]:
        """Attempt, rank, step (or `restored`), time and host."""
        rows = [
            line.split() for path in self.folder.glob("note.*") for line in path.read_text().splitlines(keepends=True)
        ]
        return [(int(row[0]), int(row[1]), row[2], float(row[3]), row[4]) for row in rows if len(row) == 5]

    def attempt(self) -> int:
        return max((note[0] for note in self.notes()), default=0)

    def at(self, attempt: int, what: str) -> float:
        """When the last rank noted this for the first time."""
        first: dict[int, float] = {}
        for number, rank, step, at, _ in self.notes():
            if number == attempt and (step == what or (what == "step" and step != "restored")):
                first[rank] = min(at, first.get(rank, at))
        return max(first.values()) if len(first) == 4 else 0.0

    def steps(self, attempt: int) -> int:
        return len([note for note in self.notes() if note[0] == attempt and note[1] == 0])

    def end(self) -> None:
        """End it as a person does: not `nsenter`, which has started it, and which would leave it to itself."""
        os.kill(inside(self.process), signal.SIGTERM)
        self.process.wait(_SECONDS)

    def wait(self, condition: Any) -> None:
        processes.wait_until(lambda: condition() or self.process.poll() is not None, seconds=_SECONDS)
        if not condition():
            self.out.flush()
            raise processes.BenchError(
                f"what was waited for did not come:\n{(self.folder / 'out.txt').read_text()[-3000:]}"
            )


def measure(_: Cluster, scratch: Path, size: Size) -> Outcome:
    """Lose one host after the other in one run, and measure steps in another one without copies."""
    if reason := why_not():
        return Outcome(figures=(_figure(f"not measured: {reason}"),))
    times: list[dict[str, float]] = []
    with Hosts(3) as hosts:
        run = _Run(hosts, new_folder(scratch, RAYLAUNCH), size.megabytes)
        while len(times) < size.losses:
            attempt = run.attempt()
            run.wait(
                lambda: (
                    len(run.log().events(NodeJoined)) == 3 + len(times) and run.steps(run.attempt()) > size.warm_steps
                )
            )
            attempt = run.attempt()
            names = {note[4] for note in run.notes() if note[0] == attempt}
            victim = next(host for host in hosts.hosts[1:] if host.name in names)
            if not times:
                with_copies = _step_seconds(run, attempt)
            hosts.kill(victim)
            run.wait(lambda: run.attempt() > attempt and run.at(run.attempt(), "step"))  # noqa: B023
            times.append(_times(run, run.attempt()))
            hosts.remove(victim)
            if len(times) < size.losses:
                hosts.add()
        run.end()
        lost = re.findall(r"(\d+) more steps? had no copy", (run.folder / "out.txt").read_text())
        # Enough for four buffers, and not for the twelve that copies need.
        too_little_gib = 9e-3 * size.megabytes
        plain = _Run(hosts, new_folder(scratch, "without-copies"), size.megabytes, state_memory=too_little_gib)
        plain.wait(lambda: plain.steps(1) > size.warm_steps)
        without = _step_seconds(plain, 1)
        plain.end()
    costs = Detail(
        title="host-loss, steps of two hosts on one machine:",
        columns=("", "median step, ms"),
        rows=(("with copies", f"{1000 * with_copies:.1f}"), ("without", f"{1000 * without:.1f}")),
    )
    return Outcome(
        figures=(_figure(tuple(one["step"] for one in times)),),
        details=(
            figures.stations("host-loss, seconds after the driver's notice", _STATIONS, {RAYLAUNCH: times}),
            costs,
        ),
        notes=(f"steps that had no copy: {', '.join(lost) or 'none'}",),
        more={"host_losses": times, "step_with_copies": with_copies, "step_without_copies": without},
    )


def _figure(samples: figures.Samples) -> Figure:
    what = figures.first_line(__doc__)
    return Figure(
        name="host-loss", what=what, unit="s", samples={RAYLAUNCH: samples}, goals=(figures.median_at_most(1.0),)
    )


def _step_seconds(run: _Run, attempt: int) -> float:
    """The median of the steps of rank 0 after the first ones."""
    times = sorted(note[3] for note in run.notes() if note[:2] == (attempt, 0) and note[2] != "restored")[20:]
    return statistics.median(after - before for before, after in pairwise(times))


def _times(run: _Run, attempt: int) -> dict[str, float]:
    log = run.log()
    noticed = log.events(NodeLost)[-1][0]
    started = max(at for at, event in log.events(WorkersStarted) if event.attempt == attempt)
    found = {"launched": log.launched(attempt), "started": started}
    found |= {"restored": run.at(attempt, "restored"), "step": run.at(attempt, "step")}
    return {name: at - noticed for name, at in found.items()}


BENCH = Bench(measure=measure, full=Size(), smoke=Size(losses=1, megabytes=10, warm_steps=25), needs_cluster=False)

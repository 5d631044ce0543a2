"""The real driver with agents that are none: `python -m tools.bench.driven FOLDER AGENTS FAULTS SECONDS [ADDRESS]`.

Driver, machine, orders, run folder and console are as in a run. With the address of a Ray cluster so are the fleet
and the calls to actors, each of which plays many agents; only the agents' places are made up. Without one, agents
answer in the driver's own process, which shows what the driver itself takes. SECONDS: how long it is looked at while all is well. What was measured is in `scale.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray

from raylaunch.cli.output.console import Console
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet import ray_fleet
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet_api import Fleet, Item, ReportReceived, Tell
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import NodeLost
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import SIGTERM
from raylaunch.core.placement.plan import Bundle, Plan
from raylaunch.core.record.journal import JournalEntry
from raylaunch.node.protocol.node_goal import LaunchWorkers, Order, StopWorkers
from raylaunch.node.protocol.node_spec import AgentSpec
from tests.fakes import FakeFleet
from tools.bench.crowd import Crowds, Room, Told

NPROC = 8
_ACTORS = 4
_ADDRESS = "10.0.0.1"
_SETTLE_SECONDS = 1.0
_BUSY_SECONDS = 1.0
_RUN_SECONDS = 60.0
_MOST_FAULTS = 1000


class Agents(Protocol):
    """What the bench does with them."""

    @property
    def fleet(self) -> Fleet:
        """What the driver has of them."""

    def fail(self, node: str, attempt: int, *, storm: bool) -> float:
        """A worker on that node dies, at the time that is returned; in a `storm` all others follow, of all nodes."""

    def told(self) -> dict[str, Told]:
        """What each was told since it was last asked to forget."""

    def forget(self) -> None:
        """Count anew."""


class OnRay:
    """Actors that play them."""

    def __init__(self, job: Job, plan: Plan, run_dir: str, say: Callable[[str], None]) -> None:
        self.crowds = Crowds(_ACTORS, job.node_timeout, NPROC)
        replaced: Any = ray_fleet
        replaced.actor_class, replaced.PlacementGroups = lambda: self.crowds, Room
        self.fleet = RayFleet(plan, _settings(job, run_dir), say)
        self.told, self.forget = self.crowds.told, self.crowds.forget

    def fail(self, node: str, attempt: int, *, storm: bool) -> float:
        """On one of them; in a storm each of them hears of it."""
        failed = self.crowds.plays[node].fail.remote(node)
        if storm:
            for actor in self.crowds.actors:
                actor.echo.remote(node, attempt)
        at: float = ray.get(failed)
        return at


class Here(FakeFleet):
    """They answer at once, in the driver's own thread."""

    def __init__(self, agents: int) -> None:
        super().__init__(agents, NPROC, heartbeat_seconds=1.0)
        self.fleet = self
        self.on_launched = dict.fromkeys(range(_MOST_FAULTS), lambda: None)  # nobody finishes
        self._told: dict[str, Told] = {}

    def send(self, node: str, order: Order) -> None:
        if isinstance(order, LaunchWorkers):
            self._told[node] = Told(launched_at=time.monotonic(), sent=Counter({LaunchWorkers.__name__: 1}))
        super().send(node, order)

    def fail(self, node: str, _attempt: int, *, storm: bool) -> float:
        """There is no storm here."""
        assert not storm
        at = time.monotonic()
        super().fail(self._parts[node].base_rank)
        return at

    def told(self) -> dict[str, Told]:
        return self._told

    def forget(self) -> None:
        self._told = {}


class Seen(Console):
    """The console, which also notes when an attempt runs, and how many nodes were lost."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._running: dict[int, float] = {}
        self.lost = 0

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """One step of the machine."""
        super().on_entry(entry, machine)
        self.lost += isinstance(entry.event, NodeLost)
        if machine.phase is Phase.RUNNING and machine.attempt not in self._running:
            with self._changed:
                self._running[machine.attempt] = time.monotonic()
                self._changed.notify_all()

    def wait_for(self, attempt: int) -> float:
        """When it was known that all its workers run."""
        with self._changed:
            if not self._changed.wait_for(lambda: attempt in self._running, _RUN_SECONDS):
                msg = f"attempt {attempt} does not run; {self.lost} nodes were lost"
                raise TimeoutError(msg)
        return self._running[attempt]


class Gaps:
    """The longest time between two words of one agent, as the driver heard them."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.longest = 0.0
        self.words = 0

    def around(self, fleet: Fleet) -> None:
        """Hear what the driver hears."""
        start = fleet.start
        fleet.start = lambda tell: start(lambda item: self._heard(item, tell))  # type: ignore[method-assign]

    def _heard(self, item: Item, tell: Tell) -> None:
        if isinstance(item, ReportReceived):
            self.words += 1
            self.longest = max(self.longest, item.at - self._last.get(item.node, item.at))
            self._last[item.node] = item.at
        tell(item)


class Bench:
    """One run of the driver, and what is done to it from another thread."""

    def __init__(self, folder: Path, agents: int, address: str) -> None:
        self._job = Job(
            entrypoint=Entrypoint(script="train.py"),
            nnodes=agents,
            nproc_per_node=NPROC,
            max_restarts=_MOST_FAULTS,
            exclude_after=0,
            log_dir=str(folder),
        )
        plan = _plan(agents)
        run_folder = RunFolder.create(self._job, "scale", print)
        run_folder.open(self._job, "{}", plan, "2026-01-01T00:00:00+00:00", time.monotonic())
        self._rss = _rss()
        self._gaps, self._seen = Gaps(), Seen()
        self._on_ray = address != ""
        self._agents: Agents = (
            OnRay(self._job, plan, run_folder.where, self._seen.on_message) if address else Here(agents)
        )
        self._gaps.around(self._agents.fleet)
        self._nodes: list[str] = []
        self._attempt = 1
        self._driver = Driver(self._job, "scale", self._agents.fleet, run_folder, self._seen, time.monotonic())
        self._main = time.pthread_getcpuclockid(threading.get_ident())

    def run(self, faults: int, steady: float) -> dict[str, Any]:
        """Raises what went wrong."""
        found: dict[str, Any] = {}
        hands = threading.Thread(target=self._work, args=(found, faults, steady), daemon=True)
        hands.start()
        try:
            self._driver.run()
            hands.join()
        finally:  # else its thread goes on asking Ray, which starts another cluster for that
            self._agents.fleet.close()
        return found

    def _work(self, found: dict[str, Any], faults: int, steady: float) -> None:
        began = time.monotonic()
        try:
            found["all_up"] = self._seen.wait_for(1) - began
            time.sleep(_SETTLE_SECONDS)
            self._nodes = [*self._agents.told()]
            found["memory_per_node"] = (_rss() - self._rss) / len(self._nodes)
            found["faults"] = [self._fault(number) for number in range(faults)]
            if self._on_ray:
                found["steady"] = self._steady(steady)
                found["storms"] = [self._fault(number, storm=True) for number in range(faults // 4)]
                found["margins"] = {what: self._margin(act) for what, act in BUSY.items()}
            found["lost"] = self._seen.lost
        except Exception as error:
            found["error"] = repr(error)
        finally:
            self._driver.signalled(SIGTERM)
            self._driver.signalled(SIGTERM)

    def _steady(self, seconds: float) -> dict[str, float]:
        """What it costs that all is well: CPU seconds a second, of the process and of the driver's thread alone."""
        clocks: tuple[Callable[[], float], ...]
        clocks = time.monotonic, time.process_time, lambda: time.clock_gettime(self._main), lambda: self._gaps.words
        before = [clock() for clock in clocks]
        time.sleep(seconds)
        seconds, process, driver, words = (clock() - then for clock, then in zip(clocks, before, strict=True))
        return {"cpu": process / seconds, "driver": driver / seconds, "words": words / seconds}

    def _fault(self, number: int, *, storm: bool = False) -> dict[str, Any]:
        self._agents.forget()
        at = self._agents.fail(self._nodes[number * 7919 % len(self._nodes)], self._attempt, storm=storm)
        self._attempt += 1
        running = self._seen.wait_for(self._attempt) - at
        time.sleep(_SETTLE_SECONDS if self._on_ray else 0.0)
        told = self._agents.told()
        return {
            "launched": sorted(one.launched_at - at for one in told.values()),
            "running": running,
            "messages": sum((one.sent for one in told.values()), Counter()),
            "most": max(one.sent[LaunchWorkers.__name__] + one.sent[StopWorkers.__name__] for one in told.values()),
        }

    def _margin(self, act: Callable[[Bench], None]) -> dict[str, float]:
        """How near anybody came to being lost: to the driver, and by the lease."""
        self._agents.forget()
        self._gaps.longest = 0.0
        act(self)
        time.sleep(2 * _SETTLE_SECONDS)
        return {"silent": self._gaps.longest, "lease": min(one.least_lease for one in self._agents.told().values())}

    def hold(self) -> None:
        """No other thread of this process gets to run, as in a long collection of garbage."""
        until = time.monotonic() + _BUSY_SECONDS
        while time.monotonic() < until:
            sum(range(5_000_000))

    def restart(self) -> None:
        """With a storm."""
        self._fault(1, storm=True)


BUSY: dict[str, Callable[[Bench], None]] = {
    "at rest": lambda _: None,
    "while it is held for a second": Bench.hold,
    "in a restart with a storm": Bench.restart,
}


def _rss() -> float:
    """MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _plan(agents: int) -> Plan:
    return Plan(
        min_nodes=agents,
        max_nodes=agents,
        bundles=tuple(Bundle(nproc=NPROC, gpus=0, cpus=1) for _ in range(agents)),
        spread=True,
        seats=(),
        spares=(),
        skipped=(),
        assumed=(),
        warnings=(),
    )


def _settings(job: Job, run_dir: str) -> AgentSpec:
    return AgentSpec(
        job=replace(job, gpus_per_worker=0),
        run_dir=run_dir,
        address=_ADDRESS,
        submitter_env={},
        cwd="/",
        ray_address="",
    )


def main() -> None:
    """Print nothing but what a run prints."""
    folder, agents, faults, steady, *address = sys.argv[1:]
    if address[0]:
        ray.init(address=address[0], log_to_driver=False, logging_level="ERROR")
    found = Bench(Path(folder), int(agents), address[0]).run(int(faults), float(steady))
    Path(folder, "scale.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

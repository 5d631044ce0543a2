"""A deterministic training on four hosts, under faults at random moments, also while it recovers from another.

    python -m tests.chaos [--faults 60] [--seed 1] [--json FILE]

In the end: the final parameters are bit for bit those of a run without faults, no two worlds trained at one time, no
planned resize lost a step, nothing is left behind. Exit code 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from tests.chaos.check_steps import problems
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.job import Job, reference, wait_for
from tests.hosts.host import Host, why_not
from tests.hosts.hosts import Hosts

_PATIENCE = 180.0
"""Seconds until the job must train again, whatever happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault, and what came of it. Seconds; None: it came on top of another, or nothing was to come of it."""

    fault: str
    at: float
    attempt: int
    detected: float | None
    recovered: float | None
    on_top: bool


class Chaos:
    """The hosts, the job, and the faults so far."""

    def __init__(self, hosts: Hosts, job: Job, seed: int) -> None:
        self.hosts, self.job = hosts, job
        self.random = random.Random(seed)
        random.seed(seed)
        self.struck: list[Struck] = []
        self.complaints: list[str] = []

    def strike(self) -> None:
        """One fault at a random moment of a world that trains; now and then another before it has recovered."""
        if not self._trains():
            return
        time.sleep(self.random.uniform(0.1, 2.0))
        fault, host = self._choose(FAULTS)
        on_top = [each for each in FAULTS if not each[1].planned and not each[1].harmless]
        second = self._choose(on_top) if self.random.random() < 0.25 else None
        if second is not None and second[1] is host:
            second = None
        self._strike(fault, host, second)

    def _trains(self) -> bool:
        """Wait for a world with more than the head in it."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if self.job.process.poll() is not None:
                self.complaints.append(f"the job ended with exit code {self.job.process.returncode}")
                return False
            world = self.job.present()
            if world and world.trained and time.time() - world.ended / 1e9 < 1.0 and self._others():
                return True
            time.sleep(0.05)
        self.complaints.append(f"the job did not train within {_PATIENCE:.0f} s")
        return False

    def _others(self) -> list[Host]:
        """Hosts with workers, beside the head: that has the driver and Ray's own head."""
        return [host for host in self.hosts.hosts[1:] if self.job.runs_on(host)]

    def _choose(self, among: tuple[tuple[int, Fault], ...] | list[tuple[int, Fault]]) -> tuple[Fault, Host]:
        (fault,) = self.random.choices([fault for _, fault in among], [weight for weight, _ in among])
        return fault, self.random.choice(self._others() or [self.hosts.head])

    def _strike(self, fault: Fault, host: Host, second: tuple[Fault, Host] | None) -> None:
        began, attempt = time.time(), self.job.attempt
        kinds = fault.strike(self.job, host)
        done = [(fault, host)]
        if second is not None:
            time.sleep(self.random.uniform(0.0, 0.3))
            second[0].strike(self.job, second[1])
            done.append(second)
        detected = recovered = None
        if fault.harmless and second is None:
            time.sleep(2.0)
            if self.job.attempt != attempt and not self.job.events("NodeJoined", began - 30):
                self.complaints.append(f"{fault.name} was not harmless")
        else:
            world = wait_for(lambda: self.job.trains(beyond=attempt), _PATIENCE)
            if world is None:
                self.complaints.append(
                    f"after {' and '.join(f.name for f, _ in done)}: no world within {_PATIENCE:.0f} s"
                )
            else:
                recovered = world.trained / 1e9 - began
            told = [event["at"] - began for kind in kinds for event in self.job.events(kind, began)]
            detected = min(told, default=None)
        for each, where in done:
            each.mend(self.hosts, where)
        for index, (each, _) in enumerate(done):
            alone = second is None
            self.struck.append(
                Struck(
                    fault=each.name,
                    at=began,
                    attempt=attempt,
                    detected=detected if alone else None,
                    recovered=recovered if index == 0 else None,
                    on_top=not alone,
                )
            )
        print(self._line(done, detected, recovered), flush=True)

    def _line(self, done: list[tuple[Fault, Host]], detected: float | None, recovered: float | None) -> str:
        what = ", then ".join(f"{fault.name} ({host.name})" for fault, host in done)
        times = [f"noticed after {detected:.2f} s"] if detected is not None else []
        times += [f"trains again after {recovered:.2f} s"] if recovered is not None else []
        world = self.job.present()
        size = f"; world of {world.size}" if world else ""
        return f"{len(self.struck):4}  {what}: {', '.join(times) or 'nothing came of it'}{size}"

    # The end.

    def judge(self, scratch: Path) -> None:
        """Let the job finish, and hold it to what was promised."""
        code = self.job.finish() if self.job.process.poll() is None else self.job.process.returncode
        if code != 0:
            self.complaints.append(f"the job ended with exit code {code}")
            return
        worlds = self.job.worlds()
        self.complaints += problems(self.job.notes(), worlds[-1].last)
        self.complaints += [
            f"the planned end of attempt {before.attempt} after step {before.last}: step {after.first} is the next"
            for before, after in pairwise(worlds)
            if before.attempt in self.planned() and after.first != before.last + 1
        ]
        final = self.job.training / "final.bin"
        if final.read_bytes() != reference(scratch / "reference", worlds[-1].last).read_bytes():
            self.complaints.append("the final parameters are not those of a run without faults")
        left = wait_for(lambda: not self._left(), 100) or self._left()
        if left is not True:
            self.complaints.append(f"left behind: {left}")

    def planned(self) -> set[int]:
        """Attempts whose workers all saved as they were asked to, and were then stopped in peace."""
        saved: dict[int, set[str]] = {}
        for event in self.job.events("WorkersCheckpointed"):
            if event["step"] is not None:
                saved.setdefault(event["attempt"], set()).add(event["node"])
        rosters = {launch["attempt"]: set(launch["roster"]) for launch in self.job.actions("Launch")}
        return {attempt for attempt, nodes in saved.items() if nodes >= rosters[attempt]}

    def _left(self) -> list[str]:
        found = [process.command for host in self.hosts.hosts for process in self.job._ours(host)]
        return found + self.hosts.ask("left")


def table(chaos: Chaos) -> Iterator[str]:
    """Fault, how often, and how long it took: median and worst of those that came alone."""
    yield "| fault | times | noticed after, s: median (worst) | trains again after, s: median (worst) |"
    yield "|---|---|---|---|"
    for _, fault in FAULTS:
        mine = [each for each in chaos.struck if each.fault == fault.name]
        alone = [each for each in mine if not each.on_top]
        detected = [each.detected for each in alone if each.detected is not None]
        recovered = [each.recovered for each in alone if each.recovered is not None]
        yield f"| {fault.name} | {len(mine)} | {_spread(detected)} | {_spread(recovered)} |"
    pairs = [each.recovered for each in chaos.struck if each.on_top and each.recovered is not None]
    yield f"| two faults within 0.3 s | {len(pairs)} | | {_spread(pairs)} |"


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({max(times):.2f})" if times else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--json", type=Path, help="every fault and what came of it")
    parser.add_argument("--keep", type=Path, help="where the job's folder is kept if something is wrong")
    args = parser.parse_args()
    if reason := why_not():
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="rlc-") as name, Hosts(args.hosts, cpus=2) as hosts:
        scratch = Path(name)
        job = Job(hosts, scratch / "job")
        chaos = Chaos(hosts, job, args.seed)
        try:
            while len(chaos.struck) < args.faults and not chaos.complaints:
                chaos.strike()
            if job.process.poll() is None or not chaos.complaints:
                chaos.judge(scratch)
        finally:
            job.end()
        print()
        print("\n".join(table(chaos)))
        worlds = job.worlds()
        planned = [pair for pair in pairwise(worlds) if pair[0].attempt in chaos.planned()]
        print(f"\n{len(worlds)} worlds, {worlds[-1].last if worlds else 0} steps; {len(planned)} planned resizes")
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in chaos.struck], indent=1))
        if chaos.complaints:
            print(job.said()[-4000:], file=sys.stderr)
            if args.keep:
                shutil.copytree(job.folder, args.keep, dirs_exist_ok=True)
            print("\n".join(f"WRONG: {complaint}" for complaint in chaos.complaints))
            return 1
        print("all as promised")
        return 0


if __name__ == "__main__":
    sys.exit(main())

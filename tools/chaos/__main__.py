"""A deterministic training on four hosts, under faults at random moments, also while it recovers from another.

    python -m tools.chaos [--faults 60] [--minutes 30] [--seed 1] [--only "subreaper|disk"] [--state] [--elastic]
        [--detach]

In the end: the final parameters are bit for bit the same as without faults, no two attempts trained at one time, no
planned resize lost a step, only failures of workers spent restarts, the event log leads to the same decisions again,
and nothing is left behind on any host. With `--state` the job has no checkpoints, but `raylaunch.worker.State`: only
what a lost host had not copied yet is done again. With `--elastic` it commits as often as is cheap (`every="auto"`),
and workers stay when others die. With `--detach` the driver is an actor (`-d`), and it, its host and
the head's GCS are killed too. Exit code 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import head_storage
from tests.hosts.conftest import leavings
from tests.hosts.host import Host, why_not
from tests.hosts.hosts import Hosts
from tools.chaos import disk, verdict
from tools.chaos.check_steps import committed, problems
from tools.chaos.faults import FAULTS, OF_DETACHED, Fault, with_state
from tools.chaos.job import Job, reference, wait_for

_PATIENCE = 180.0
"""Seconds until the job must train again, whatever happened."""
_ON_TOP = 0.25
"""How many faults come with a second one, while the job recovers from the first."""


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

    def __init__(
        self, hosts: Hosts, folder: Path, seed: int, faults: list[tuple[int, Fault]], *args: str, detach: bool = False
    ) -> None:
        """`faults`: those to choose from, with their weights. `args`: `--state` or `--elastic`, or neither.

        `detach`: see `Job`.
        """
        self.hosts = hosts
        self._in_memory = bool(args)
        self._faults = faults
        self._before = self._leavings()
        self.job = Job(hosts, folder, *args, detach=detach)
        self.random = random.Random(seed)
        random.seed(seed)
        self.struck: list[Struck] = []
        self._blows: list[verdict.Blow] = []
        self.complaints: list[str] = []

    def strike(self) -> None:
        """One fault at a random moment of an attempt that trains; now and then another before it has recovered."""
        self._replace_lost_hosts()
        if not self._trains():
            return
        time.sleep(self.random.uniform(0.1, 2.0))
        fault = self._choose([fault for _, fault in self._faults], {each.fault for each in self.struck[-2:]})
        hosts = self._hosts_for(fault)
        if not hosts:
            return
        host = self.random.choice(hosts)
        second = None
        if not fault.harmless and self.random.random() < _ON_TOP:
            second = self._second(fault, host)
        self._strike(fault, host, second)

    def _replace_lost_hosts(self) -> None:
        """Replace hosts whose raylet has ended: one that Ray had counted as dead before its network was healed."""
        for host in [host for host in self.hosts.hosts[1:] if not self.hosts.processes(host, "raylet/raylet ")]:
            self.hosts.remove(host)
            self.hosts.add(wait=False)

    def _second(self, first: Fault, struck: Host) -> tuple[Fault, Host] | None:
        """Both befall one host only where that is still there after the first."""
        on_top = [fault for _, fault in self._faults if not fault.planned and not fault.harmless]
        if not on_top:
            return None
        fault = self._choose(on_top, {first.name})
        both = first.anywhere and fault.anywhere
        hosts = [host for host in self._hosts_for(fault) if both or host is not struck]
        return (fault, self.random.choice(hosts)) if hosts else None

    def _trains(self) -> bool:
        """Wait for an attempt with more than the head in it."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if self.job.process.poll() is not None:
                self.complaints.append(f"the job ended with exit code {self.job.process.returncode}")
                return False
            present = self.job.present()
            if present and present.trained and time.time() - present.ended / 1e9 < 1.0 and self._others():
                return True
            time.sleep(0.05)
        self.complaints.append(f"the job did not train within {_PATIENCE:.0f} s")
        return False

    def _others(self) -> list[Host]:
        """Hosts with workers, beside the head and the driver's host. None as long as there is no driver."""
        if (driver := self.job.driver) is None:
            return []
        return [host for host in self.hosts.hosts[1:] if self.job.runs_on(host) and host is not driver[1]]

    def _hosts_for(self, fault: Fault) -> list[Host]:
        if fault.on_driver:
            driver = self.job.driver
            return [driver[1]] if driver and driver[1] is not self.hosts.head and self.job.runs_on(driver[1]) else []
        if fault.needs_two and len(self._others()) < 2:
            return []
        head = [self.hosts.head] if fault.anywhere and self.job.runs_on(self.hosts.head) else []
        return head + self._others()

    def _choose(self, among: list[Fault], struck: set[str]) -> Fault:
        """None that was just struck: the same failure three times within a minute ends a run."""
        fresh = [fault for fault in among if fault.name not in struck] or among
        weights = {fault.name: weight for weight, fault in self._faults}
        (fault,) = self.random.choices(fresh, [weights[fault.name] for fault in fresh])
        return fault

    def _strike(self, fault: Fault, host: Host, second: tuple[Fault, Host] | None) -> None:
        began, attempt = time.time(), self.job.attempt
        self._note(fault, host)
        kinds = fault.strike(self.job, host)
        done = [(fault, host)]
        latest = began
        if second is not None:
            time.sleep(min(3.0, self.random.expovariate(4.0)))
            latest = time.time()
            self._note(*second)
            second[0].strike(self.job, second[1])
            done.append(second)
        detected = recovered = None
        if fault.harmless:
            time.sleep(2.0)
            if self.job.attempt != attempt and not self.job.asked(attempt) and not fault.spends:
                self.complaints.append(f"{fault.name} was not harmless")
        else:
            found = wait_for(lambda: self.job.trains(attempt, latest), _PATIENCE)
            if found is None:
                self.complaints.append(
                    f"after {' and '.join(f.name for f, _ in done)}: no attempt that trains within {_PATIENCE:.0f} s"
                )
            else:
                recovered = found.trained / 1e9 - began
            detected = min((event["at"] - began for event in self._told(kinds, began, host)), default=None)
        for each, where in done:
            each.mend(self.job, where)
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

    def _note(self, fault: Fault, host: Host) -> None:
        """Note that memory may be lost. What is cut off from one host may lead to the loss of another."""
        if fault.takes_memory:
            hosts = self.hosts.hosts if fault.needs_two else [host]
            self._blows += [verdict.Blow(at=time.time(), address=each.address) for each in hosts]

    def _told(self, kinds: tuple[str, ...], since: float, host: Host) -> Iterator[dict[str, Any]]:
        """What the driver heard of the fault itself, and not of what followed from it elsewhere."""
        nodes = self.job.nodes_on(host)
        for kind in kinds:
            yield from (event for event in self.job.events(kind, since) if event.get("node") in (None, *nodes))

    def _line(self, done: list[tuple[Fault, Host]], detected: float | None, recovered: float | None) -> str:
        what = ", then ".join(f"{fault.name} ({host.name})" for fault, host in done)
        times = [f"noticed after {detected:.2f} s"] if detected is not None else []
        times += [f"trains again after {recovered:.2f} s"] if recovered is not None else []
        present = self.job.present()
        size = f"; world of {present.size}" if present else ""
        return f"{len(self.struck):4}  {what}: {', '.join(times) or 'nothing came of it'}{size}"

    # The end.

    def judge(self, scratch: Path) -> None:
        """Let the job finish, and hold it to what was promised."""
        code = self.job.finish() if self.job.process.poll() is None else self.job.process.returncode
        if code != 0:
            self.complaints.append(f"the job ended with exit code {code}")
            return
        found = self.job.attempts()
        self.complaints += problems(self.job.notes(), found[-1].last)
        self.complaints += verdict.lost_steps(self.job.lines(), found, in_memory=self._in_memory)
        self.complaints += verdict.lost_commits(self.job.lines(), found, committed(self.job.training), self._blows)
        self.complaints += verdict.lost_copies(self.job.lines(), found, self._blows)
        spends = {fault.name: fault.spends for _, fault in self._faults}
        self.complaints += verdict.replayed(self.job.log, sum(spends[each.fault] for each in self.struck))
        final = self.job.training / "final.bin"
        if final.read_bytes() != reference(scratch / "reference", found[-1].last).read_bytes():
            self.complaints.append("the final parameters differ from a run without faults")
        left = wait_for(lambda: not self._left(), 100) or self._left()
        if left is not True:
            self.complaints.append(f"left behind: {left}")

    def _left(self) -> list[str]:
        found = [process.command for host in self.hosts.hosts for process in self.job.processes(host)]
        return found + self.hosts.ask("left") + sorted(self._leavings() - self._before)

    def _leavings(self) -> set[str]:
        """Shared memory, sockets and files of all hosts; numbers, which differ from host to host, are blanked."""
        found = [name for host in self.hosts.hosts for name in leavings(self.hosts, host)]
        return {
            re.sub(r"[0-9a-f]{8,}|\d+", "#", name) for name in found if "torchinductor" not in name
        }  # torch's cache


def table(chaos: Chaos) -> Iterator[str]:
    """Fault, how often, and how long it took: median and worst of those that came alone."""
    yield "| fault | times | noticed after, s: median (worst) | trains again after, s: median (worst) |"
    yield "|---|---|---|---|"
    for _, fault in (*FAULTS, *OF_DETACHED):
        mine = [each for each in chaos.struck if each.fault == fault.name]
        alone = [each for each in mine if not each.on_top]
        detected = [each.detected for each in alone if each.detected is not None]
        recovered = [each.recovered for each in alone if each.recovered is not None]
        yield f"| {fault.name} | {len(mine)} | {_spread(detected)} | {_spread(recovered)} |"
    pairs = [each.recovered for each in chaos.struck if each.on_top and each.recovered is not None]
    yield f"| two faults, the second while it recovers | {len(pairs)} | | {_spread(pairs)} |"


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({max(times):.2f})" if times else "-"


def summary(job: Job) -> str:
    """What there was, and what was done twice."""
    found = job.attempts()
    planned = verdict.planned_ends(job.lines()) & {one.attempt for one in found}
    commits = committed(job.training)
    again = sum(last - one.first + 1 for _, last, one in verdict.committed_again(found, commits))
    return (
        f"{len(found)} attempts, {found[-1].last if found else 0} steps; {len(planned)} planned resizes; "
        f"{sum(one.lost for one in found)} steps were done again"
    ) + (f", {again} of them committed" if commits else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no further fault after this many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--only", default="", help="choose among the faults whose names have this regular expression")
    parser.add_argument("--state", action="store_true", help="the job has its state in memory only, by `State`")
    parser.add_argument("--elastic", action="store_true", help="as --state, with `every='auto'` and workers that stay")
    parser.add_argument("--detach", action="store_true", help="the driver is an actor, and is killed too")
    parser.add_argument("--smoke", action="store_true", help="one fault on two hosts, to see that this works")
    parser.add_argument("--json", type=Path, help="every fault and what came of it")
    parser.add_argument("--keep", type=Path, help="where the job's folder is copied in the end")
    args = parser.parse_args()
    if args.smoke:
        args.faults, args.hosts, args.only = 1, 2, args.only or "^kill -9 of a worker$"
    return args


def main() -> int:
    args = _options()
    if reason := why_not():
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return 0
    faults = []
    for weight, fault in (*FAULTS, *(OF_DETACHED if args.detach else ())):
        if re.search(args.only, fault.name):
            if reason := fault.why_not():
                print(f"without `{fault.name}`: {reason}")
            else:
                faults.append((weight, with_state(fault) if args.state or args.elastic else fault))
    with (
        tempfile.TemporaryDirectory(prefix="rlc-") as name,
        disk.mounted(Path(name)) as where,  # before there are hosts, which have mounts of their own
        Hosts(args.hosts, cpus=2, storage=args.detach and not head_storage.why_not()) as hosts,
    ):
        scratch = Path(name)
        options = [option for option in ("--state", "--elastic") if getattr(args, option[2:])]
        chaos = Chaos(hosts, where / "job", args.seed, faults, *options, detach=args.detach)
        job = chaos.job
        began = time.monotonic()
        try:
            until = began + 60 * args.minutes
            while len(chaos.struck) < args.faults and not chaos.complaints and time.monotonic() < until:
                chaos.strike()
            if job.process.poll() is None or not chaos.complaints:
                chaos.judge(scratch)
        finally:
            job.end()
        print()
        print("\n".join(table(chaos)))
        print(f"\n{len(chaos.struck)} faults; {summary(job)}; {time.monotonic() - began:.0f} s")
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in chaos.struck], indent=1))
        if args.keep:
            shutil.copytree(job.folder, args.keep, dirs_exist_ok=True)
        if chaos.complaints:
            print(job.said()[-4000:], file=sys.stderr)
            print("\n".join(f"WRONG: {complaint}" for complaint in chaos.complaints))
            return 1
        print("all as promised")
        return 0


if __name__ == "__main__":
    sys.exit(main())

"""What may befall a job: each fault with how it is brought about, how the driver notices it, and how it is undone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.job import Job, wait_for
from tests.hosts.host import Host
from tests.hosts.hosts import Hosts


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` gives the kinds of events that tell of it; `mend` brings the hosts back to what they were."""

    name: str
    strike: Callable[[Job, Host], tuple[str, ...]]
    mend: Callable[[Hosts, Host], None] = lambda hosts, host: None
    planned: bool = False
    """The world had time to save: no step may be lost."""
    harmless: bool = False
    """Nothing must come of it."""
    spends: bool = False
    """A restart is spent."""


def _kill(
    pids: Callable[[Job, Host], list[int]], number: int = signal.SIGKILL
) -> Callable[[Job, Host], tuple[str, ...]]:
    def strike(job: Job, host: Host) -> tuple[str, ...]:
        found = pids(job, host)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(found), number)
        return ("WorkersHung",) if number == signal.SIGSTOP else ("WorkersExited", "NodeLost")

    return strike


def _kill_host(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.kill(host)
    return ("NodeLost",)


def _power_off(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.power_off(host)
    return ("NodeLost",)


def _cut(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.cut(host)
    return ("NodeLost",)


def _blip(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.cut(host)
    time.sleep(1.0)
    job.hosts.heal(host)
    return ()


def _pause(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.pause(host)
    return ("NodeLost",)


def _drain(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.wait_for(host)
    job.hosts.drain(host, 30.0)
    return ("NodeDraining",)


def _sigterm(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.sigterm(host)
    return ("NodeDraining",)


def _kill_raylet(job: Job, host: Host) -> tuple[str, ...]:
    job.hosts.kill_raylet(host)
    return ("NodeLost",)


def _replace(hosts: Hosts, host: Host) -> None:
    hosts.remove(host)
    hosts.add(wait=False)


def _replace_drained(hosts: Hosts, host: Host) -> None:
    wait_for(lambda: not [p for p in hosts.processes(host) if "ray::Agent" in p.command], 20)
    _replace(hosts, host)


def _resume(hosts: Hosts, host: Host) -> None:
    hosts.resume(host)


def _heal(hosts: Hosts, host: Host) -> None:
    hosts.heal(host)


FAULTS: tuple[tuple[int, Fault], ...] = (
    (6, Fault("kill -9 of a worker", _kill(Job.workers), spends=True)),
    (2, Fault("SIGSTOP of a worker", _kill(Job.workers, signal.SIGSTOP), spends=True)),
    (2, Fault("kill -9 of a fork server", _kill(Job.fork_servers), spends=True)),
    (1, Fault("kill -9 of a keeper", _kill(Job.keepers), spends=True)),
    (3, Fault("kill -9 of an agent", _kill(Job.agents))),
    (2, Fault("kill -9 of all of a host", _kill_host, _replace)),
    (1, Fault("power off", _power_off, _replace)),
    (2, Fault("network cut, healed after", _cut, _heal)),
    (2, Fault("network cut for 1 s", _blip, harmless=True)),
    (2, Fault("all of a host stopped, resumed after", _pause, _resume)),
    (2, Fault("drain notice", _drain, _replace_drained, planned=True)),
    (1, Fault("SIGTERM of `ray start --block`", _sigterm, _replace_drained, planned=True)),
    (1, Fault("kill -9 of a raylet", _kill_raylet, _replace)),
)
"""With how often each comes."""

"""The faults that a job may suffer: how each is caused, how the driver notices it, and how it is undone."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raylaunch.node.state.inheritance import KEEP_SECONDS
from tests import head_storage
from tests.hosts.host import Host, send
from tests.hosts.hosts import Hosts, inside
from tools.chaos import disk
from tools.chaos.job import Job, wait_for
from tools.chaos.network_faults import cut_one_way, flood

Kinds = tuple[str, ...]
_NO_EVENT = ()
_KILL_STORE = "kill -9 of a store"


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` causes the fault and returns the kinds of events that report it; `mend` restores the hosts."""

    name: str
    strike: Callable[[Job, Host], Kinds]
    mend: Callable[[Job, Host], None] = lambda job, host: None
    planned: bool = False
    """The workers have time to save: no step may be lost."""
    harmless: bool = False
    """It need not end an attempt, and may not if it spends no restart."""
    takes_memory: bool = False
    """Commits that were not copied from the host yet may be lost."""
    on_driver: bool = False
    """It comes on the host of the driver, if that is not the head and has workers."""
    spends: int = 0
    """So many restarts it may use up."""
    anywhere: bool = False
    """It may come on the head too, where the driver and Ray's head node run."""
    needs_two: bool = False
    """It needs two hosts with workers beside the head."""
    why_not: Callable[[], str] = lambda: ""
    """Returns why it cannot be caused on this machine; `""`: it can."""


def _signal(
    pids: Callable[[Job, Host], list[int]],
    number: int = signal.SIGKILL,
    *,
    told: Kinds = ("WorkersExited", "NodeLost"),
    all_of_them: bool = False,
) -> Callable[[Job, Host], Kinds]:
    def strike(job: Job, host: Host) -> Kinds:
        found = wait_for(lambda: pids(job, host), 5.0)
        send(found if all_of_them or not found else [random.choice(found)], number)
        return told

    return strike


def _go_on(pids: Callable[[Job, Host], list[int]]) -> Callable[[Job, Host], None]:
    return lambda job, host: send(pids(job, host), signal.SIGCONT)


def _to_host(do: Callable[[Hosts, Host], None], told: Kinds = ("NodeLost",)) -> Callable[[Job, Host], Kinds]:
    def strike(job: Job, host: Host) -> Kinds:
        do(job.hosts, host)
        return told

    return strike


def _blip(job: Job, host: Host) -> Kinds:
    job.hosts.cut(host)
    time.sleep(1.0)
    job.hosts.heal(host)
    return _NO_EVENT


def _bad_link(job: Job, host: Host) -> Kinds:
    job.hosts.slow(host, 20, jitter=20, loss=0.02)
    return _NO_EVENT


def _mute(job: Job, host: Host) -> Kinds:
    job.hosts.cut(host, to=job.hosts.head)
    return ("NodeLost",)


def _drain(job: Job, host: Host) -> Kinds:
    job.hosts.wait_for(host)
    job.hosts.drain(host, 30.0)
    return ("NodeDraining",)


def _drain_ignoring_sigterm(job: Job, host: Host) -> Kinds:
    """From then on one of its workers ignores SIGTERM: see train.py."""
    _signal(Job.workers, signal.SIGUSR1)(job, host)
    return _drain(job, host)


def _no_space(job: Job, host: Host) -> Kinds:
    """From then on writes of one worker to files fail, as on a full disk: its script raises OSError."""
    found = job.workers(host)
    if found:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(random.choice(found), resource.RLIMIT_FSIZE, (0, 0))
    return ("WorkersExited",)


def _stop_driver_briefly(job: Job, host: Host) -> Kinds:
    found = wait_for(lambda: job.driver, 20.0)
    pid = found[0] if found else inside(job.process)
    send([pid], signal.SIGSTOP)
    time.sleep(2.0)
    send([pid, job.process.pid], signal.SIGCONT)  # `nsenter` stops itself when what it started stops
    return _NO_EVENT


def _kill_driver(job: Job, host: Host) -> Kinds:
    if found := wait_for(lambda: job.driver, 20.0):
        send([found[0]], signal.SIGKILL)
    return _NO_EVENT


def _kill_gcs(job: Job, host: Host) -> Kinds:
    """All agents are there first: Ray forgets one that it was about to start, and the next comes two minutes later."""
    wait_for(lambda: all(job.agents(each) for each in job.hosts.hosts), 30.0)
    gcs = job.hosts.gcs()
    gcs.kill()
    time.sleep(random.uniform(0.0, 3.0))
    job.hosts.restart_gcs(gcs)
    return _NO_EVENT


def _lost_helper(name: str, pids: Callable[[Job, Host], list[int]]) -> Fault:
    return Fault(name, _signal(pids, told=_NO_EVENT), harmless=True, anywhere=True)


def with_state(fault: Fault) -> Fault:
    """Return the fault as it is for a job with `State`, whose ranks use the attempt's store at each commit."""
    return replace(fault, spends=1) if fault.name == _KILL_STORE else fault


def _replace(job: Job, host: Host) -> None:
    job.hosts.remove(host)
    job.hosts.add(wait=False)


def _replace_drained(job: Job, host: Host) -> None:
    """As autoscalers do: another host comes, and this one goes when nothing of the run is left there.

    What is left may be parts of a commit, for the case that nobody could take a copy. They are kept for a minute.
    """
    job.hosts.add(wait=False)
    wait_for(lambda: not job.agents(host) and not job.processes(host), KEEP_SECONDS + 1)
    job.hosts.remove(host)


def _heal(job: Job, host: Host) -> None:
    job.hosts.heal(host)


OF_DETACHED: tuple[tuple[int, Fault], ...] = (
    (8, Fault("kill -9 of the driver", _kill_driver, harmless=True)),
    (3, Fault("kill -9 of all of the driver's host", _to_host(Hosts.kill), _replace, on_driver=True)),
    (3, Fault("kill -9 of the GCS, started again", _kill_gcs, harmless=True, why_not=head_storage.why_not)),
)
"""Further ones of a job whose driver is an actor."""

FAULTS: tuple[tuple[int, Fault], ...] = (
    (5, Fault("kill -9 of a worker", _signal(Job.workers), spends=1, anywhere=True)),
    (1, Fault("kill -9 of all workers of a host", _signal(Job.workers, all_of_them=True), spends=1, anywhere=True)),
    (1, Fault("kill -9 of a data loader", _signal(Job.loaders), spends=1, anywhere=True)),
    (1, Fault("no room for a worker's files", _no_space, spends=1, anywhere=True)),
    (1, Fault("a worker exits 0 too early", _signal(Job.workers, signal.SIGUSR2), spends=1, anywhere=True)),
    (
        2,
        Fault(
            "SIGSTOP of a worker",
            _signal(Job.workers, signal.SIGSTOP, told=("WorkersHung",)),
            spends=1,
            anywhere=True,
        ),
    ),
    (2, Fault("kill -9 of a fork server", _signal(Job.fork_servers), spends=1, anywhere=True)),
    (
        1,
        Fault(
            "SIGSTOP of a fork server, continued after",
            _signal(Job.fork_servers, signal.SIGSTOP, told=_NO_EVENT),
            _go_on(Job.fork_servers),
            harmless=True,
            anywhere=True,
        ),
    ),
    (3, _lost_helper(_KILL_STORE, Job.stores)),
    (1, _lost_helper("kill -9 of a zygote", Job.zygotes)),
    (
        1,
        Fault(
            "a disk that stands still for 2 s",
            disk.stalled_disk,
            harmless=True,
            anywhere=True,
            why_not=disk.why_no_stall,
        ),
    ),
    (1, Fault("kill -9 of a subreaper", _signal(Job.subreapers), spends=1, anywhere=True)),
    (3, Fault("kill -9 of an agent", _signal(Job.agents), anywhere=True)),
    (
        1,
        Fault(
            "SIGSTOP of an agent, continued after",
            _signal(Job.agents, signal.SIGSTOP),
            _go_on(Job.agents),
            takes_memory=True,
        ),
    ),
    (1, Fault("SIGSTOP of the driver for 2 s", _stop_driver_briefly, harmless=True)),
    (2, Fault("kill -9 of all of a host", _to_host(Hosts.kill), _replace, takes_memory=True)),
    (1, Fault("power off", _to_host(Hosts.power_off), _replace, takes_memory=True)),
    (2, Fault("network cut, healed after", _to_host(Hosts.cut), _heal, takes_memory=True)),
    (1, Fault("network cut on the way to the head", _mute, _heal, takes_memory=True)),
    (
        1,
        Fault(
            "network cut from one host to another, healed after",
            cut_one_way,
            _heal,
            spends=1,
            needs_two=True,
            takes_memory=True,
        ),
    ),
    (1, Fault("a flood of strangers at all ports", flood, harmless=True, anywhere=True)),
    (1, Fault("network cut for 1 s", _blip, harmless=True)),
    (
        1,
        Fault("slow network that loses packets", _bad_link, lambda job, host: job.hosts.quick(host), harmless=True),
    ),
    (
        2,
        Fault(
            "all of a host stopped, resumed after",
            _to_host(Hosts.pause),
            lambda job, host: job.hosts.resume(host),
            takes_memory=True,
        ),
    ),
    (2, Fault("drain notice", _drain, _replace_drained, planned=True)),
    (1, Fault("drain notice, a worker ignores SIGTERM", _drain_ignoring_sigterm, _replace_drained, planned=True)),
    (
        1,
        Fault(
            "SIGTERM of `ray start --block`",
            _to_host(Hosts.sigterm, ("NodeDraining",)),
            _replace_drained,
            planned=True,
        ),
    ),
    (1, Fault("kill -9 of a raylet", _to_host(Hosts.kill_raylet), _replace, takes_memory=True)),
)
"""Each fault with its weight: how often it is chosen."""

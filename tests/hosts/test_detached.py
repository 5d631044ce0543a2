"""Detached runs whose driver's host is killed: another driver takes over on another host."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.hosts.host import Host, send
from tests.hosts.steps import hosts_by_rank, never_two_worlds
from tests.warm_command import WarmCommand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture
def detached(launcher, hosts, tmp_path):
    """Start a run in the background, and return it with one who is attached at the head in the place of its driver."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def command(*arguments):
        return WarmCommand(
            hosts.warm, "raylaunch", *arguments, env=hosts.env(**state), cwd=tmp_path, beside=hosts.head.init
        )

    def start(**job):
        run = launcher.start(more=state, detach=True, **job)
        assert run.wait().code == 0, run.err
        run.code, run.entered = -1, command("attach")
        run.driver = run.entered.pid
        return run

    yield start
    command("stop", "-y", "--now").wait()


@dataclass(frozen=True, slots=True)
class Driver:
    pid: int
    host: Host


def driver(hosts) -> Driver:
    """Return the driver that there is, or will be."""
    found: list[Driver] = []

    def is_there() -> bool:
        for host in hosts.hosts:
            for word in ("ray::raylaunch: driver", "ray::DriverActor"):
                found.extend(Driver(process.pid, host) for process in hosts.processes(host, word))
        return bool(found)

    wait_until(is_there, 100, "a driver")
    return found[0]


def log(run) -> str:
    (path,) = run.folder.glob("runs/*/latest/driver.log")
    return path.read_text()


def takeovers(run) -> list[str]:
    return re.findall(r"driver (\d+) has taken over", log(run))


@pytest.mark.parametrize("fault", ["kill"])
def test_another_driver_takes_over_when_the_host_of_the_driver_is_lost(fault, detached, hosts):
    """Attempts and spent restarts go on. A driver that comes back can command nothing, and ends."""
    run = detached(nnodes="2:3", max_restarts=1, node_timeout=3)
    first = run.wait_for_world(3)
    send([run.workers(hosts.head)[0].pid], signal.SIGKILL)  # a node that is lost soon would explain its own failure
    first = run.wait_for_world(3, after=first)
    while (found := driver(hosts)).host is hosts.head:  # Ray starts it on any host, and this one has to stay
        send([found.pid], signal.SIGKILL)
        wait_until(lambda found=found: driver(hosts).pid != found.pid, 100, "another driver")
    wait_until(lambda: "runs" in log(run), 100, "it to be in command")
    known, lost = len(takeovers(run)), found.host
    getattr(hosts, fault)(lost)
    hosts.ask("bury", lost.node_id)  # Ray itself takes half a minute to notice that a host is gone
    run.wait_for(lambda: len(takeovers(run)) > known, 100, name="another driver")
    second = run.wait_for_world(2, after=first)
    assert lost.name not in hosts_by_rank(run, second)
    hosts.heal(lost)
    hosts.resume(lost)
    wait_until(lambda: not Path(f"/proc/{found.pid}").exists(), 100, "the old driver to end")
    assert never_two_worlds(run)
    left = next(host for host in hosts.hosts if host.name == hosts_by_rank(run, second)[0])
    send([run.workers(left)[0].pid], signal.SIGKILL)  # the only restart was spent before
    assert run.wait().code == 1, run.err

"""Detached runs whose driver's host is killed or cut off: another driver takes over on another host."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from raylaunch.core.record import journal
from tests.cluster.conftest import wait_until
from tests.hosts.conftest import STEPS
from tests.hosts.host import Host, send
from tests.hosts.steps import copied, hosts_by_rank, never_two_worlds
from tests.hosts.test_fast_dir import SAVES, folders, next_world, steps_of
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


def is_kept(run) -> bool:
    """Return whether agents keep the ledger of the driver in command, which tells on which host it is.

    They do when it has entered another event than its takeover. Without that ledger, the next driver cannot know that this
    one was on a host that was killed, and waits for a minute and a half for the nodes there.
    """
    events = [line["event"] for line in run.journal()[1:] if line["event"]]
    drivers = [event["driver"] for event in events if event["is"] == "DriverReplaced"]
    return drivers[-1:] == [*map(int, takeovers(run))][-1:] and events[-1]["is"] != "DriverReplaced"


TALKING = STEPS.replace(
    "        log.write(", "        sys.stdout.write(f'{attempt} {rank} {step}\\n')\n        log.write("
)
"""Each rank also prints the number of each step, with one write: `print` makes several, and a kill may come between."""


def said(run, attempt: int) -> list[int]:
    """Return the steps of rank 0 in an attempt that one who is attached has seen."""
    lines = [line.split()[-3:] for line in run.out.splitlines()]
    return [int(line[2]) for line in lines if line[:2] == [str(attempt), "0"]]


def check_files(run) -> None:
    """The journal and the result are those of the last driver, and the output has no line twice and no gap."""
    (path,) = run.folder.glob("runs/*/latest/events.jsonl")
    lines = path.read_text().splitlines()
    job, entries = journal.read(lines)
    assert journal.replay(job, [entry.event for entry in entries if entry.event is not None]) == entries
    assert len(entries) == len(lines) - 1
    assert json.loads(lines[0])["epoch"] == int(takeovers(run)[-1])
    assert (run.result["exit_code"], run.result["takeovers"]) == (1, len(run.events("DriverReplaced")))
    assert (path.parent / "report.html").exists()
    last = max(step.attempt for step in run.steps())
    for attempt in range(1, last + 1):
        seen = said(run, attempt)
        assert seen == [*range(seen[0], seen[0] + len(seen))] if seen else attempt < last
    log = (path.parent / f"attempt-{last}" / "rank-0" / "stdout.log").read_text()
    assert said(run, last)[-1] == int(log.split()[-1])


@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_another_driver_takes_over_when_the_host_of_the_driver_is_lost(fault, detached, hosts):
    """Attempts and spent restarts go on. A driver that comes back can command nothing, writes nothing, and ends.

    One that stood still does so in tests/cluster/takeover.
    """
    # No other node may be lost: after its loss, a failure that follows soon spends no restart.
    run = detached(text=TALKING, nnodes="2:3", max_restarts=1, node_timeout=10)
    first = run.wait_for_world(3)
    send([run.workers(hosts.head)[0].pid], signal.SIGKILL)  # a node that is lost soon would explain its own failure
    first = run.wait_for_world(3, after=first)
    while (found := driver(hosts)).host is hosts.head:  # Ray starts it on any host, and this one has to stay
        before = len(takeovers(run))
        send([found.pid], signal.SIGKILL)
        wait_until(lambda before=before: len(takeovers(run)) > before, 100, "another driver to be in command")
    run.wait_for(lambda: is_kept(run), name="the ledger of the driver to be kept")
    known, lost = len(takeovers(run)), found.host
    getattr(hosts, fault)(lost)
    hosts.ask("bury", lost.node_id)  # Ray itself takes half a minute to notice that a host is gone
    run.wait_for(lambda: len(takeovers(run)) > known, 100, name="another driver")
    second = run.wait_for_world(2, after=first)
    assert lost.name not in hosts_by_rank(run, second)
    hosts.heal(lost)
    wait_until(lambda: not Path(f"/proc/{found.pid}").exists(), 100, "the old driver to end")
    assert never_two_worlds(run)
    left = next(host for host in hosts.hosts if host.name == hosts_by_rank(run, second)[0])
    send([run.workers(left)[0].pid], signal.SIGKILL)  # the only restart was spent before
    assert run.wait().code == 1, run.err
    check_files(run)


def test_files_in_memory_outlive_the_driver_and_go_with_the_run(detached, hosts):
    """The next driver knows where copies are to go, before and after workers are restarted, and who may need them."""
    run = detached(text=SAVES, nnodes="2:3", max_restarts=10)

    def copied_step(attempt: int) -> int:
        """Return a step that has just been done; since then each node has saved a later one and copied it."""
        done = max(max(steps) for steps in steps_of(run, attempt).values())
        nodes = [run.nodes_on(host)[-1] for host in hosts.hosts]
        run.wait_for(lambda: all(copied(hosts, node, "snapshot") > done for node in nodes), name="copies")
        return done

    attempt = run.wait_for_world(3)
    copied_step(attempt)
    send([driver(hosts).pid], signal.SIGKILL)
    run.wait_for(lambda: takeovers(run), 100, name="another driver")
    done = copied_step(attempt)
    send([process.pid for host in hosts.hosts for process in run.workers(host)], signal.SIGKILL)
    attempt, _ = next_world(run, 3, attempt, done)
    done = copied_step(attempt)
    lost = next(host for host in hosts.hosts if host is not hosts.head and host is not driver(hosts).host)
    hosts.kill(lost)
    hosts.ask("bury", lost.node_id)  # Ray itself takes half a minute to notice that a host is gone
    next_world(run, 2, attempt, done)
    (run.folder / "enough").touch()
    assert run.wait().code == 0, run.err
    wait_until(lambda: not any(folders(hosts, host) for host in hosts.hosts), 100, "the folders to be removed")

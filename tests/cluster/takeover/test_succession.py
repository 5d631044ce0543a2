"""Drivers of a detached run that are killed, or stopped and replaced: training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import DriverReplaced
from raylaunch.core.record import journal
from raylaunch.node.linux import procfs
from tests.cluster.conftest import Launcher, wait_until
from tests.private_cluster import marked, private_cluster
from tests.warm_command import WarmCommand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SCRIPT = """
import itertools, os, signal, time
from pathlib import Path
import raylaunch.worker as launch
rank, attempt, saved = os.environ["RANK"], os.environ["RAYLAUNCH_ATTEMPT"], Path("saved")

def held(name):
    while Path(f"hold-{name}").exists():
        time.sleep(0.01)

def leave(*_):
    held("stopping")
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
for step in itertools.count(int(saved.read_text()) + 1 if saved.exists() else 0):
    print(attempt, rank, step, os.getpid(), flush=True)
    if os.path.exists("end"):
        break
    time.sleep(0.02)
    if launch.should_checkpoint(step):
        held("saving")
        if rank == "0":
            saved.write_text(str(step))
        launch.checkpointed(step)
"""
SECOND = """
import ray
from raylaunch.cluster.detached.driver_actor import DriverActor
from raylaunch.cluster import named_resources
from ray._private.worker import global_worker
ray.init(log_to_driver=False, logging_level="ERROR")
(first,) = [one for one in ray.util.list_named_actors(all_namespaces=True) if "driver" in one["name"]]
name, job = first["name"], ray.get_actor(**first)._actor_id.job_id
own = global_worker.gcs_client.get_all_job_info()[job].config.ray_namespace
ray.shutdown()
ray.init(log_to_driver=False, logging_level="ERROR", namespace=own)

class SecondDriver(DriverActor):
    def __init__(self):
        super().__init__(600.0, takes_over=True)

actor = ray.remote(SecondDriver).options(name=name, namespace="second", lifetime="detached", num_cpus=0).remote()
ray.get(actor.news.remote(0))
"""
"""Starts another driver, in the namespace of the first one's job: only there are the placement groups of the run found."""

END = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
for one in ray.util.list_named_actors(all_namespaces=True):
    if "raylaunch-driver" in one["name"]:
        ray.kill(ray.get_actor(**one))
"""
"""Ends drivers for good: Ray starts none in their place."""


class Detached:
    """A run with `-d` on two nodes, and its driver's process."""

    def __init__(self, launcher, *flags, **job):
        script = launcher.script(SCRIPT)
        job = {"entrypoint": {"script": script}, "nnodes": 2, "placement": "pack", "preload": []} | job
        (launcher.folder / "job.yaml").write_text(json.dumps(job | {"node_timeout": 60}))
        self.launcher = launcher
        self.env = {"XDG_STATE_HOME": str(launcher.folder / "state")}
        started = launcher.python("raylaunch", "-d", *flags, "job.yaml", env=self.env)
        assert started.returncode == 0, started.stderr
        self.id = started.stdout.splitlines()[0]
        self.folder = launcher.folder / "runs" / "train" / self.id
        self.kills = 0
        self._killed = -1

    @property
    def driver(self) -> int:
        """The process of the present driver, which may not be there yet, and is not the one that was killed last."""
        found: list[int] = []

        def is_there() -> bool:
            for pid in marked(self.launcher.cluster.mark):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if (b"ray::raylaunch: driver" in line or b"ray::DriverActor" in line) and pid != self._killed:
                        found.append(pid)
            return bool(found)

        wait_until(is_there, 100, "a driver")
        return found[0]

    def kill(self) -> None:
        """Kill the driver that there is, or will be, and no other than the last time."""
        self._killed = self.driver
        os.kill(self._killed, signal.SIGKILL)
        self.kills += 1

    def kill_in(self, phase: str) -> None:
        """Kill the driver when the run is in this phase, in which its workers hold it; then let them go."""
        wait_until(lambda: self.is_in(phase), 100, phase)
        self.kill()
        self.until_taken_over()
        (self.launcher.folder / f"hold-{phase}").unlink()

    def is_in(self, phase: str) -> bool:
        """Whether the last entry of the journal that tells of a phase is of this one."""
        begins = {"saving": "RequestCheckpoint", "stopping": "Stop", "starting": "Launch", "done": "Finish"}
        actions = [each["is"] for line in self.journal() for each in line["actions"]]
        return [each for each in actions if each in begins.values()][-1:] == [begins[phase]]

    def journal(self) -> list[dict]:
        text = (self.folder / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True)[1:] if line.endswith("\n")]

    def until_taken_over(self, known: int | None = None) -> None:
        """Wait until the driver that follows has said so. `known`: the takeovers before it; None: those that there are."""
        known = len(self.takeovers) if known is None else known
        wait_until(lambda: len(self.takeovers) > known, 100, "another driver")

    def command(self, *arguments):
        return self.launcher.python("raylaunch", *arguments, env=self.env)

    def begin(self, *arguments) -> WarmCommand:
        """Start a command on the run, which goes on while other things happen."""
        cluster, folder = self.launcher.cluster, self.launcher.folder
        return WarmCommand(cluster.warm, "raylaunch", *arguments, env=cluster.env(**self.env), cwd=folder)

    def hold(self, *phases: str) -> None:
        for phase in phases:
            (self.launcher.folder / f"hold-{phase}").touch()

    @property
    def takeovers(self) -> list[str]:
        log = self.folder / "driver.log"
        return re.findall(r"driver (\d+) has taken over", log.read_text()) if log.exists() else []

    def lines(self, attempt: int, rank: int) -> list[list[str]]:
        """Return the words of each line that is complete."""
        path = self.folder / f"attempt-{attempt}" / f"rank-{rank}" / "stdout.log"
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]
        return [line.split() for line in lines]

    @property
    def result(self) -> dict:
        wait_until((self.folder / "result.json").exists, 100, "the result")
        return json.loads((self.folder / "result.json").read_text())

    def kill_for_long(self) -> tuple[int, int]:
        """Kill the driver, and stop the next one before it has said that it has taken over.

        Return its process, and how many takeovers there were: it may say so as soon as it goes on.
        """
        while True:
            known = len(self.takeovers)
            self.kill()
            os.kill(stopped := self.driver, signal.SIGSTOP)
            if len(self.takeovers) == known:
                return stopped, known
            os.kill(stopped, signal.SIGCONT)  # it was faster

    def ends(self) -> None:
        """Have the script end."""
        (self.launcher.folder / "end").touch()
        assert self.result["exit_code"] == 0


def kill(pid: int) -> None:
    """Kill a process, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 100, "the process to end")


def is_alive(pid: int | None) -> bool:
    return bool(pid) and procfs.process_state(pid) not in ("Z", procfs.GONE)


def test_a_driver_that_is_killed_ten_times(launcher):
    """At any moment of the run: no worker is restarted but one that was killed too, and no step is lost.

    Commands that wait for the run go on with the next driver, and one who is attached sees each line once. The journal
    is that of one driver: played again, its events give the same actions.
    """
    run = Detached(launcher, "--no-wait", max_restarts=1, shutdown_timeout=100, last_call=0.1)
    run.kill()  # before any agent is up
    run.kill()  # before the next one has done anything
    run.until_taken_over()
    attached = run.begin("attach", "--since", "1d", run.id)
    wait_until(lambda: len(run.lines(1, 1)) > 1, 100, "steps")
    run.kill()
    run.until_taken_over()

    kill(int(run.lines(1, 1)[-1][-1]))
    run.kill()  # together with a worker
    run.until_taken_over()
    wait_until(lambda: len(run.lines(2, 1)) > 1, 100, "the second attempt")

    run.hold("saving", "stopping")
    restarting = run.begin("restart", run.id)
    run.kill_in("saving")
    run.kill_in("stopping")
    wait_until(lambda: run.is_in("starting"), 100, "the third attempt")
    run.kill()
    assert "attempt 3 runs with 2 workers" in (told := restarting.communicate(100)[1]), told
    wait_until(lambda: len(run.lines(3, 1)) > 1, 100, "the third attempt")

    run.hold("saving")
    resizing = run.begin("resize", "1", run.id)
    run.kill_in("saving")
    assert "attempt 4 runs with 1 worker" in (told := resizing.communicate(100)[1]), told
    wait_until(lambda: len(run.lines(4, 0)) > 1, 100, "the fourth attempt")

    run.hold("saving", "stopping")
    stopping = run.begin("stop", "-y", run.id)
    run.kill_in("saving")
    run.kill_in("stopping")
    wait_until(lambda: run.is_in("done"), 100, "the end")
    run.kill()
    assert run.kills >= 10
    code = run.result["exit_code"]
    assert stopping.wait() == 0
    seen, said = attached.communicate(100)
    assert attached.returncode == code, said
    reasons = [each["why_launched"] for each in run.result["attempts"]]
    assert [reason.split()[-1] for reason in reasons] == ["joined", "1", "restart", "node"]  # "restart 1 of 1"
    first = []
    for attempt in range(1, 5):  # the same process made all steps of the attempt
        lines = run.lines(attempt, 0)
        first.append(int(lines[0][2]))
        assert [int(line[2]) for line in lines] == [*range(first[-1], first[-1] + len(lines))]
        assert len({line[3] for line in lines}) == 1
        assert [line for each in seen.splitlines() if (line := each.split()[-4:])[0] == str(attempt)] == lines
    assert first[2:] == [int(run.lines(attempt, 0)[-1][2]) + 1 for attempt in (2, 3)]
    assert any(each.process_seconds for each in check_journal(run))  # 0 where no agent was up that could see the end


def check_journal(run: Detached) -> list[DriverReplaced]:
    """The journal is that of one driver, and has the takeovers, which are returned."""
    job, entries = journal.read((run.folder / "events.jsonl").read_text().splitlines())
    events = [entry.event for entry in entries if entry.event is not None]
    assert journal.replay(job, events) == entries
    replaced = [event for event in events if isinstance(event, DriverReplaced)]  # none, if killed before it commanded
    assert run.result["takeovers"] == len(replaced) > 0
    assert all(0 <= each.process_seconds < each.seconds for each in replaced)
    return replaced


def test_a_driver_that_was_stopped_and_replaced_commands_nothing_more(launcher, tmp_path):
    """It is stopped (SIGSTOP), another one takes over, and it goes on: it ends by itself, and training goes on.

    The files of the run are those of the second driver, and the first one says in one of its own why it has ended.
    """
    run = Detached(launcher)
    first = run.driver
    os.kill(first, signal.SIGSTOP)
    (tmp_path / "second.py").write_text(SECOND)
    assert launcher.python("second.py").returncode == 0
    wait_until(lambda: run.takeovers == ["2"], 100, "the second driver")
    epoch = lambda: json.loads((run.folder / "events.jsonl").read_text().splitlines()[0])["epoch"]  # noqa: E731
    wait_until(lambda: epoch() == 2, 100, "its journal")
    files = {open_files(first, run.folder / name) for name in ("events.jsonl", "driver.log")}
    assert files == {0}, "the first driver can write into files of the second one"
    os.kill(first, signal.SIGCONT)
    wait_until(lambda: not Path(f"/proc/{first}").exists(), 100, "the first driver to end")
    assert (run.folder / "driver-1.log").read_text().startswith("raylaunch: driver 1 ends: ")
    run.ends()
    assert len(run.result["attempts"]) == 1
    check_journal(run)
    wait_until((run.folder / "report.html").exists, 100, "the report")
    assert "driver 1 ends" not in (run.folder / "driver.log").read_text()
    assert marked(launcher.cluster.mark)


def test_a_host_is_drained_while_there_is_no_driver(tmp_path):
    """`raylaunch drain` says that it waits for a driver. The next one dies, too, and the one after it leaves the host."""
    with private_cluster(cpus=1, lean=True) as cluster:
        cluster.add_node(cpus=1)
        run = Detached(Launcher(tmp_path, cluster), nnodes="1:2", placement="spread", last_call=0.1)
        wait_until(lambda: any(run.lines(attempt, 1) for attempt in (1, 2)), 100, "steps of both nodes")
        both = 1 if run.lines(1, 1) else 2  # one was there first
        stopped, known = run.kill_for_long()
        draining = run.begin("drain", "node-2", run.id)
        said = draining.stderr.readline()
        assert said == f"raylaunch: train {run.id} has no driver right now: waiting for the next one\n"
        run.hold("saving")
        os.kill(stopped, signal.SIGCONT)
        run.until_taken_over(known)
        run.kill_in("saving")
        _, said = draining.communicate(100)
        assert draining.returncode == 0, said
        assert "no worker runs on node-2 any more" in said
        wait_until(lambda: run.lines(both + 1, 0), 100, "steps of the next attempt")
        run.ends()
        *_, last, alone = run.result["attempts"]
        assert (alone["number"], len(last["roster"]), alone["roster"]) == (both + 1, 2, ["node-1"])
        assert "is being drained" in alone["why_launched"]
        assert len({line[3] for line in run.lines(both, 0)}) == 1
        assert int(run.lines(both + 1, 0)[0][2]) == int(run.lines(both, 0)[-1][2]) + 1, "a step was lost"
        check_journal(run)


def test_a_driver_waits_for_agents_that_do_not_answer(launcher):
    """They may keep the ledger. `status` and `driver.log` say what it waits for. When they answer, it takes over."""
    run = Detached(launcher)
    wait_until(lambda: run.lines(1, 1), 100, "steps")
    agents = [pid for pid in marked(launcher.cluster.mark) if title(pid).startswith("ray::raylaunch: agent")]
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    run.kill()
    why = "no driver is in command: an agent that may keep the ledger (node-1, node-2) does not answer"
    wait_until(lambda: f"raylaunch: {why}\n" in (run.folder / "driver.log").read_text(), 100, "the reason")
    shown = lambda: json.loads(run.command("status", "--json", run.id).stdout)  # noqa: E731
    wait_until(lambda: shown()["problem"] == why, 100, "the reason in the status")
    assert run.takeovers == []
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    run.until_taken_over()
    run.ends()
    assert shown()["problem"] == ""
    assert len(run.result["attempts"]) == 1
    assert (run.folder / "driver.log").read_text().count(why) == 1
    check_journal(run)


def open_files(pid: int, path: Path) -> int:
    """Return how many descriptors of a process refer to the file that has this name now."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.path.samestat(each.stat(), path.stat())
    return found


def test_nothing_is_left_when_no_driver_can_be_started(launcher, tmp_path):
    """Agents and the interim keeper, if there is no agent yet, end after `driver_timeout`, and all that is registered."""
    run = Detached(launcher, driver_timeout=2)
    waiting = Detached(launcher, "--no-wait", nnodes=3, driver_timeout=2)
    wait_until(lambda: run.lines(1, 1), 100, "steps")
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}

    def listed() -> set[str]:
        found = launcher.python("raylaunch", "ps", "--json", env=elsewhere)
        assert found.returncode == 0, found.stderr
        return {row["id"] for row in json.loads(found.stdout)["runs"]}

    wait_until(lambda: listed() == {run.id, waiting.id}, 100, "the runs to be listed")  # threads enter them
    (tmp_path / "end.py").write_text(END)
    assert launcher.python("end.py").returncode == 0
    wait_until(lambda: not titles(launcher.cluster), 100, "all processes to end")
    wait_until(lambda: not listed(), 100, "the registry to be empty")
    shown = run.command("ps", "--json", "-a")
    assert shown.returncode == 0, shown.stderr
    rows = json.loads(shown.stdout)["runs"]
    assert {(row["id"], row["state"]) for row in rows} == {(run.id, "lost"), (waiting.id, "lost")}


def titles(cluster) -> list[str]:
    """Return the titles of the processes of runs that there are: drivers, agents and what these have started."""
    return [found for pid in marked(cluster.mark) if "raylaunch: " in (found := title(pid))]


def title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""

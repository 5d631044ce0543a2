"""What people request by commands, of runs that tests pretend to drive, and of real ones."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

import raylaunch
from raylaunch.cli import main
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.control import control_client
from raylaunch.cluster.control.control_messages import Accepted
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.progress_monitor import ProgressMonitor
from raylaunch.cluster.driver.run_registry import DriverProcess
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.history.run_status import StatusBuilder
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.machine.state import Phase
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.record.result import result
from raylaunch.errors import ExitCode
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_goal import ProposeCheckpoint
from tests.cli.runs.made_runs import NOBODY, dead, make_folder
from tests.cluster.conftest import wait_until
from tests.fakes import FakeFleet, RunRecorder

BY = f"{getpass.getuser()}@{socket.gethostname()}"
PROGRAM = "from raylaunch.cli.main import main; exit(main())"
FETCH = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 33 in fetch\n'
REDUCE = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
)
SCRIPT = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\nprint('up', flush=True)\nsignal.pause()\n"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"driver": NOBODY}, "a b cannot be stopped from here: it does not listen"),
        ({"driver": NOBODY}, "`kill 1234` on host-1 ends its driver, and the workers with it"),
        ({"driver": dead()}, "has ended already"),
    ],
)
def test_a_run_that_cannot_be_stopped(registry, tmp_path, capfd, facts, said):
    """It is said why, and what a person can do."""
    registry.add(make_folder(tmp_path / "a" / "b", lines=6), **facts)
    assert main.main(["stop", "-y"]) == (ExitCode.OK if "already" in said else ExitCode.USAGE)
    assert said in capfd.readouterr().err


def test_a_real_run_is_listed_followed_and_stopped(tmp_path):
    """From other processes, while it lasts and afterwards, without torch."""
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **streams)

    run = start("--standalone", "--set", "preload=[]", "--set", "run_id=one", "train.py")
    assert run.stdout.readline() == "up\n"
    followed = start("logs", "-f", "one")
    assert followed.stdout.readline() == "up\n"
    shown = json.loads(start("ps", "--json").communicate(timeout=200)[0])["runs"]
    assert [(each["name"], each["id"], each["state"], each["pid"]) for each in shown] == [
        ("train", "one", "running", run.pid)
    ]
    stopped = start("stop")
    said = stopped.communicate(timeout=200)[1]
    assert (stopped.returncode, said.splitlines()[-1]) == (
        *(0, f"raylaunch: train one: stopped with exit code 143: stopped by {BY}"),
    )
    assert run.wait(200) == 143
    followed.communicate(timeout=200)
    run.communicate(timeout=200)
    assert followed.returncode == 143


# Of a run whose driver listens: the real one, with a fleet that is pretended.


class Recorded:
    """The journal of a run in memory, as `RunFolder.recorded` has it."""

    def __init__(self, job: Job, recorder: RunRecorder) -> None:
        self._job = job
        self._recorder = recorder

    def status(self):
        builder = StatusBuilder(self._job)
        for entry in list(self._recorder.entries):
            builder.add(entry)
        return builder.status()


class Served:
    """A run of three nodes that trains until it is told to end."""

    def __init__(self, registry, fleet: FakeFleet, cluster: str = "10.0.0.1:6379", **settings) -> None:
        self.fleet = fleet
        job = Job(
            **{
                "entrypoint": Entrypoint(script="train.py"),
                "nnodes": f"1:{len(fleet.names)}",
                "max_restarts": 0,
                **settings,
            }
        )
        self.recorder = RunRecorder()
        self.driver = Driver(job, "run", fleet, self.recorder, self.recorder, time.monotonic())
        folder = SimpleNamespace(path=None, recorded=Recorded(job, self.recorder))
        self.control = RunControl(self.driver, folder, "flat", fleet, lambda: None, lambda _: "")
        self.control.serve("127.0.0.1")
        self.ready = threading.Event()
        fleet.on_launched = dict.fromkeys(range(1, 9), self.ready.set)
        registry.add("", id="one", name="charlm", cluster=cluster, control=self.control.address)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(200)
        until = time.monotonic() + 100
        while self.driver.machine.phase is not Phase.RUNNING:
            assert time.monotonic() < until
            time.sleep(0.01)

    def _run(self) -> None:
        finish = self.driver.run()
        self.control.over()
        self.control.ended(replace(result(self.recorder.entries), exit_code=finish.exit_code, why=finish.why))

    def close(self) -> None:
        self.control.close()
        self.driver.signalled("SIGTERM")
        self.thread.join(100)


@pytest.fixture
def served(registry, monkeypatch):
    monkeypatch.setattr("raylaunch.cli.runs.run_requests.user_name", lambda: "ada")
    made: list[Served] = []

    def serve(nodes: int = 3, **settings) -> Served:
        fleet = FakeFleet(nodes)
        made.append(Served(registry, fleet, **settings))
        return made[0]

    yield serve
    for one in made:
        one.close()


def test_what_died_with_a_driver_is_requested_of_the_next_one(served, capfd, monkeypatch):
    """A driver accepts a request, and dies before any agent has a state with it."""
    one = served()
    change, lost, looks = one.control.change, [], iter((0,))

    def lose_the_first(request):
        if lost:
            return change(request)
        lost.append(request)
        answer = Future()
        answer.set_result(Accepted(attempt=1, phase=Phase.SAVING, status="a restart"))
        return answer

    monkeypatch.setattr(one.control, "change", lose_the_first)
    takeovers = property(lambda _: next(looks, 1), lambda *_: None)
    monkeypatch.setattr(RunReader, "takeovers", takeovers, raising=False)
    assert main.main(["restart"]) == ExitCode.OK
    assert "attempt 2 runs" in capfd.readouterr().err
    assert len(lost) == 1


def test_a_handle_of_the_run_names_the_person_who_stops_it_as_the_command_does(served):
    one = served()
    raylaunch.attach("charlm").stop(grace=0)
    one.thread.join(100)
    assert one.driver.machine.status == f"stopped by ada@{socket.gethostname()}"


@pytest.mark.parametrize("key", ["Ctrl-C", "Ctrl-D"])
def test_a_person_answers_with_a_key(served, capfd, monkeypatch, key):
    """It is a no, and what is said begins a line."""
    served()

    def readline() -> str:
        if key == "Ctrl-C":
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", readline)
    assert main.main(["stop"]) == ExitCode.INTERRUPTED
    assert capfd.readouterr().err.endswith("? [y/N] \nraylaunch: nothing was stopped\n")


@pytest.mark.parametrize("words", [["restart"], ["resize", "1:2"], ["drain", "node-2"], ["stop"]])
def test_a_person_is_told_what_a_change_costs_before_it_is_made(served, capfd, monkeypatch, words):
    """Where the workers cannot save. Nothing is done if the answer is no."""
    one = served()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n")
    change = one.control.change
    monkeypatch.setattr(one.control, "change", lambda asked: change(asked and pytest.fail("it was changed")))
    assert main.main(words) == ExitCode.INTERRUPTED
    asked = capfd.readouterr().err
    assert asked.startswith("the workers have not called `should_checkpoint`, and are not asked to save")
    assert "steps since their last checkpoint are lost; " in asked
    assert asked.endswith(f"[y/N] raylaunch: nothing was {'stopped' if words == ['stop'] else 'changed'}\n")


def test_a_run_that_is_resized_while_its_workers_start(served, capfd, monkeypatch):
    """Nothing changes if there are not more nodes: no other attempt is waited for."""
    one = served(2)
    answer = Future()
    answer.set_result(Accepted(attempt=1, phase=Phase.STARTING, status="the nodes start workers"))
    monkeypatch.setattr(one.control, "change", lambda _: answer)
    waits = SimpleNamespace(sleep=lambda _: pytest.fail("it waits"), monotonic=time.monotonic)
    monkeypatch.setattr("raylaunch.cli.runs.run_requests.time", waits)
    assert main.main(["resize", "1:4"]) == ExitCode.OK
    assert capfd.readouterr().err.splitlines() == [
        "raylaunch: charlm one: the nodes start workers",
        "raylaunch: charlm one: attempt 1 runs with 4 workers on 2 nodes; further nodes are taken in as they come",
    ]


CANNOT_SAVE = "the workers have not called `should_checkpoint`, and are not asked to save"


@pytest.mark.parametrize(
    ("words", "known", "told"),
    [
        (
            ["restart"],
            {},
            (
                f"{CANNOT_SAVE}: they are at step 46, and steps since their last checkpoint are lost, at most 47, which is "
                "all that this attempt has made; go on?"
            ),
        ),
        (
            ["restart"],
            {"saved": 40},
            f"{CANNOT_SAVE}: they are at step 46, and step 40 is saved: 6 steps are lost; go on?",
        ),
        (
            ["stop", "--now"],
            {"asked": 46, "committed": 46, "saved": 40},
            "the workers are killed at once: they are at step 46, and step 45 is saved: 1 step is lost; stop charlm one",
        ),
        (
            ["stop", "--grace", "5"],
            {"asked": 46, "saved": 40, "save_seconds": 60.0},
            (
                "a save takes 1 min, so give `--grace` more than 5: they are at step 46, and step 40 is saved: 6 steps are "
                "lost; stop charlm one"
            ),
        ),
        (
            ["restart", "--grace", "5"],
            {"asked": 46, "saved": 40, "save_seconds": 6.0},
            (
                "a save takes 6.0 s, so give `--grace` more than 5: they are at step 46, and step 40 is saved: 6 steps are "
                "lost; go on?"
            ),
        ),
    ],
)
def test_a_person_is_told_how_many_steps_are_lost(served, capfd, monkeypatch, words, known, told):
    """As of the moment of the question: progress is reported far more rarely."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n")
    one = served(1)
    for marks in (1, 47):
        ranks = [WorkerProgress(rank=rank, marks=marks, age=0.0, step=marks - 1, **known) for rank in range(2)]
        one.fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=tuple(ranks)))
        wait_until(lambda: any(isinstance(entry.event, Progressed) for entry in one.recorder.entries), 100, "a report")
    assert main.main(words) == ExitCode.INTERRUPTED
    assert capfd.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["restart", "-y"], ExitCode.OK),
        (["restart", "--now"], ExitCode.OK),
        (["resize", "1:3"], ExitCode.OK),
        (["drain", "node-9"], ExitCode.JOB_FAILED),
    ],
)
def test_a_person_is_not_asked(served, capfd, monkeypatch, words, code):
    """With `--yes` and `--now`, and where nothing changes at once, or it is refused."""
    served()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: pytest.fail("a question"))
    assert main.main(words) == code
    assert "[y/N]" not in capfd.readouterr().err


def test_a_person_is_not_asked_where_a_run_has_no_cluster_to_leave_a_node_in(served, capfd, monkeypatch):
    """The driver refuses it."""
    monkeypatch.setattr("raylaunch.cluster.local.local_machine.HOST_ID", "id-node-1")
    served(cluster="")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: pytest.fail("a question"))
    assert main.main(["drain", "node-1"]) == ExitCode.JOB_FAILED
    assert capfd.readouterr().err == "error: charlm one: the run is on this machine alone, and cannot leave it\n"


def test_a_person_is_not_asked_where_workers_can_save(served, capfd, monkeypatch):
    """No step is lost."""
    monkeypatch.setattr(ProgressMonitor, "can_save", True)
    served()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: pytest.fail("a question"))
    assert main.main(["restart"]) == ExitCode.OK
    assert "the workers save at one step" in capfd.readouterr().err


def test_a_run_is_restarted_resized_drained_and_stopped(served, capfd, monkeypatch):
    """Each command says what follows, and ends when it is done. `--json` prints the run as it is then."""
    monkeypatch.setattr(ProgressMonitor, "can_save", True)
    one = served()
    states = []

    def said(*arguments: str) -> list[str]:
        assert main.main([*arguments, "--json"]) == ExitCode.OK
        out, err = capfd.readouterr()
        shown = json.loads(out)
        states.append((shown["state"], shown["attempt"], shown["nodes"], len(shown["node_states"])))
        return err.splitlines()

    assert said("restart") == [
        "raylaunch: charlm one: the workers save at one step, then attempt 2 follows: ada@vm requested a restart",
        "raylaunch: charlm one: attempt 2 runs with 6 workers on 3 nodes",
    ]
    assert said("resize", "1:2", "one") == [
        "raylaunch: charlm one: the workers save at one step, then attempt 3 follows: ada@vm requested 1 to 2 nodes",
        "raylaunch: charlm one: attempt 3 runs with 4 workers on 2 nodes",
    ]
    assert said("resize", "1:3", "charlm") == [
        "raylaunch: charlm one: attempt 3 runs with 4 workers on 2 nodes; further nodes are taken in as they come"
    ]
    assert said("drain", "node-2") == [
        (
            "raylaunch: charlm one: the workers save at one step, then attempt 4 follows: "
            "node-2 is being drained: ada@vm requested it"
        ),
        "raylaunch: charlm one: no worker runs on node-2 any more",
    ]
    assert said("stop", "-y", "--grace", "7") == [
        (
            f"raylaunch: the workers of charlm one are to end: they save, within 7 s, and get SIGTERM then "
            f"(process {os.getpid()} on {DriverProcess.this().host})"
        ),
        "raylaunch: charlm one: stopped with exit code 143: stopped by ada@vm",
    ]
    assert states[0] == ("running", 2, 3, 3)
    assert [state for state, *_ in states] == ["running"] * 4 + ["stopped"]
    assert one.driver.machine.restarts == 0
    assert main.main(["restart"]) == ExitCode.JOB_FAILED
    assert "charlm one" in capfd.readouterr().err


def test_a_script_that_cannot_save(served, capfd):
    """Nobody is told that its workers save."""
    served()
    assert main.main(["restart"]) == ExitCode.OK
    cannot = "the workers have not called `should_checkpoint`, and are not asked to save"
    assert capfd.readouterr().err.splitlines()[0] == (
        f"raylaunch: charlm one: {cannot}: steps since their last checkpoint are lost, then attempt 2 follows: "
        "ada@vm requested a restart"
    )
    assert main.main(["stop", "-y"]) == ExitCode.OK
    assert f"the workers of charlm one are to end: they get SIGTERM; {cannot} (" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["resize", "3:2"], 1, "charlm one: 3:2 is no range of nodes: the least is 1, and MIN is at most MAX"),
        (["drain", "node-9"], 1, "charlm one: the run has no node node-9: there are node-1 (10.0.0.1)"),
        (["resize", "two"], 2, "`two` is neither N nor MIN:MAX"),
        (["resize"], 2, "`resize` needs MIN:MAX"),
        (["restart", "--grace", "soon"], 2, "`--grace` must be a number of seconds, but is `soon`"),
        (["stop", "--grace", "-1"], 2, "`--grace` must be a number of seconds, but is `-1`"),
        (["stacks", "--rank", "x"], 2, "`x` is not a list of ranks"),
        (["stacks", "--rank", "0-99999"], 2, "`--rank` names more than 1000 ranks"),
        (["stacks", "--rank", "77"], 1, "charlm one has no worker of rank 77 now"),
        (["restart", "--graec", "1"], 2, "did you mean `--grace`?"),
        (["restrat"], 2, "restart"),
    ],
)
def test_what_is_refused(served, capfd, arguments, code, said):
    served(nodes=1)
    assert main.main(arguments) == code
    assert said in capfd.readouterr().err


def test_ctrl_c_ends_only_the_waiting(served, capfd, monkeypatch):
    """The request stays."""
    one = served()
    one.fleet.overrides[ProposeCheckpoint] = one.fleet.record  # the workers do not save

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raylaunch.cli.runs.run_requests.time", SimpleNamespace(sleep=interrupt))
    assert main.main(["restart"]) == ExitCode.INTERRUPTED
    assert "charlm one goes on with what was requested; `raylaunch status one` shows it" in capfd.readouterr().err
    assert one.driver.machine.phase is Phase.SAVING


def test_a_run_that_ends_before_it_is_restarted(served, capfd, monkeypatch):
    """It is said how it ended."""
    one = served()
    one.fleet.overrides[ProposeCheckpoint] = lambda node, order: one.fleet.finish()
    assert main.main(["restart"]) == ExitCode.JOB_FAILED
    assert "charlm one has ended before that was done: succeeded: all 6 workers finished" in (capfd.readouterr().err)


def test_stacks_are_printed(served, capfd):
    """In groups, as whole stacks of some ranks, and as JSON."""
    one = served(nodes=2)
    one.fleet.stacks["node-1"] = tuple(Stack(rank=rank, state="S", text=REDUCE) for rank in (0, 1))
    one.fleet.stacks["node-2"] = (Stack(rank=2, state="S", text=FETCH), Stack(rank=3, state="T", text=""))
    assert main.main(["stacks"]) == ExitCode.OK
    assert capfd.readouterr().out == (
        "attempt 1: what 4 workers are doing now\n"
        "2 ranks wait at distributed_c10d.py:9 in all_reduce: 0-1\n"
        "    /venv/site-packages/torch/distributed/distributed_c10d.py:9 in all_reduce\n"
        "1 rank at train.py:33 in fetch: 2\n"
        "    /job/train.py:33 in fetch\n"
        "1 rank, stopped by a signal: 3\n"
    )
    assert main.main(["stacks", "--rank", "2-3"]) == ExitCode.OK
    assert capfd.readouterr().out == (f"rank 2, process state S:\n{FETCH}rank 3, process state T:\ndid not answer\n")
    assert main.main(["stacks", "--rank", "2", "--json"]) == ExitCode.OK
    found = json.loads(capfd.readouterr().out)
    assert found["stacks"] == [{"rank": 2, "state": "S", "text": FETCH}]
    assert found["groups"][1] == {
        "ranks": [2],
        "doing": "at train.py:33 in fetch",
        "waits": False,
        "note": "",
        "frames": ["/job/train.py:33 in fetch"],
    }


def test_a_driver_that_does_not_listen(registry, tmp_path, capfd):
    """It cannot be asked for anything."""
    registry.add(make_folder(tmp_path / "a" / "b", lines=6))
    assert main.main(["restart"]) == ExitCode.UNAVAILABLE
    assert "the driver of a b cannot be asked: it does not listen" in capfd.readouterr().err


def test_a_driver_that_is_gone(registry, tmp_path, capfd):
    """Nobody listens where it did."""
    nowhere = SecretAddress(host="127.0.0.1", port=9, secret="x")
    registry.add(make_folder(tmp_path / "a" / "b", lines=6), control=nowhere)
    assert main.main(["drain", "node-1"]) == ExitCode.UNAVAILABLE
    assert "the driver of a b cannot be asked: nobody listens at 127.0.0.1 port 9" in capfd.readouterr().err


def test_a_driver_that_does_not_answer(registry, tmp_path, capfd, monkeypatch):
    """As one that stands still: its folder is read, and commands that need it say that they do."""
    monkeypatch.setattr(control_client, "CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        control = SecretAddress(host="127.0.0.1", port=silent.getsockname()[1], secret="x")
        registry.add(make_folder(tmp_path / "a" / "b", lines=6), control=control)
        assert main.main(["status"]) == ExitCode.OK
        assert capfd.readouterr().out.startswith("a b: running, 4 workers on 2 nodes\n")
        assert main.main(["restart"]) == ExitCode.UNAVAILABLE
        assert f"127.0.0.1 port {control.port} cannot be reached: timed out" in capfd.readouterr().err
        assert main.main(["stop", "-y"]) == ExitCode.USAGE
        hint = f"`kill {os.getpid()}` on {DriverProcess.this().host} ends its driver"
        assert hint in capfd.readouterr().err

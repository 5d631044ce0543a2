"""Runs on this machine without Ray, with agents in the driver's process."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raylaunch.cli.output.console import Console
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.fleet import local_fleet
from raylaunch.cluster.fleet.local_fleet import LocalFleet, LocalSlots
from raylaunch.cluster.fleet_api import AgentLost, FleetFailed, ReportReceived, SlotGranted
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.local.local_machine import Gpus
from raylaunch.cluster.run import plan_job
from raylaunch.cluster.session import discovery
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from raylaunch.core.placement.plan import Bundle, make_plan
from raylaunch.errors import ClusterError
from raylaunch.node.linux import nvml
from raylaunch.node.protocol.node_goal import StopWorkers
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.node.protocol.node_status import AgentReady, NodeStatus, Ready
from tests.cluster.conftest import wait_until
from tests.private_cluster import MARK, WARM_TORCH, end_marked, marked

TESTS = Path(__file__).parents[1]
NO_RAYLETS = "import sys; from raylaunch.cluster.session import discovery; discovery.running = lambda *_: []"
"""Python code that hides the raylets of other tests, which run on this machine."""

# From end to end.


@pytest.fixture
def alone(tmp_path):
    """Return an environment without any cluster, with a mark by which all processes can be found."""
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield env | {MARK: mark, "TMPDIR": str(tmp_path)}, tmp_path
    left = marked(mark)
    end_marked(mark)
    assert not left


@pytest.fixture
def alone_with_torch(alone, warm_torch):
    """The same, but fork servers find torch imported: each of them would take 3 s of CPU for it."""
    env, folder = alone
    return env | {WARM_TORCH: str(warm_torch.executable())}, folder


def start(environ, folder: Path, script: str, *overrides: str, **job: Any) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    job = {"entrypoint": {"script": "train.py"}, "nnodes": 2, "nproc_per_node": 2, "preload": [], "show": "all"} | job
    (folder / "job.yaml").write_text(json.dumps(job))
    program = (
        f"{NO_RAYLETS}; from raylaunch.cli.main import main; code = main(); print('ray' in sys.modules); exit(code)"
    )
    if WARM_TORCH in environ:
        program = f"import sys; sys.path.append({str(TESTS)!r}); import warm_fork_servers; sys.path.pop(); {program}"
    command = ["nice", "-n", "1", sys.executable, "-c", program, "job.yaml", *overrides]
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return sorted(out.splitlines()), err


def test_trains_without_ray_and_leaves_nothing(alone):
    """2 x 2 workers. The driver does not import Ray, and workers find none. `RAY_` variables and the niceness stay."""
    env, folder = alone
    script = (
        "import os, torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\n"
        "print(d.get_world_size(), os.environ.get('RAY_ADDRESS'), os.environ['RAY_DEDUP_LOGS'], os.nice(0))\n"
    )
    out, err = finished(start(env | {"RAY_DEDUP_LOGS": "0"}, folder, script, preload=["torch"]))
    assert out == ["False", *(f"[{rank}] 4 None 0 {os.nice(0) + 1}" for rank in range(4))]
    assert "no Ray cluster was found: all 2 nodes run on this machine" in err
    assert "node-2 (127.0.0.1) is ready" in err


STORE_DIES = """
import os, signal, sys
import torch, torch.distributed as dist
from pathlib import Path
from raylaunch.worker import State

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["RAYLAUNCH_ATTEMPT"]
state = State(every=1)
done = state.restore()
assert state.get("total", 0) == sum(range(done))
print(f"rank {rank} begins attempt {attempt} at {done}")
for step in range(done, 9):
    state["total"] = state.get("total", 0) + step
    dist.barrier()
    if (attempt, rank, step) == ("1", 0, 5):
        siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        stores = [pid for pid in siblings if Path(f"/proc/{pid}/comm").read_text() == "rl:store\\n"]
        for pid in stores:
            os.kill(int(pid), signal.SIGKILL)
        print(f"{len(stores)} stores are killed")
    dist.barrier()
    state.commit(step)
dist.destroy_process_group()
"""


def test_with_state_the_death_of_the_store_costs_one_restart_and_no_committed_step(alone_with_torch):
    """Of both stores of the node of rank 0: its attempt's, and the one that listens for the next attempt."""
    env, folder = alone_with_torch
    out, err = finished(start(env, folder, STORE_DIES, preload=["torch"], max_restarts=1))
    assert "[0] 2 stores are killed" in out
    assert [line for line in out if "begins" in line] == [
        f"[{rank}] rank {rank} begins attempt {attempt} at {done}"
        for rank in range(4)
        for attempt, done in ((1, 0), (2, 5))
    ]
    assert "the store of attempt 1 died" in err


BREAKS_WHILE_SAVING = """
import os, time
import torch.distributed as dist
from raylaunch.worker import State

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["RAYLAUNCH_ATTEMPT"])
state = State(every=1)
done = state.restore()
print(f"rank {rank} begins attempt {attempt} at {done} with {state.get('total', 0)}", flush=True)
for step in range(done, 9):
    if (attempt, rank, step) == (1, 0, 5):
        open("waits", "x").close()
        while not os.path.exists("asked"):
            time.sleep(0.02)
        os._exit(1)
    state["total"] = state.get("total", 0) + step
    state.commit(step)
"""


def test_a_node_that_leaves_gives_its_part_if_the_world_breaks_while_it_saves(alone_with_torch):
    """The agent has ended all else, and the next world, on the other node, needs what rank 1 has committed."""
    env, folder = alone_with_torch
    env |= {"XDG_STATE_HOME": str(folder / "state")}
    job = {"nnodes": "1:2", "nproc_per_node": 1, "last_call": 100, "max_restarts": 1, "run_id": "one"}
    run = start(env, folder, BREAKS_WHILE_SAVING, preload=["torch"], **job)
    program = f"{NO_RAYLETS}; from raylaunch.cli.main import main; exit(main())"
    command = [sys.executable, "-c", program, "resize", "1", "one"]
    wait_until((folder / "waits").exists, 100, "rank 0 to wait")
    with subprocess.Popen(command, env=env, cwd=folder, stderr=subprocess.PIPE, text=True) as resize:
        assert resize.stderr is not None
        assert "the workers save at one step" in resize.stderr.readline()
        (folder / "asked").touch()
        out, _ = finished(run)
    assert [line for line in out if "attempt 2" in line] == ["rank 0 begins attempt 2 at 5 with 10"]


def test_a_worker_and_a_fork_server_that_are_killed(alone):
    """One restart each, as on a cluster. The agent goes on with another fork server."""
    env, folder = alone
    script = (
        "import os, signal, time\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt == '2': print('done'); raise SystemExit\n"
        "if os.environ['RANK'] == '3': os.kill(os.getpid() if attempt == '0' else os.getppid(), signal.SIGKILL)\n"
        "time.sleep(280)\n"
    )
    out, err = finished(start(env, folder, script, max_restarts=2))
    assert out == ["False", "[0] done", "[1] done", "[2] done", "[3] done"]
    assert "restart 2 of 2" in err


FAILS_THIRTY_TIMES = """
import contextlib, json, os, signal, sys, time
from pathlib import Path

def held(pid):
    watches = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # the descriptor may just have been closed
            watches += path.read_text().count("inotify wd:")
    return [len(os.listdir(f"/proc/{pid}/fd")), watches, len(os.listdir(f"/proc/{pid}/task"))]

def ancestors():  # of the worker: fork server, subreaper and driver
    pids = [os.getppid()]
    while len(pids) < 3:
        pids.append(int(Path(f"/proc/{pids[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    return [held(pid) for pid in pids]

def settled():
    found, since = ancestors(), time.monotonic()
    while time.monotonic() - since < 1.0:
        time.sleep(0.05)
        if found != (found := ancestors()):
            since = time.monotonic()
    return found

def is_more(now, before):  # what 26 restarts leave, or 13: those after SIGKILL, or the others
    return any(b - a > 6 for then, at_last in zip(before, now) for a, b in zip(then, at_last))

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
early = Path("early.json")
if attempt == 4:
    early.write_text(json.dumps(settled()))
if attempt == 30:
    deadline, before = time.monotonic() + 100, json.loads(early.read_text())
    while is_more(now := ancestors(), before) and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"then {before}, now {now}: {'more' if is_more(now, before) else 'the same'}")
    raise SystemExit
if attempt % 2:
    raise ValueError("loss is NaN")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_thirty_restarts_leave_nothing_in_any_process(alone):
    """The numbers of descriptors, inotify watches and threads are about those of the fourth restart.

    What a restart leaves would be there 26 times. A process that comes and goes has a few. `make bench` has memory.
    """
    env, folder = alone
    settings = {"nnodes": 1, "nproc_per_node": 1, "max_restarts": 30, "exclude_after": 0}
    out, err = finished(start(env, folder, FAILS_THIRTY_TIMES, **settings))
    (found,) = [line for line in out if line.startswith("then")]
    assert found.endswith("the same"), found
    assert "restart 30 of 30" in err


def test_a_driver_that_stands_still(alone):
    """For longer than `node_timeout`: the workers go on, and are not lost."""
    env, folder = alone
    script = (
        "import os, time\nfrom pathlib import Path\nprint('up', flush=True)\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
        "Path('gone-on-' + os.environ['RANK']).touch()\nwhile not Path('end').exists(): time.sleep(0.02)\n"
    )
    process = start(env, folder, script, nnodes=1, node_timeout=1)
    assert process.stdout is not None
    assert "up" in process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # what is tested is that this time means nothing
    (folder / "go").touch()
    wait_until(lambda: len(list(folder.glob("gone-on-*"))) == 2, 100, "workers to go on")
    process.send_signal(signal.SIGCONT)
    (folder / "end").touch()
    assert "lost" not in finished(process)[1]


def test_a_signal_to_the_driver(alone):
    """It is passed to the workers, and the exit code tells which it was."""
    env, folder = alone
    script = "import time\ntry:\n    print('up', flush=True)\n    time.sleep(280)\nexcept KeyboardInterrupt: print('saved')\n"
    process = start(env, folder, script, nnodes=1, nproc_per_node=1)
    assert process.stdout is not None
    assert "up" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "saved" in out


SAVES = """
import os, pathlib, sys, time
import raylaunch.worker as worker
file = pathlib.Path("done")
first = int(file.read_text()) if file.exists() else 0
steps = 0
print("goes on at", first, flush=True)
for step in range(first, 100_000):
    time.sleep(0.02)
    worker.heartbeat()
    steps += 1
    if worker.should_checkpoint(step):
        if worker.context().rank == 0:
            file.write_text(str(step + 1))
        worker.checkpointed(step)
"""


def saved_and_ended(process, folder, rank="goes on at 0") -> tuple[str, dict]:
    """Wait for the end of a run that saves in time; return its messages and its result."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert rank in out
    (file,) = folder.glob("runs/*/latest/result.json")
    return err, json.loads(file.read_text())


def test_a_run_that_ends_at_its_deadline(alone):
    """All ranks save before, and the next run goes on at the next step."""
    env, folder = alone
    settings = {"nnodes": 1, "nproc_per_node": 2, "shutdown_timeout": 1}
    err, result = saved_and_ended(start(env, folder, SAVES, deadline="12s", **settings), folder)
    step = int((folder / "done").read_text()) - 1
    assert f"all workers have saved after step {step}, and a new run goes on from there" in err
    assert (result["exit_code"], result["resume"], result["lost_steps"]) == (75, "yes", 0)
    assert result["attempts"][-1]["last_step"] == step, "no rank has gone on after the checkpoint"
    again = start(env | {"RAYLAUNCH_DEADLINE": "12"}, folder, SAVES, deadline="auto", **settings)
    saved_and_ended(again, folder, f"goes on at {step + 1}")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_with_a_grace(alone, name):
    """All ranks save within it; SIGUSR1 is what Slurm sends some time before the end of a job."""
    env, folder = alone
    process = start(env, folder, SAVES, nnodes=1, nproc_per_node=2, grace=60)
    assert process.stdout is not None
    assert "goes on" in process.stdout.readline()
    wait_until(lambda: '"Progressed"' in events(folder), 100, "steps")
    process.send_signal(signal.Signals[name])
    err, result = saved_and_ended(process, folder, "")
    step = int((folder / "done").read_text()) - 1
    assert f"stopped by {name}; all workers have saved after step {step}" in err
    assert (result["resume"], result["attempts"][-1]["last_step"]) == ("yes", step)


COMMITS = """
import sys, time, torch
from raylaunch.worker import State
model = torch.nn.Linear(4, 4)
state = State(model=model, every=1000)
first = state.restore()
print("goes on at", first, flush=True)
for step in range(first, 100_000):
    time.sleep(0.02)
    with torch.no_grad():
        model.weight.fill_(step)
    state.commit(step)
"""


def test_a_signal_with_a_grace_and_state_on_disk(alone_with_torch):
    """The commit after which all ranks wait is written before the run ends, and the next run goes on after it."""
    env, folder = alone_with_torch
    settings = {"nnodes": 1, "nproc_per_node": 2, "grace": 60, "durable": str(folder / "durable")}
    settings |= {"preload": ["torch._dynamo"]}
    first = 0
    for _ in range(2):
        process = start(env, folder, COMMITS, **settings)
        assert process.stdout is not None
        assert f"goes on at {first}\n" in process.stdout.readline()
        wait_until(lambda: '"Progressed"' in events(folder), 100, "steps")
        process.send_signal(signal.SIGTERM)
        _, result = saved_and_ended(process, folder, "")
        last = result["attempts"][-1]["last_step"]
        assert last >= first
        assert f"all workers have saved after step {last}," in result["why"]
        first = last + 1


def test_a_deadline_that_cannot_be(alone):
    """Nothing is started."""
    env, folder = alone
    for text, why in (("2026-01-01T00:00:00Z", "ago: nothing was started"), ("auto", "has nobody to ask")):
        _, err = (process := start(env, folder, SAVES, nnodes=1, deadline=text)).communicate(timeout=100)
        assert process.returncode == 2
        assert why in err
    assert not (folder / "runs").exists()


def events(folder) -> str:
    return "".join(path.read_text() for path in folder.glob("runs/*/latest/events.jsonl"))


def test_too_much_for_this_machine(alone):
    """The run fails at once instead of waiting for resources that never come."""
    env, folder = alone
    process = start(env | {"CUDA_VISIBLE_DEVICES": ""}, folder, "", gpus_per_worker=1, nnodes=1)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3
    assert "this machine cannot hold the job" in err
    assert "0 of 0 GPUs free, 2 needed" in err
    assert out == "False\n"


def test_what_is_planned(alone):
    """Nothing is started, and the plan says that there is no cluster."""
    env, folder = alone
    out, _ = finished(start(env, folder, "", "--plan"))
    assert "assumed  ray.address: none (no cluster is running; this machine does it alone, without Ray)" in out
    assert "would start 4 workers on 2 nodes" in out
    assert "False" in out


def test_a_function(alone):
    """Its results are returned by rank, and its exception is raised. A rank without a result is an error."""
    env, folder = alone
    program = (
        f"{NO_RAYLETS}; import raylaunch\n"
        "def rank(fails):\n"
        "    import os\n"
        "    if fails and os.environ['RANK'] == '1': raise KeyError('mine')\n"
        "    return int(os.environ['RANK'])\n"
        "told = {'nnodes': 2, 'nproc_per_node': 1, 'backend': 'none', 'preload': [], 'show': 'none'}\n"
        "print(raylaunch.launch(rank, (False,), **told))\n"
        "try: raylaunch.launch(rank, (True,), **told)\n"
        "except raylaunch.JobFailedError as error:\n"
        "    print(repr(error.__cause__), 'ray' in sys.modules, error.rank, error.node in error.result.addresses)\n"
        "def leave():\n"
        "    import os\n"
        "    if os.environ['RANK'] == '0': os._exit(0)\n"
        "try: raylaunch.launch(leave, **told)\n"
        "except raylaunch.JobFailedError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines() == [
        "[0, 1]",
        "KeyError('mine') False 1 True",
        "the function did not return on rank 0: the process exited with 0 before",
        "hint: `return` in place of `sys.exit(0)` or `os._exit(0)`",
    ], done.stderr


FETCHES_FOR_EVER = """
import os, signal, time, raylaunch
from raylaunch.cluster.driver import results, signals
from raylaunch.cluster.fleet.local_fleet import LocalFleet

def fetch(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)

def slow_close(self, close=LocalFleet.close):
    time.sleep(5 * signals.LEAVE_SECONDS)
    close(self)

results.fetch, LocalFleet.close, signals.LEAVE_SECONDS = fetch, slow_close, 0.1
try:
    raylaunch.launch(lambda: 1, nproc_per_node=1, backend="none", preload=[], show="none", ray={"address": "none"})
except KeyboardInterrupt as error:
    print(error)
"""


def test_a_signal_while_results_are_fetched(alone):
    """It interrupts that at once. The program goes on, as a notebook does, however long the nodes take to end."""
    env, folder = alone
    done = subprocess.run(
        [sys.executable, "-c", FETCHES_FOR_EVER],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "stopped by SIGINT while the run ended\n", done.stderr


# Whether there is a cluster.


@pytest.fixture
def unseen(monkeypatch, tmp_path):
    """Hide whatever Ray runs on this machine."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(discovery, "running", lambda _: [])


def planned(**settings: Any):
    return plan_job(Job(**{"entrypoint": Entrypoint(script="train.py"), "nnodes": 2, "nproc_per_node": 1} | settings))


def test_several_nodes_say_first_and_last_that_there_is_no_cluster(unseen, capsys, monkeypatch):
    """They were meant for several machines."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console()
    console.on_plan(Job(entrypoint=Entrypoint(script="train.py")), planned(), "")
    console.report("finished\n", ok=True)
    console.close()
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == last
    assert first.endswith("\x1b[33mno Ray cluster was found: all 2 nodes run on this machine\x1b[0m")


def test_one_node_needs_no_cluster(unseen):
    """The plan only says what is assumed."""
    assert planned(nnodes=1, gpus_per_worker=1, placement="spread").fallback == ""
    assert planned().assumed[0].startswith("ray.address: none (no cluster is running")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"placement": "spread"}, "2 nodes with `placement: spread`"),
        ({"gpus_per_worker": 1}, "2 nodes with GPUs"),
    ],
)
def test_a_job_that_needs_a_cluster(unseen, settings, words):
    """It is refused, with what to do. On this machine it runs only if the person says so."""
    with pytest.raises(ClusterError, match="no Ray cluster was found, and the job is for a cluster: ") as error:
        planned(**settings)
    assert words in error.value.message
    assert "`ray.address: none`, or `--standalone`, runs the job on this machine" in error.value.hint
    assert planned(ray=RayOptions(address="none"), **settings).fallback == ""


# Its GPUs.


@pytest.mark.parametrize(
    ("count", "named", "ids"),
    [
        (4, None, ("0", "1", "2", "3")),
        (4, "2,3", ("2", "3")),
        (2, "GPU-a,GPU-b,GPU-c", ("GPU-a", "GPU-b")),
        (4, "", ()),
        (4, "NoDevFiles", ()),
        (4, "-1", ()),
        (4, "1, 0,4,2", ("1", "0")),
        (0, "0,1", ()),
    ],
)
def test_gpus_that_may_be_used(monkeypatch, count, named, ids):
    """Those of the machine, but only those that the environment names."""
    monkeypatch.setattr(nvml, "gpus", lambda: count)
    monkeypatch.setattr(local_machine, "has_other_accelerators", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert local_machine.visible_gpus() == Gpus("CUDA_VISIBLE_DEVICES", ids)


def bundle(many: float) -> Bundle:
    return Bundle(nproc=max(1, int(many)), gpus=many, cpus=1)


def test_gpus_are_divided_among_slots():
    """Each slot has its own, in order. With all or none of them, the environment is unchanged."""
    room = LocalSlots(Gpus("CUDA_VISIBLE_DEVICES", ("4", "5", "6")))
    for seat, many in enumerate((1, 2, 0, 1)):
        room.request(seat, bundle(many))
    assert room.grant() == [0, 1, 2]
    found = [room.environ(seat).get("CUDA_VISIBLE_DEVICES") for seat in range(3)]
    assert found == ["4", "5,6", None]
    room.release(1)
    assert room.grant() == [3]
    assert room.environ(3) == {"CUDA_VISIBLE_DEVICES": "5"}
    whole = LocalSlots(Gpus("CUDA_VISIBLE_DEVICES", ("0", "1")))
    whole.request(1, bundle(2))
    assert (whole.grant(), whole.environ(1)) == ([1], {})


def test_slots_share_a_gpu():
    """Parts of a GPU go where others are, as long as they fit, so that whole ones stay free."""
    room = LocalSlots(Gpus("CUDA_VISIBLE_DEVICES", ("4", "5")))
    for seat, many in enumerate((0.3, 1, 0.3, 0.3, 0.3)):
        room.request(seat, bundle(many))
    assert room.grant() == [0, 1, 2, 3]
    found = [room.environ(seat)["CUDA_VISIBLE_DEVICES"] for seat in range(4)]
    assert found == ["4", "5", "4", "4"]
    room.release(2)
    assert room.grant() == [4]


# The fleet, with agents that do nothing.


class Quiet:
    """An agent that is up at once and reports nothing more until `fails` is set."""

    made: list[Quiet]

    def __init__(self, told: AgentSpec, home: Any, client: Any = None) -> None:
        self.node, self.visible = told.node, home.environ.get("CUDA_VISIBLE_DEVICES")
        self.orders: list[tuple[Any, ...]] = []
        self.fails = asyncio.Event()
        self.closing, self.closed = asyncio.Event(), False
        self.said = False
        self.made.append(self)

    async def next_report(self, _epoch: int = 0) -> AgentReport:
        self.loop = asyncio.get_running_loop()
        if self.said:
            await self.fails.wait()
            raise OSError(24, "Too many open files")
        self.said = True
        ready = Ready(start_method="forkserver", why=(), torch=True, pid=1)
        up = AgentReady(host="local", address="127.0.0.1", nproc=1, ready=ready)
        return AgentReport(sent_at=0.0, status=NodeStatus().after(up))

    def handle(self, order: StopWorkers) -> None:
        self.orders.append(order)
        if order.attempt == 13:
            raise RuntimeError("a mistake")

    async def read_result(self, rank: int, offset: int) -> bytes:
        return f"{self.node} {rank} {offset}".encode()

    async def close(self) -> None:
        self.closed = True


class Unable(Quiet):
    def __init__(self, told: AgentSpec, home: Any, client: Any = None) -> None:
        raise FileNotFoundError("no such folder")


class Crew:
    """A fleet and its items."""

    def __init__(self, nnodes: str, **job: Any) -> None:
        wanted = Job(entrypoint=Entrypoint(script="train.py"), nnodes=nnodes, **job)
        plan = make_plan(wanted, [local_machine.facts(wanted)], local=True)
        told = AgentSpec(
            job=replace(wanted, node_timeout=float("inf"), gpus_per_worker=0),
            run_dir="",
            address=None,
            submitter_env={},
            cwd=None,
            ray_address="",
        )
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.fleet = LocalFleet(plan, told, self.lines.append, local_machine.visible_gpus())
        self.up: list[str] = []
        self.fleet.start(self.inbox.put)

    def count(self, number: int) -> list[str]:
        """Handle items until so many nodes are up."""
        while len(self.up) < number:
            item = self.inbox.get(timeout=100)
            if isinstance(item, ReportReceived) and self.fleet.joined(item.node, "local"):
                self.up.append(item.node)
            elif isinstance(item, AgentLost):
                self.fleet.replace(item)
            elif isinstance(item, FleetFailed):
                raise item.error
        return self.up


@pytest.fixture
def crew(monkeypatch):
    crews: list[Crew] = []

    def begin(nnodes: str, agent: type[Quiet] = Quiet, many: int = 0, **job: Any) -> Crew:
        Quiet.made = []
        monkeypatch.setattr(local_fleet, "Agent", agent)
        monkeypatch.setattr(
            local_machine, "visible_gpus", lambda: Gpus("CUDA_VISIBLE_DEVICES", tuple(map(str, range(many))))
        )
        crews.append(Crew(nnodes, **job))
        return crews[-1]

    yield begin
    for each in crews:
        each.fleet.close()
        assert all(agent.closed for agent in Quiet.made)


def test_agents_of_the_gang_and_further_ones(crew):
    """MAX nodes and the spare one start. Each is granted, comes up, takes orders and gives results."""
    found = crew("1:2", spares=1)
    assert sorted(found.count(3)) == ["node-1", "node-2", "node-3"]
    found.fleet.send("node-2", StopWorkers(attempt=1, grace=2.5))
    found.fleet.send("node-9", StopWorkers(attempt=1, grace=2.5))
    wait_until(lambda: any(agent.orders for agent in Quiet.made), 100, "the order")
    assert {agent.node: agent.orders for agent in Quiet.made if agent.orders} == {
        "node-2": [StopWorkers(attempt=1, grace=2.5)]
    }
    assert found.fleet.read_result("node-3", 1, 50).result(100) == b"node-3 1 50"
    with pytest.raises(LookupError, match="it has no agent any more"):
        found.fleet.read_result("node-9", 0, 0).result(100)


def test_gpus_of_several_agents(crew):
    """Two agents have half of them each. A third waits for a slot, which the release of a node does not free."""
    found = crew("2:3", many=4, nproc_per_node=2, gpus_per_worker=1)
    found.count(2)
    assert [agent.visible for agent in Quiet.made] == ["0,1", "2,3"]
    found.fleet.release("node-1", frees_memory=True)
    found.count(3)
    assert [(agent.visible, agent.closed) for agent in Quiet.made] == [("0,1", True), ("2,3", False), ("0,1", False)]


@pytest.mark.parametrize("order", [None, 13])
def test_an_agent_that_fails(crew, order):
    """In a report or an order: the run ends, since another agent would fail too."""
    found = crew("2")
    found.count(2)
    if order is None:
        failing = Quiet.made[1]
        failing.loop.call_soon_threadsafe(failing.fails.set)
    else:
        found.fleet.send("node-2", StopWorkers(attempt=order, grace=0.0))
    with pytest.raises(
        ClusterError, match=r"the agent of node-2 cannot go on: (OSError: .*Too many|RuntimeError: a mi)"
    ):
        found.count(3)


def test_an_agent_that_cannot_start(crew):
    """As on a cluster."""
    with pytest.raises(ClusterError, match="the agent of node-1 cannot start: FileNotFoundError: no such folder"):
        crew("1", Unable).count(1)


def test_an_event_loop_that_fails(crew, monkeypatch):
    """It is shared by all agents, so the run ends instead of waiting for ever."""
    found = crew("2")
    found.count(2)
    monkeypatch.setattr(found.fleet, "_do", None)
    found.fleet.release("node-1")
    with pytest.raises(ClusterError, match=r"the agents on this machine cannot go on: TypeError"):
        found.count(3)


def test_every_agent_is_granted_before_it_is_up(crew):
    """So that the machine knows which nodes it waits for."""
    found = crew("2")
    seen: list[str] = []
    while len(seen) < 4:
        item = found.inbox.get(timeout=100)
        if isinstance(item, SlotGranted):
            assert (item.host, item.address) == (local_machine.HOST_ID, local_machine.LOOPBACK)
            seen.append(item.node)
        elif isinstance(item, ReportReceived):
            seen.append("up")
    assert sorted(seen) == ["node-1", "node-2", "up", "up"]


def test_a_thread_that_stands_still_does_not_delay_the_end(crew, monkeypatch):
    """As in a file system that does not answer: agents that are to stop their workers are lost, and are not waited for."""
    go_on, has_gone_on = threading.Event(), threading.Event()

    class Stuck(Quiet):
        def handle(self, order: Any) -> None:
            super().handle(order)
            go_on.wait(250)
            has_gone_on.set()

    monkeypatch.setattr(local_fleet, "STALL_SECONDS", 0.5)
    found = crew("1:1", agent=Stuck)
    (node,) = found.count(1)
    found.fleet.send(node, StopWorkers(attempt=1, grace=2.5))
    lost = found.inbox.get(timeout=100)
    while not isinstance(lost, AgentLost):
        lost = found.inbox.get(timeout=100)
    assert (lost.node, lost.error) == (node, None)
    assert "a file system may not answer" in lost.why
    found.fleet.close()
    assert not has_gone_on.is_set()
    go_on.set()
    Quiet.made = []  # they are not closed, but end with this process

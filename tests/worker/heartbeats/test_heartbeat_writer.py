"""The optimizer steps of an unchanged script are recorded on the page, and the script does not notice."""

import json
import os
import re
import signal
import weakref
from pathlib import Path

import pytest
import torch

from raylaunch.node.linux import procfs
from raylaunch.worker.heartbeats import heartbeat_writer, shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter, StepCounter
from raylaunch.worker.runtime import stack_signal
from tests.worker.alone import Shared, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def shared():
    found = Shared()
    yield found
    os.close(found.fd)


@pytest.fixture
def counted(shared):
    return StepCounter(HeartbeatWriter(shared.numbers, shared_page.slot_offset(0)))


def optimizer(kind=torch.optim.SGD, counted=None, **options):
    """Make an optimizer of a parameter that has a gradient; `counted` counts its steps."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    made = kind([parameter], **({"lr": 0.1} | options))
    if counted is not None:
        made.register_step_post_hook(lambda it, _args, _kwargs: counted.on_step(it))
    return made


def test_each_step_is_recorded_with_its_time(shared, counted):
    made = optimizer(counted=counted)
    times = [shared["ALIVE_AT"]]
    for steps in (1, 2, 3):
        made.step()
        times.append(shared["ALIVE_AT"])
        assert shared.slot() == {"PROGRESS": steps}
    assert times == sorted(set(times))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_adam_knows_how_many_steps_were_done(shared, counted, options):
    made = optimizer(torch.optim.AdamW, counted, **options)
    made.step()
    made.step()
    assert shared.slot() == {"PROGRESS": 2, "LAST_STEP": 2}


def test_the_count_of_a_restored_optimizer_goes_on(shared, counted):
    first = optimizer(torch.optim.Adam)
    for _ in range(7):
        first.step()
    second = optimizer(torch.optim.Adam, counted)
    second.load_state_dict(first.state_dict())
    second.step()
    assert shared.slot() == {"PROGRESS": 1, "LAST_STEP": 8}


def test_the_count_of_an_optimizer_that_is_restored_after_its_first_step_goes_on(shared, counted):
    """torch.distributed.checkpoint makes a step first, to have a state to load into."""
    first = optimizer(torch.optim.Adam)
    for _ in range(7):
        first.step()
    second = optimizer(torch.optim.Adam, counted)
    second.step()
    second.load_state_dict(first.state_dict())
    second.step()
    assert shared.slot() == {"PROGRESS": 2, "LAST_STEP": 8}


class Own(torch.optim.Optimizer):
    """An optimizer that is not torch's, with any state."""

    def __init__(self, params, lr=0.1, kept=None):
        super().__init__(params, {"lr": lr})
        self.kept = kept

    @torch.no_grad()
    def step(self):
        parameter = self.param_groups[0]["params"][0]
        parameter.add_(parameter.grad, alpha=-0.1)
        if self.kept is not None:
            self.state[parameter] = self.kept


@pytest.mark.parametrize(
    ("kept", "known"),
    [
        ({"step": 12}, 12),
        ({"step": 12.0}, 12),
        ({"step": torch.tensor([12])}, 12),
        ({"step": torch.tensor([1, 2])}, 0),
        ({"step": "twelve"}, 0),
        ({"step": -1}, 0),
        ({"step": float("nan")}, 0),
        ({"step": float("inf")}, 0),
        ({"step": 1 << 70}, 0),
        ({"other": 12}, 0),
        ([12], 0),
    ],
)
def test_a_state_without_a_usable_count_is_ignored(shared, counted, kept, known):
    optimizer(Own, counted, kept=kept).step()
    assert shared.slot() == {"PROGRESS": 1} | ({"LAST_STEP": known} if known else {})


def test_a_count_in_the_parameter_group_is_used(shared, counted):
    """Some fused optimizers of other libraries keep it there."""
    made = optimizer(Own, counted)
    made.param_groups[0]["step"] = 40
    made.step()
    assert shared["LAST_STEP"] == 40


def test_a_state_that_is_a_new_object_each_time_is_read_a_few_times_only(shared, counted):
    class Odd(Own):
        looks = 0

        @property
        def state(self):
            self.looks += 1
            return {"p": {"step": 5}}

        @state.setter
        def state(self, _):
            pass

    made = optimizer(Odd, counted)
    for _ in range(50):
        made.step()
    assert made.looks < 100
    assert shared["PROGRESS"] == 50


@pytest.mark.parametrize(
    "calls",
    [
        "step beat ask",
        "beat step ask",
        "ask beat step",
        "beat ask",
        "step beat",
        "beat",
        "step commit ask",
        "ask commit",
    ],
)
def test_a_loop_counts_each_step_once_whatever_it_calls(shared, calls):
    """A heartbeat is a step only where the optimizer makes none, which may stop in the middle."""
    writer = HeartbeatWriter(shared.numbers, shared_page.slot_offset(0))
    made = optimizer(counted=StepCounter(writer))
    for completed in range(1, 6):
        for call in calls.split():
            match call:
                case "step":
                    made.step()
                case "beat":
                    writer.record_heartbeat()
                case "ask":
                    writer.should_save(completed)
                case "commit":
                    writer.record_step(completed)
    assert shared["PROGRESS"] - ("beat step" in calls) == 5  # the heartbeat before the first step is one more
    writer.record_heartbeat()
    before = shared["PROGRESS"]
    writer.record_heartbeat()
    assert shared["PROGRESS"] == before + 1


def test_of_several_optimizers_only_the_first_counts_as_progress(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    first.step()
    before = shared["ALIVE_AT"]
    second.step()
    assert shared["ALIVE_AT"] > before
    assert shared.slot() == {"PROGRESS": 1}


def test_an_optimizer_that_steps_more_often_does_not_take_over(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    for _ in range(100):
        first.step()
        for _ in range(10):
            second.step()
    assert shared.slot() == {"PROGRESS": 100}


def test_another_takes_over_at_once_when_the_counted_one_is_gone(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    first.step()
    second.step()
    gone = weakref.ref(first)
    del first
    assert gone() is None, "a reference keeps it alive"
    second.step()
    assert shared.slot() == {"PROGRESS": 2, "LAST_STEP": 2}


def test_another_takes_over_when_the_counted_one_steps_no_more(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    first.step()
    for _ in range(300):
        second.step()
    assert shared["PROGRESS"] > 150
    assert shared["LAST_STEP"] == 300


def test_the_time_of_a_save_is_recorded(shared, monkeypatch):
    """From the call of `should_checkpoint` until the script says that it has saved; `State` tells the time itself."""
    clock = [1_000]
    monkeypatch.setattr(heartbeat_writer, "monotonic_ns", lambda: clock[0])
    writer = HeartbeatWriter(shared.numbers, shared_page.slot_offset(0))

    def saves(step: int, nanoseconds: int, *, asked: int) -> int:
        writer.should_save(asked)
        clock[0] += nanoseconds
        writer.record_saved(step)
        return shared["SAVE_NS"]

    assert saves(1, 500, asked=1) == 500
    assert saves(2, 300, asked=2) == 300
    assert saves(2, 900, asked=3) == 300, "it was written in the background"
    writer.record_committed(3, 7e-7)
    assert shared["SAVE_NS"] == 700


def test_a_skipped_step_is_no_progress(shared, counted):
    """A GradScaler skips steps with infinite gradients."""
    made = optimizer(counted=counted)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1)
    scaler = torch.amp.GradScaler("cpu")
    parameter = made.param_groups[0]["params"][0]
    for factor in (1.0, float("inf"), 1.0):
        made.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(made)
        scaler.update()
        scheduler.step()
    assert shared.slot() == {"PROGRESS": 2}


def test_a_worker_that_captures_a_cuda_graph_is_busy(shared, counted, monkeypatch):
    """The graph is replayed without a call of the hook, so the worker must not be taken for a hung one."""
    answers = iter((False, True, False))
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: next(answers), raising=False)
    made = optimizer(torch.optim.Adam, counted)
    made.step()
    made.step()
    assert shared.slot() == {"PROGRESS": 1, "LAST_STEP": 1, "BUSY": 1}
    next(iter(made.state.values()))["step"] += 10
    made.step()
    assert shared.slot() == {"PROGRESS": 2, "LAST_STEP": 13}


def code_of(act):
    """Return the exit code of a forked child that calls `act`."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_worker_dies_at_a_step_after_the_lease_expired(shared, counted):
    made = optimizer(counted=counted)
    shared.numbers[shared_page.LEASE_EXPIRES_AT] = 1 << 62
    assert code_of(made.step) == 0
    assert shared.slot() == {"PROGRESS": 1}
    shared.expire_lease()
    assert code_of(made.step) == -signal.SIGKILL
    assert shared.slot() == {"PROGRESS": 1}


def test_a_lease_expires_while_the_machine_is_suspended(shared, counted, monkeypatch):
    """CLOCK_MONOTONIC stands still meanwhile, CLOCK_BOOTTIME does not."""
    made = optimizer(counted=counted)
    shared.numbers[shared_page.LEASE_EXPIRES_AT] = shared_page.lease_clock() + 3600 * 10**9
    assert code_of(made.step) == 0
    slept = shared_page.lease_clock() + 7200 * 10**9
    monkeypatch.setattr(shared_page, "lease_clock", lambda: slept)
    assert code_of(made.step) == -signal.SIGKILL


# Whole workers.

TRAIN = """
import os, subprocess, sys, torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

"""


def test_steps_of_an_unchanged_script_are_recorded(alone_worker):
    """In a forked worker, which has torch already. test_public_api.py has a program that imports it later."""
    alone_worker.worker(TRAIN + "train(5)", "fork").printed()
    assert alone_worker.shared.slot() == {"PROGRESS": 5, "LAST_STEP": 5}


CHILDREN = """
if __name__ == "__main__":
    train(2)
    pid = os.fork()
    if pid == 0:
        train(50)
        os._exit(0)
    os.waitpid(pid, 0)
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=train, args=(50,))
    child.start()
    child.join()
    assert child.exitcode == 0
    subprocess.run([sys.executable, "-c", "import sys; assert not {'raylaunch', 'torch'} & set(sys.modules)"], check=True)
    beat = "from raylaunch import worker; worker.heartbeat(); worker.should_checkpoint(70)"
    subprocess.run([sys.executable, "-c", beat], check=True)
    from raylaunch.worker.heartbeats import shared_page
    path = os.environ[shared_page.PAGE_VARIABLE].rpartition(":")[0]
    print(shared_page.SharedPage.open(path).numbers[shared_page.slot_offset(0) + shared_page.PROGRESS])
    train(1)
"""


def test_child_processes_of_a_worker_write_nothing(alone_worker):
    """Forked with an optimizer, or other programs with `raylaunch.worker`.

    A fresh interpreter, as multiprocessing spawns one, has nothing of raylaunch that could count the steps of an optimizer.
    """
    assert alone_worker.worker(TRAIN + CHILDREN, "fork").printed() == ["2"]
    assert alone_worker.shared.slot() == {"PROGRESS": 3, "LAST_STEP": 3}


def test_a_script_that_never_imports_torch(alone_worker):
    run = alone_worker.worker("import sys; print('torch' in sys.modules)")
    assert run.printed() == ["False"]
    assert alone_worker.shared.slot() == {}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("spawn", "from raylaunch import worker; worker.heartbeat(); print('done')"),
        ("fork", TRAIN + "train(5); print('done')"),
    ],
)
def test_a_worker_without_a_page_runs(alone_worker, how, text):
    os.close(alone_worker.fds.pop(0))
    assert alone_worker.worker(text, how).printed() == ["done"]


COMPILED = """
import torch, json
from torch._dynamo.utils import counters

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        parameter = self.param_groups[0]["params"][0]
        parameter.add_(parameter.grad, alpha=-0.1)

def train(make, **options):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = make([parameter])
    graphs = []
    def backend(graph, _):
        graphs.append(graph)
        return graph.forward
    step = torch.compile(lambda: optimizer.step(), backend=backend, **options)
    counters.clear()
    for _ in range(4):
        parameter.grad = torch.ones(2)
        step()
    return [len(graphs), sum(counters["graph_break"].values()), parameter.tolist()]

print(json.dumps([train(Own, fullgraph=True), train(torch.optim.AdamW)]).replace(" ", ""))
"""


def test_the_hook_does_not_change_how_a_step_is_compiled(alone_worker):
    """A step that breaks the graph anyway is counted; one that is a whole graph is not."""
    alone_worker.script(COMPILED, "plain.py")
    plain = alone_worker.module("plain", env={}).printed()
    assert alone_worker.worker(COMPILED, "fork").printed() == plain
    assert alone_worker.shared.slot() == {"PROGRESS": 4, "LAST_STEP": 4}


def test_the_hook_costs_less_than_a_step_that_does_nothing(alone_worker):
    run = alone_worker.module("tests.worker.hook_cost", env={})
    run.code()
    found = json.loads(run.out.read_text())
    assert found["our_hook_ns"] < found["step_ns"]


# Stacks.


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_worker_that_holds_the_interpreters_lock_writes_its_stack(alone_worker, how):
    script = "import re\ndef searches():\n    re.match('(a+)+$', 'a' * 60 + 'b')\nsearches()\n"
    alone_worker.worker(script, how)
    pid = until(lambda: alone_worker.shared["OWNER_PID"])
    until(lambda: "searches" in dump_stack(alone_worker, pid))
    text = dump_stack(alone_worker, pid)
    assert re.search(r'train.py", line 3 in searches\n +File ".*train.py", line 4 in <module>', text)


def dump_stack(alone_worker, pid):
    """Ask the worker for its stack; return the content of the file."""
    assert procfs.catches(pid, stack_signal.STACK_SIGNAL)
    size = len(alone_worker.wrote(alone_worker.stacks))
    os.kill(pid, stack_signal.STACK_SIGNAL)
    until(lambda: len(alone_worker.wrote(alone_worker.stacks)) > size)
    return alone_worker.wrote(alone_worker.stacks)


def test_a_program_without_a_handler_for_the_signal_is_recognized(alone_worker):
    run = alone_worker.python("", command=("sleep", "60"))
    until(lambda: "sleep" in Path(f"/proc/{run.pid}/comm").read_text())
    assert not procfs.catches(run.pid, stack_signal.STACK_SIGNAL)
    assert not procfs.catches(999_999_999, stack_signal.STACK_SIGNAL)

"""What an unchanged script writes to the page by its optimizer's steps alone, and that it does not suffer from it."""

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from raylaunch.worker import page, stacks
from raylaunch.worker.optimizers import Counted
from raylaunch.worker.watch import Watch
from tests.worker.alone import SECONDS, Shared, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def shared():
    found = Shared()
    yield found
    os.close(found.fd)


@pytest.fixture
def counted(shared):
    return Counted(Watch(shared.numbers, page.slot(0)))


def optimizer(kind=torch.optim.SGD, counted=None, **options):
    """It has a gradient, and is watched."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    made = kind([parameter], **({"lr": 0.1} | options))
    if counted is not None:
        made.register_step_post_hook(lambda it, _args, _kwargs: counted.stepped(it))
    return made


def test_each_step_is_a_mark_with_its_time(shared, counted):
    made = optimizer(counted=counted)
    times = [shared["MARKED_AT"]]
    for steps in (1, 2, 3):
        made.step()
        times.append(shared["MARKED_AT"])
        assert shared.slot() == {"MARKS": steps}
    assert times == sorted(set(times))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_adam_knows_how_many_steps_were_done(shared, counted, options):
    made = optimizer(torch.optim.AdamW, counted, **options)
    made.step()
    made.step()
    assert shared.slot() == {"MARKS": 2, "STEP": 2}


def test_a_restored_optimizer_goes_on_counting(shared, counted):
    first = optimizer(torch.optim.Adam)
    for _ in range(7):
        first.step()
    second = optimizer(torch.optim.Adam, counted)
    second.load_state_dict(first.state_dict())
    second.step()
    assert shared.slot() == {"MARKS": 1, "STEP": 8}


def test_an_optimizer_that_is_restored_after_a_first_step_too(shared, counted):
    """As torch.distributed.checkpoint does, to have a state to load into."""
    first = optimizer(torch.optim.Adam)
    for _ in range(7):
        first.step()
    second = optimizer(torch.optim.Adam, counted)
    second.step()
    second.load_state_dict(first.state_dict())
    second.step()
    assert shared.slot() == {"MARKS": 2, "STEP": 8}


class Own(torch.optim.Optimizer):
    """Keeps what it is given, and changes its parameters by one graph."""

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
def test_states_of_other_kinds_do_no_harm(shared, counted, kept, known):
    optimizer(Own, counted, kept=kept).step()
    assert shared.slot() == {"MARKS": 1} | ({"STEP": known} if known else {})


def test_a_step_that_is_kept_with_the_group(shared, counted):
    """As some fused optimizers of others do."""
    made = optimizer(Own, counted)
    made.param_groups[0]["step"] = 40
    made.step()
    assert shared["STEP"] == 40


def test_a_state_that_is_another_at_each_look_is_not_read_forever(shared, counted):
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
    assert shared["MARKS"] == 50


def test_of_several_optimizers_the_first_counts_and_others_are_signs_of_life(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    first.step()
    before = shared["MARKED_AT"]
    second.step()
    assert shared["MARKED_AT"] > before
    assert shared.slot() == {"MARKS": 1}


def test_another_that_steps_more_often_does_not_take_over(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    for _ in range(100):
        first.step()
        for _ in range(10):
            second.step()
    assert shared.slot() == {"MARKS": 100}


def test_one_that_is_gone_hands_over_at_once(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    first.step()
    second.step()
    gone = weakref.ref(first)
    del first
    assert gone() is None, "it is not kept alive"
    second.step()
    assert shared.slot() == {"MARKS": 2, "STEP": 2}


def test_one_that_steps_no_more_hands_over(shared, counted):
    first, second = optimizer(counted=counted), optimizer(torch.optim.Adam, counted)
    first.step()
    for _ in range(300):
        second.step()
    assert shared["MARKS"] > 150
    assert shared["STEP"] == 300


def test_a_step_that_is_skipped_is_no_mark(shared, counted):
    """Infinite gradients under a GradScaler; the scheduler of learning rates goes on."""
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
    assert shared.slot() == {"MARKS": 2}


def test_a_captured_step_makes_the_ones_after_it_invisible(shared, counted, monkeypatch):
    """A CUDA graph is replayed without the hook: the worker is not to be taken for a hung one."""
    made = optimizer(torch.optim.Adam, counted)
    made.step()
    counted._on_device = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made.step()
    assert shared.slot() == {"MARKS": 1, "STEP": 1, "BUSY": 1}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    next(iter(made.state.values()))["step"] += 10
    made.step()
    assert shared.slot() == {"MARKS": 2, "STEP": 13}


def code_of(act):
    """How a forked child ends that does this."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_node_that_counts_as_lost_marks_no_step(shared, counted):
    made = optimizer(counted=counted)
    shared.numbers[page.LEASE] = 1 << 62
    assert code_of(made.step) == 0
    assert shared.slot() == {"MARKS": 1}
    shared.end_lease()
    assert code_of(made.step) == -signal.SIGKILL
    assert shared.slot() == {"MARKS": 1}


def test_a_worker_whose_machine_slept_beyond_the_lease_marks_no_step(shared, counted, monkeypatch):
    """CLOCK_MONOTONIC stood still meanwhile."""
    made = optimizer(counted=counted)
    shared.numbers[page.LEASE] = page.lease_clock() + 3600 * 10**9
    assert code_of(made.step) == 0
    slept = page.lease_clock() + 7200 * 10**9
    monkeypatch.setattr(page, "lease_clock", lambda: slept)
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


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_an_unchanged_script_is_seen(alone_worker, how):
    alone_worker.worker(TRAIN + "train(5)", how).printed()
    assert alone_worker.shared.slot() == {"MARKS": 5, "STEP": 5}


CHILDREN = """
if __name__ == "__main__":
    train(2)
    pid = os.fork()
    if pid == 0:
        train(50)
        os._exit(0)
    os.waitpid(pid, 0)
    import multiprocessing
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=train, args=(50,))
        child.start()
        child.join()
        assert child.exitcode == 0
    beat = "from raylaunch import worker; worker.heartbeat(); worker.should_checkpoint(70)"
    subprocess.run([sys.executable, "-c", beat], check=True)
    train(1)
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_children_of_a_worker_are_not_the_worker(alone_worker, how):
    """Forked, spawned or of their own, with an optimizer or with `raylaunch.worker`."""
    alone_worker.worker(TRAIN + CHILDREN, how).printed()
    assert alone_worker.shared.slot() == {"MARKS": 3, "STEP": 3}


def test_a_script_that_never_imports_torch(alone_worker):
    run = alone_worker.worker("import sys; print('torch' in sys.modules)")
    assert run.printed() == ["False"]
    assert alone_worker.shared.slot() == {}


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_without_a_page_nothing_is_different(alone_worker, how):
    os.close(alone_worker._fds.pop(0))
    assert alone_worker.worker(TRAIN + "train(5); print('done')", how).printed() == ["done"]


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


def test_a_compiled_step_is_compiled_as_without_us(alone_worker):
    """Those that break the graph anyway are seen; one that is a whole graph stays one, and is not."""
    here = subprocess.run(
        [sys.executable, alone_worker.script(COMPILED)], capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert alone_worker.worker(COMPILED).printed() == here.stdout.split()
    assert alone_worker.shared.slot() == {"MARKS": 4, "STEP": 4}


def test_watching_costs_less_than_torch_itself_does_around_a_step():
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.hook_cost"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    found = json.loads(done.stdout)
    assert found["our_hook_ns"] < found["step_ns"], "a step that does nothing, by an optimizer of torch"


# Stacks.


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_worker_that_holds_the_interpreters_lock_tells_where_it_is(alone_worker, how):
    script = "import re\ndef searches():\n    re.match('(a+)+$', 'a' * 60 + 'b')\nsearches()\n"
    alone_worker.worker(script, how)
    pid = until(lambda: alone_worker.shared["OWNER"])
    until(lambda: "searches" in asked(alone_worker, pid))
    text = asked(alone_worker, pid)
    assert re.search(r'train.py", line 3 in searches\n +File ".*train.py", line 4 in <module>', text)


def asked(alone_worker, pid):
    """What is in the file once it has answered once more."""
    assert stacks.listens(pid)
    size = len(alone_worker.wrote(alone_worker.stacks))
    os.kill(pid, stacks.SIGNAL)
    until(lambda: len(alone_worker.wrote(alone_worker.stacks)) > size)
    return alone_worker.wrote(alone_worker.stacks)


def test_programs_that_would_die_of_the_question_are_known(alone_worker):
    run = alone_worker.python("", command=("sleep", "60"))
    until(lambda: "sleep" in Path(f"/proc/{run.pid}/comm").read_text())
    assert not stacks.listens(run.pid)
    assert not stacks.listens(999_999_999)

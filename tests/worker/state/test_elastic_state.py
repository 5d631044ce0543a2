"""`State` in a script: what it restores, and what it refuses."""

from __future__ import annotations

import pytest

from raylaunch.core.machine.events_and_actions import WorkersCheckpointed, WorkersStarted
from raylaunch.node.protocol.node_goal import CommitCheckpoint, ProposeCheckpoint
from raylaunch.node.protocol.node_status import StepProposed
from raylaunch.worker import State
from tests.node.harness import Node, mark, no_leaks, own_node, pipe, until

__all__ = ["mark", "no_leaks", "own_node", "pipe"]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_outside_a_launch_nothing_happens(monkeypatch):
    monkeypatch.delenv("RAYLAUNCH_PAGE", raising=False)
    state = State(counter=Counter(), every=1)
    state["epoch"] = 3
    state.commit(0)
    assert (state.restore(), state["epoch"], state.get("x"), "epoch" in state) == (0, 3, None, True)


@pytest.mark.parametrize("step", [-1, 1 << 62])
def test_steps_are_checked(step):
    with pytest.raises(ValueError, match="`step` is the number"):
        State().commit(step)


def test_other_values_are_refused():
    with pytest.raises(TypeError, match=r'`epoch` has no `state_dict`.*state\["epoch"\] = ...'):
        State(epoch=3)


COUNTS = """
    import os, random, sys
    from raylaunch.worker import State
    class Counter:
        count = 0
        def state_dict(self):
            return {"count": self.count}
        def load_state_dict(self, state):
            self.count = state["count"]
    names = sys.argv[1].split(",")
    things = {name: Counter() for name in names}
    state = State(every=1, **things)
    done = state.restore()
    print(done, things[names[0]].count, state.get("epoch"), random.random() if done else "")
    for step in range(done, done + 4):
        things[names[0]].count += 10
        state["epoch"] = step, Counter
        random.seed(step)
        state.commit(step)
        random.seed(99)
    random.seed(step)
    print(random.random())
    raise SystemExit(1)
"""


def attempt(node: Node, script: str, *args: str, **changes) -> list[str]:
    """Run one attempt; return what rank 0 has printed."""
    node.launch(script, *args, **changes)
    outcome = node.run_to_end(changes.get("nproc", 1))
    return (outcome.stdout() + outcome.stderr()).split("\n")


def test_values_objects_and_random_states_come_back(own_node):
    """Without torch. The second attempt restores the last commit of the first one, and the third that of the second."""
    script = own_node.script(COUNTS)
    first = attempt(own_node, script, "a,b")
    assert first[0].split()[:3] == ["0", "0", "None"]
    second = attempt(own_node, script, "a,b")
    assert second[0].split()[:2] == ["4", "40"]
    assert "Counter" in second[0]
    assert second[0].split()[-1] == first[1]
    third = attempt(own_node, script, "a,b")
    assert third[0].split()[:2] == ["8", "80"]
    wrong = attempt(own_node, script, "a,c")
    assert "do not have the same objects: b, c" in "".join(wrong)


COMMITS = """
    import sys
    from raylaunch.worker import State
    state = State(every=1)
    done = state.restore() if "restores" in sys.argv else 0
    for step in {steps}:
        state.commit(step)
    raise SystemExit(1)
"""


def test_a_restore_that_is_forgotten_is_told_once(own_node):
    """After a restart: in the first attempt there is nothing to restore."""
    script = own_node.script(COMMITS.format(steps="range(done, done + 3)"))
    told = "the script has not called `State.restore`"
    assert told not in "".join(attempt(own_node, script))
    assert "".join(attempt(own_node, script)).count(told) == 1
    assert told not in "".join(attempt(own_node, script, "restores"))


@pytest.mark.parametrize(("steps", "count"), [("(5, 5, 5)", 1), ("(1, 2, 0, 1)", 1), ("(1, 2, 9)", 0)])
def test_steps_that_do_not_grow_are_told_once(own_node, steps, count):
    script = own_node.script(COMMITS.format(steps=steps))
    assert "".join(attempt(own_node, script)).count("the number of a step that is committed is not above") == count


def test_steps_that_begin_anew_after_a_restore_are_told(own_node):
    script = own_node.script(COMMITS.format(steps="range(3)"))
    attempt(own_node, script, "restores")
    assert "begin with the number that `restore` returns" in "".join(attempt(own_node, script, "restores"))


FINISHES = """
    import random
    from raylaunch.worker import State
    state = State(every=1000)
    done = state.restore()
    print(done, state.get("seen"), random.random() if done else "")
    for step in range(done, done + 3):
        state["seen"] = step
        state.commit(step)
    state.finish()
    before = random.getstate()
    print(random.random())
    random.setstate(before)
    state.finish()
    raise SystemExit(1)
"""


def test_the_last_step_is_committed_when_training_is_over(own_node):
    """Whatever `every` is, and once; the random numbers go on from there."""
    script = own_node.script(FINISHES)
    first = attempt(own_node, script)
    second = attempt(own_node, script)
    assert second[0].split() == ["3", "2", first[1]]
    assert attempt(own_node, script)[0].split()[:2] == ["6", "5"]


UNFINISHED = """
    import sys
    from raylaunch.worker import State
    state = State(every=3, durable=sys.argv[1] or None)
    done = state.restore()
    for step in range(done, done + 5):
        state.commit(step)
    if "finishes" in sys.argv:
        state.finish()
"""


def test_steps_that_no_commit_has_are_told_at_the_end(own_node, tmp_path):
    """If a folder on disk lacks them, and the script has succeeded; in memory nothing is left then."""
    script = own_node.script(UNFINISHED)
    folder = str(tmp_path / "durable")
    told = f"raylaunch: the last {{}} in no commit, and not in {folder}: call `finish` of `State` when training is over"
    assert told.format("2 steps are") in attempt(own_node, script, folder)
    assert told.format("2 steps are") in attempt(own_node, script, folder)
    assert "in no commit" not in "".join(attempt(own_node, script, folder, "finishes"))
    assert "in no commit" not in "".join(attempt(own_node, script, ""))
    failing = own_node.script(UNFINISHED + "    raise SystemExit(1)")
    assert "in no commit" not in "".join(attempt(own_node, failing, folder))


TENSORS = '''
    import sys
    import torch
    from torch import nn
    from raylaunch.worker import State

    class Keeps(nn.Module):
        """A module that keeps the very tensors that it is given."""
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.arange(5.0))
        def load_state_dict(self, state, *args, **kwargs):
            self.kept = state["kept"]

    class Holds:
        """As an optimizer does, it keeps what it is given."""
        tensors = {"step": torch.tensor(0.0), "average": torch.zeros(3), "large": torch.zeros(20_000)}
        def state_dict(self):
            return {"state": dict(self.tensors)}
        def load_state_dict(self, state):
            self.tensors = state["state"]

    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    keeps = Keeps()
    holds = Holds()
    state = State(net=net, keeps=keeps, holds=holds, every=1)
    done = state.restore()
    special = [
        torch.tensor(3.5, dtype=torch.bfloat16), torch.zeros(0, 4), torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).t(), torch.tensor([1 + 2j]), torch.randn(2, 3).to_sparse(),
        nn.Parameter(torch.ones(2)), torch.ones(1).expand(4), torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 8, 64, 64).to(memory_format=torch.channels_last), torch.randn(9_000_000), torch.randn(20_000),
    ]
    def digest():
        parts = [*net.state_dict().values(), keeps.kept, *holds.tensors.values()]
        return [float(part.double().sum()) for part in parts]
    if done:
        found = state["special"]
        same = [torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)
                and a.dtype == b.dtype for a, b in zip(found, state["again"], strict=True)]
        strides = [found[n].stride() == special[n].stride() for n in (8, 9)]
        own = [found[n].untyped_storage().nbytes() == found[n].numel() * found[n].element_size() for n in (9, 10, 11)]
        print(done, all(same), digest() == state["digest"], all(strides + own), type(found[6]).__name__)
        before = digest()
        torch.manual_seed(5)
    for step in range(done, done + 3):
        net(torch.randn(2, 3, 8, 8)).sum().backward()
        for one in holds.tensors.values():
            one += 1
        keeps.kept = keeps.kept + 1
        state["special"], state["again"], state["digest"] = special, [one.clone() for one in special], digest()
        state.commit(step)
    if done:  # nothing that was restored is memory that these commits have overwritten
        print(keeps.kept.tolist() == [float(n + 6) for n in range(5)], float(holds.tensors["step"]))
    raise SystemExit(1)
'''


def test_tensors_of_all_kinds_come_back_and_are_the_scripts_own(state_node):
    script = state_node.script(TENSORS)
    first = attempt(state_node, script)
    assert first == [""], first
    second = attempt(state_node, script)
    assert second[:2] == ["3 True True True Parameter", "True 6.0"], second


OFTEN = """
    import sys, time
    from raylaunch.worker import State
    state = State()
    done = state.restore()
    print(done, flush=True)
    until = time.monotonic() + 0.5
    step = done
    while step < done + 1 or (not done and (step < 1000 or time.monotonic() < until)):
        state.commit(step)
        step += 1
    raise SystemExit(1)
"""


def test_auto_goes_on_with_the_interval_of_what_is_restored(own_node):
    """So the first step of the second attempt is not committed, as it would be if that were the first attempt."""
    script = own_node.script(OFTEN)
    found = [attempt(own_node, script)[0] for _ in range(3)]
    assert found[0] == "0"
    assert int(found[1]) > 3
    assert found[2] == found[1]


TWO = """
    from raylaunch.worker import State
    first, second = State(every=1), State(every=1)
    first["x"] = 7
    print(first.restore(), first.get("x"), flush=True)
    first.commit(0)
    for method in (second.restore, lambda: second.commit(1)):
        try:
            method()
        except RuntimeError as error:
            print(error, flush=True)
    raise SystemExit(1)
"""


def test_a_worker_has_one_state(own_node):
    """A second one would overwrite what the first has committed. In the next attempt the script makes new ones."""
    script = own_node.script(TWO)
    refused = "this worker has another `State` already: make one `State` of all objects that are to survive"
    assert attempt(own_node, script) == ["0 7", refused, refused, ""]
    assert attempt(own_node, script)[0] == "1 7"


GREEDY = """
    from raylaunch.worker import State
    state = State(every=1)
    state["x"] = bytes(1000)
    try:
        state.commit(0)
    except MemoryError as error:
        print(error)
    raise SystemExit(1)
"""


def test_too_little_memory_is_an_error_of_commit(own_node):
    own_node.supervisor.close()
    node = Node(env=own_node.supervisor.spec.env, state_memory=10_000 / 2**30, preload=())
    node.folder, node.mark = own_node.folder, own_node.mark
    node.start()
    node.set(run_dir=str(own_node.folder / "run"), cwd=str(own_node.folder))
    try:
        (line, *_) = attempt(node, node.script(GREEDY))
        assert "the job allows no more; `state_memory` sets how much it may be" in line
    finally:
        node.supervisor.close()


ENDS = """
    import os, sys, time
    from raylaunch.worker import State, should_checkpoint
    state = State(every=1000000)
    done = state.restore()
    print(done, state.get("step"), flush=True)
    if done:
        raise SystemExit(1)
    for step in range(done, 10**6):
        while step == 1000 and not os.path.exists("go-on"):
            time.sleep(0.001)
        state["step"] = step
        if sys.argv[1:] and should_checkpoint(step):
            print("asked", flush=True)
        state.commit(step)
"""


def stops_at(node: Node, step: int) -> None:
    """Have all ranks commit this step as their last one, before which they wait until all of them know."""
    node.supervisor.handle(ProposeCheckpoint(attempt=node.attempt, step=step))
    assert node.wait(StepProposed).reached < step
    node.supervisor.handle(CommitCheckpoint(attempt=node.attempt, step=step))
    (node.folder / "go-on").touch()


def said(node: Node) -> str:
    """Return what rank 0 has printed, after the agent has answered its requests."""
    assert not [event for event in node.events_within(0.02) if isinstance(event, WorkersCheckpointed)]
    log = node.rank_folder() / "stdout.log"
    return log.read_text() if log.exists() else ""


def test_commit_is_where_workers_stop_before_a_planned_change(own_node):
    """Though it is not the turn of that step, it is committed, and no step is done after it."""
    script = own_node.script(ENDS)
    own_node.launch(script)
    own_node.wait(WorkersStarted)
    until(lambda: said(own_node), "the script to begin")
    stops_at(own_node, 2000)
    assert own_node.wait(WorkersCheckpointed).step == 2000
    own_node.stop(grace=60)
    assert attempt(own_node, script)[0] == "2001 2000"


def test_should_checkpoint_decides_where_a_script_ends_that_calls_it_too(own_node):
    own_node.launch(own_node.script(ENDS), "saves")
    own_node.wait(WorkersStarted)
    until(lambda: said(own_node), "the script to begin")
    stops_at(own_node, 2000)
    until(lambda: "asked" in said(own_node), "the script to be asked")
    said(own_node)
    own_node.stop(grace=0)

"""`raylaunch.WorkerGroup`: an object in each rank, whose methods a program that uses Ray calls."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import left_in_ray, wait_until
from tests.private_cluster import MARK, WARM_TORCH, marked
from tests.warm_python import WarmPython

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PRELUDE = """
import asyncio, concurrent.futures, json, os, signal, sys, threading, time
import ray, raylaunch

class Counter:
    def __init__(self, start, step=1):
        self.rank, self.count, self.step = int(os.environ["RANK"]), start, step
    def add(self, number):
        self.count += self.step * number
        return self.count
    def rank_and(self, value):
        return self.rank, value
    def fail(self):
        raise LookupError(f"of rank {self.rank}")
    def die(self, rank, path):
        if rank == self.rank and not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.add(1)
    def sleep(self, seconds):
        time.sleep(seconds)
    def large(self, array):
        return bool((array == 7).all()), array.flags.writeable, array + 1

def group_of(kind, *args, **settings):
    defaults = {"nproc_per_node": 2, "backend": "none", "preload": [], "show": "none"}
    return raylaunch.WorkerGroup(kind, *args, **(defaults | settings))

def error_of(work):
    try:
        work()
    except Exception as error:
        return type(error).__name__
"""


@pytest.fixture
def torch_env(warm_torch: WarmPython) -> dict[str, str]:
    """The environment of a program whose ranks use torch."""
    return {WARM_TORCH: str(warm_torch.executable())}


def outcome(launcher: Any, program: str, **env: str) -> Any:
    """Return what a program prints as JSON. Ray may print, too."""
    path = launcher.folder / "program.py"
    path.write_text(PRELUDE + textwrap.dedent(program))
    done = launcher.python(str(path), env=env or None)
    assert done.returncode == 0, done.stderr
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(found)


def test_calls(launcher):
    """Results are by rank and in order, futures can be awaited, and an exception leaves the group as it is."""
    found = outcome(
        launcher,
        """
        import numpy as np
        import logging
        from ray._private import worker
        ray.init(log_to_driver=False, logging_level="WARNING")
        found = {}
        set_by_program = logging.getLogger("ray").level, worker.print_to_stdstream

        class Dead:
            def get(self):
                os._exit(1)

        with group_of(Counter, 10, step=2) as group:
            found["ranks"] = [(place.rank, place.node, place.pid != os.getpid()) for place in group.ranks]
            found["call"] = group.call("add", 1)
            found["scattered"] = group.call("rank_and", {"x": raylaunch.scatter(["a", "b"])})
            found["one"] = group.call_one(1, "rank_and", None)
            failing = ray.remote(num_cpus=0)(lambda: 1 / 0).remote(), ray.remote(num_cpus=0)(Dead).remote().get.remote()
            found["refs"] = group.call("rank_and", [ray.put("x"), raylaunch.scatter([ray.put(1), 2])])
            found["failed refs"] = [error_of(lambda ref=ref: group.call("rank_and", ref)) for ref in failing]
            try:
                group.call("fail")
            except raylaunch.CallFailedError as error:
                found["error"] = type(error.__cause__).__name__, f"of rank {error.rank}" in str(error)
            found["wrong"] = [
                error_of(lambda: group.call("rank_and", raylaunch.scatter([1]))),
                error_of(lambda: group.call_one(2, "rank_and", 1)),
                error_of(lambda: group.call("rank_and", threading.Lock())),
                error_of(lambda: group.call("missing")),
                error_of(lambda: group.call("sleep", 1, timeout=0.01)),
            ]
            first, second = group.submit("add", 1), group.submit("add", 1)
            concurrent.futures.wait([second])
            found["order"] = first.done(), first.result(), second.result()

            async def both():
                return await asyncio.gather(group.submit("add", 1), group.submit_one(0, "add", 1))

            found["awaited"] = asyncio.run(both())
            is_seven, is_writable, more = zip(*group.call("large", np.full(100_000, 7)))
            found["large"] = is_seven, is_writable, [int(array.sum()) for array in more]
        found["closed"] = error_of(lambda: group.call("add", 1))
        found["class"] = error_of(lambda: group_of(Counter, wrong=1)), error_of(lambda: group_of(Counter, 1, detach=True))
        found["still connected"] = ray.get(ray.put(1))
        found["same logging"] = set_by_program == (logging.getLogger("ray").level, worker.print_to_stdstream)
        print(json.dumps(found))
        """,
    )
    assert found == {
        "ranks": [[0, 0, True], [1, 0, True]],
        "call": [12, 12],
        "scattered": [[0, {"x": "a"}], [1, {"x": "b"}]],
        "one": [1, None],
        "refs": [[0, ["x", 1]], [1, ["x", 2]]],
        "failed refs": ["RayTaskError(ZeroDivisionError)", "RayTaskError(ActorDiedError)"],
        "error": ["LookupError", True],
        "wrong": ["ValueError", "ValueError", "TypeError", "CallFailedError", "TimeoutError"],
        "order": [True, [14, 14], [16, 16]],
        "awaited": [[18, 18], 20],
        "large": [[True, True], [True, True], [800_000, 800_000]],
        "closed": "RunStoppedError",
        "class": ["TypeError", "ConfigError"],
        "still connected": 1,
        "same logging": True,
    }


def test_cells_of_a_notebook(launcher):
    """Their event loop runs while they do, also in cells that block; a class is of no file, and can be changed."""
    found = outcome(
        launcher,
        """
        import ast
        ray.init(log_to_driver=False, logging_level="ERROR")
        cells = [
            "class Cell:\\n    def get(self, value):\\n        return int(os.environ['RANK']), value",
            "group = group_of(Cell, max_restarts=1)",
            "found = [group.call('get', 1), await group.submit('get', 2)]",
            "os.kill(group.ranks[1].pid, signal.SIGKILL)",
            "found.append(await group.submit('get', 3, retry=True))",
            "group.close()",
            "class Cell:\\n    def get(self):\\n        return 'other'",
            "with group_of(Cell) as group:\\n    found += await asyncio.gather(group.submit('get'), asyncio.sleep(0))",
        ]

        async def kernel():
            for cell in cells:
                waiting = eval(compile(cell, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), globals())
                if waiting is not None:
                    await waiting

        asyncio.run(kernel())
        print(json.dumps({"found": found}))
        """,
    )
    assert found["found"] == [[[0, number], [1, number]] for number in (1, 2, 3)] + [["other", "other"], None]


def test_a_rank_that_dies(launcher):
    """The call in which it happens raises or is made again; a later call is told; without restarts the group ends."""
    found = outcome(
        launcher,
        """
        ray.init(log_to_driver=False, logging_level="ERROR")
        found, told = {}, []

        def restarted(restart):
            told.append((restart.ranks, restart.attempt, group.call("rank_and", "set up")))

        with group_of(Counter, 0, max_restarts=3, on_restart=restarted) as group:
            later = []
            try:
                interrupted = group.submit("die", 1, "first")
                later.append(group.submit("add", 1))
                interrupted.result()
            except raylaunch.RankRestartedError as error:
                found["error"] = error.restart.ranks, error.restart.completed, error.interrupted
            found["later"] = later[0].result()
            found["again"] = group.call("die", 0, "second", retry=True)
            os.kill(group.ranks[1].pid, signal.SIGKILL)
            while len(told) < 3:
                time.sleep(0.01)
            try:
                group.call("add", 1)
            except raylaunch.RankRestartedError as error:
                found["idle"] = error.restart.ranks, error.interrupted
            found["then"] = group.call("add", 1)
            os.kill(group.ranks[0].pid, signal.SIGKILL)
            found["over"] = error_of(lambda: group.call("add", 1)), error_of(lambda: group.call("add", 1))
        found["told"] = told
        print(json.dumps(found))
        """,
    )
    ranks = [[0, "set up"], [1, "set up"]]
    assert found == {
        "error": [[1], None, True],
        "later": [1, 1],
        "again": [1, 1],
        "idle": [[1], False],
        "then": [1, 1],
        "over": ["JobFailedError", "JobFailedError"],
        "told": [[[1], 2, ranks], [[0], 3, ranks], [[1], 4, ranks]],
    }


def test_what_is_asked_for_while_on_restart_runs(launcher):
    """A restart ends with the attempt that it has begun, and not with `on_restart`; nobody need wait for calls there."""
    found = outcome(
        launcher,
        """
        class Slow(Counter):
            def __init__(self):
                super().__init__(0)
                time.sleep(0.5)

        made, asked = [], threading.Event()

        def restarted(restart):
            if restart.attempt == 2:
                made.extend(group.submit("add", 1) for _ in range(3))
                concurrent.futures.wait(made)
                asked.set()
                while group._dispatcher.world.is_whole:
                    time.sleep(0.01)
            else:
                made.extend(group.submit("sleep", 0.1) for _ in range(2))

        with group_of(Slow, max_restarts=1, ray={"address": "none"}, on_restart=restarted) as group:
            os.kill(group.ranks[0].pid, signal.SIGKILL)
            asked.wait(60)
            group.restart()
            found = {"attempt": group._dispatcher.world.attempt, "then": group.call("add", 1)}
            found["made"] = len(concurrent.futures.wait(made, timeout=10).done)
        print(json.dumps(found))
        """,
    )
    assert found == {"attempt": 3, "then": [1, 1], "made": 5}


def test_a_rank_that_is_stopped_does_not_answer(launcher):
    """The call tells which rank has failed, and not that its SIGTERM made another one exit. `sys.exit` alone is told."""
    found = outcome(
        launcher,
        """
        class Exiting(Counter):
            def exit(self):
                sys.exit(f"rank {self.rank}")
            def exit_at_sigterm(self):
                told = []
                signal.signal(signal.SIGTERM, lambda *_: told.append(True))
                open(f"waits-{self.rank}", "w").close()
                while not told and not (self.rank == 1 and os.path.exists("waits-0")):
                    time.sleep(0.01)
                if not told:
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.exit("SIGTERM")

        found = []
        with group_of(Exiting, 0, ray={"address": "none"}) as group:
            for method in ("exit", "exit_at_sigterm"):
                try:
                    group.call(method)
                except raylaunch.RaylaunchError as error:
                    found.append([type(error).__name__, str(error).splitlines()[0]])
        print(json.dumps({"found": found}))
        """,
    )["found"]
    assert [name for name, _ in found] == ["CallFailedError", "JobFailedError"]
    assert "SystemExit: rank" in found[0][1]
    assert "rank 1" in found[1][1]


def test_a_rank_goes_on_whatever_a_method_raises_or_returns(launcher):
    """Only one that exits has failed, also with code 0: the others would wait for it."""
    found = outcome(
        launcher,
        """
        class Nameless(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        class Leaving:
            def __reduce__(self):
                return sys.exit, ("here",)

        class Wild(Counter):
            def raises(self):
                raise Nameless
            def is_cancelled(self):
                raise asyncio.CancelledError
            def returns(self):
                return Leaving()
            def leave(self):
                if self.rank == 1:
                    os._exit(0)

        with group_of(Wild, 0, max_restarts=1, ray={"address": "none"}) as group:
            found = {"errors": [error_of(lambda name=name: group.call(name)) for name in ("raises", "is_cancelled", "returns")]}
            found["goes on"] = group.call("add", 1), group._dispatcher.world.attempt
            try:
                group.call("leave", timeout=60)
            except raylaunch.RankRestartedError as error:
                found["left"] = error.restart.ranks, error.restart.why
            found["again"] = group.call("add", 1)
        print(json.dumps(found))
        """,
    )
    left = "rank 1 on node-1 exited with code 0 (before its function returned); restart 1 of 1"
    assert found == {
        "errors": ["CallFailedError"] * 3,
        "goes on": [[1, 1], 1],
        "left": [[1], left],
        "again": [1, 1],
    }


def test_a_program_that_has_disconnected_from_ray(launcher):
    """Its group has ended, and says why. What it closes then is not of its next connection."""
    found = outcome(
        launcher,
        """
        from ray.util.placement_group import placement_group
        ray.init(log_to_driver=False, logging_level="ERROR")
        ranks = raylaunch.rank_env(placement_group([{"CPU": 1}]))
        group = group_of(Counter, 0, max_restarts=1)
        group.call("rank_and", ray.put(1))
        ray.shutdown()
        try:
            group.call("sleep", 100, timeout=60)
        except Exception as error:
            found = {"why": str(error)}
        group.close()
        ray.shutdown()
        ray.init(log_to_driver=False, logging_level="ERROR")
        ranks.close()
        print(json.dumps(found | {"connected": ray.get(ray.put(1))}))
        """,
    )
    why = "this program has closed its connection to Ray, and so ended what it had there"
    assert found == {"why": why, "connected": 1}


def test_a_rank_that_reads_nothing_holds_up_no_restart(launcher):
    """Not even while a call is sent to it that is larger than all buffers on the way."""
    found = outcome(
        launcher,
        """
        import numpy as np
        with group_of(Counter, 0, ray={"address": "none"}) as group:
            os.kill(group.ranks[1].pid, signal.SIGSTOP)
            call = group.submit("large", np.ones(5_000_000))
            group.restart()
            found = {"call": error_of(call.result), "again": group.call("add", 1)}
            os.kill(group.ranks[0].pid, signal.SIGSTOP)
            group.submit("large", np.ones(5_000_000))
        print(json.dumps(found))
        """,
    )
    assert found == {"call": "RankRestartedError", "again": [1, 1]}


def test_objects_of_ray(launcher):
    """A rank has an object where Ray has it, for as long as it likes; results can stay in Ray, after the group, too."""
    found = outcome(
        launcher,
        """
        import numpy as np
        ray.init(log_to_driver=False, logging_level="ERROR")

        class Keeper:
            def __init__(self, array=None):
                self.array = array
            def take(self, array):
                self.array = array
                place = array.ctypes.data
                for line in open("/proc/self/maps"):
                    start, end = (int(text, 16) for text in line.split()[0].split("-"))
                    if start <= place < end:
                        return "plasma" in line, array.flags.writeable
            def is_full_of(self, number):
                return self.array is not None and bool((self.array == number).all())
            def drop(self):
                self.array = None
            def make(self, number):
                return {"rank": int(os.environ["RANK"]), "array": np.full(500_000, number)}
            def failing(self):
                return [lambda: 1 / 0, None]

        @ray.remote(num_cpus=0)
        class Reader:
            def sum(self, value):
                return int(value["array"].sum())

        def kill_lender(group):
            (lender,) = group._dispatcher._deliveries._lenders.values()
            pid = ray.get(lender.__ray_call__.remote(lambda self: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)

        def free():
            return int(ray.available_resources()["object_store_memory"])

        def wait_for_free(bytes):
            until = time.monotonic() + 60
            while free() < bytes and time.monotonic() < until:
                time.sleep(0.05)
            return free() >= bytes

        first = free()
        with group_of(Keeper, ray.put(np.full(500_000, 3)), max_restarts=4) as group:
            found = {"created": group.call("is_full_of", 3)}
            kept = ray.put(np.full(500_000, 7))
            found["mapped"] = group.call("take", kept)
            del kept
            for number in range(40):  # the store has room for 20
                ray.put(np.full(500_000, number))
            found["kept"] = group.call("is_full_of", 7)
            found["plain"] = group.call("take", np.full(500_000, 8))[0][1], group.call("is_full_of", 8)
            group.call("drop")
            refs = group.call("make", 2, returns="ref")
            kill_lender(group)
            found["without lender"] = group.call("take", ray.put(np.ones(500_000)), retry=True)
            found["restarts"] = group._dispatcher.world.attempt
            kill_lender(group)
            found["not held"] = error_of(lambda: group.call("is_full_of", 1))
            group.call("drop")
            kill_lender(group)
            found["not stored"] = error_of(lambda: group.call("make", 4, returns="ref"))
            one = group.call_one(1, "make", 4, returns="ref")
            group.call("take", np.full(9, 3))
            found["wrong"] = error_of(lambda: group.call("make", 1, returns="refs"))
            found["through"] = group.call("is_full_of", raylaunch.scatter([ray.put(3), ray.put(2)]))
        values = ray.get(refs)
        found["refs"] = [(value["rank"], int(value["array"].sum())) for value in values]
        found["read"] = ray.get([Reader.remote().sum.remote(ref) for ref in (refs[1], one)])
        found["failing"] = error_of(lambda: group_of(Keeper, ray.remote(num_cpus=0)(lambda: 1 / 0).remote()))
        with group_of(Counter, 0, ray={"address": "none"}) as group:  # ranks are on this node all the same
            found["local"] = group.call("large", ray.put(np.full(500_000, 7)))[1][:2]
            found["local ref"] = [ray.get(ref)[1] for ref in group.call("rank_and", 5, returns="ref")]
        del values, refs, one
        found["free"] = wait_for_free(first)
        print(json.dumps(found))
        """,
    )
    assert found == {
        "created": [True, True],
        "mapped": [[True, False]] * 2,
        "kept": [True, True],
        "plain": [True, [True, True]],
        "without lender": [[True, False]] * 2,
        "restarts": 2,
        "not held": "RankRestartedError",
        "not stored": "CallFailedError",
        "wrong": "ValueError",
        "through": [True, False],
        "refs": [[0, 1_000_000], [1, 1_000_000]],
        "read": [1_000_000, 2_000_000],
        "failing": "RayTaskError(ZeroDivisionError)",
        "local": [True, False],
        "local ref": [5, 5],
        "free": True,
    }


ELASTIC = """
ray.init(log_to_driver=False, logging_level="ERROR")

class Model:
    elastic = True
    def __init__(self):
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        torch.manual_seed(0)
        self.torch, self.dist = torch, dist
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = raylaunch.worker.State(every=1, model=self.model, optimizer=self.optimizer)
    def step(self, die=""):
        done = self.state.get("done", 0)
        if die and self.dist.get_rank() == 1 and not os.path.exists(die):
            open(die, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.zero_grad()
        self.model(self.torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.state["done"] = done + 1
        self.state.commit(done)
        return os.getpid(), done + 1, float(self.model.module.weight.sum())

import raylaunch.worker
with raylaunch.WorkerGroup(Model, nproc_per_node=2, show="none", max_restarts=2) as group:
    calm = [group.call("step") for _ in range(4)]
with raylaunch.WorkerGroup(Model, nproc_per_node=2, show="none", max_restarts=2) as group:
    before = [group.call("step"), group.call("step")]
    after = [group.call("step", "died", retry=True)]
    os.kill(group.ranks[0].pid, signal.SIGKILL)
    after.append(group.call("step", retry=True))
    group.restart()
    pids = [place.pid for place in group.ranks]
    restored = group.call("step")
found = {
    "weights": [[weight for _, _, weight in call] for call in before + after] == [[w for *_, w in c] for c in calm],
    "steps": [call[0][1] for call in [*before, *after, restored]],
    "stayed": [before[1][rank][0] == after[0][rank][0] for rank in (0, 1)],
    "stayed then": [after[0][rank][0] == after[1][rank][0] for rank in (0, 1)],
    "all anew": [after[1][rank][0] == pids[rank] for rank in (0, 1)],
}
print(json.dumps(found))
"""


def test_ranks_that_stay_keep_their_objects(launcher, torch_env):
    """With `elastic` and `State`: also one that waits for a call. No committed step is lost, nor done twice."""
    assert outcome(launcher, ELASTIC, **torch_env) == {
        "weights": True,
        "steps": [1, 2, 3, 4, 5],
        "stayed": [True, False],
        "stayed then": [False, True],
        "all anew": [False, False],
    }


def test_another_number_of_nodes(launcher, torch_env):
    """A resize has its turn among the calls. `State` goes on, and ranks that stay keep their objects.

    What is too large for the cluster is refused at once; what the cluster does not provide in time is given up.
    """
    found = outcome(
        launcher,
        ELASTIC.partition("import raylaunch.worker\n")[0]
        + """
import raylaunch.worker
from ray.util.placement_group import placement_group, placement_group_table
found, told = {}, []

def restarted(restart):
    told.append((restart.ranks, restart.world_size_before, restart.world_size, restart.completed))
    found["in on_restart"] = error_of(lambda: group.resize(1))

settings = {"nproc_per_node": 1, "placement": "pack", "show": "none", "max_restarts": 2}
all_cpus = ray.available_resources()["CPU"]
with raylaunch.WorkerGroup(Model, on_restart=restarted, **settings) as group:
    before = group.submit("step")
    resized = concurrent.futures.ThreadPoolExecutor().submit(group.resize, 2)
    first, begun = before.result()[0], time.monotonic()
    while len(group) < 2 and not resized.done():
        time.sleep(0.01)
    second = group.call("step")
    resized.result()
    found["grown"] = [step for _, step, _ in second], second[0][0] == first[0]
    found["same weights"] = second[0][2] == second[1][2]
    group.resize("1:1")
    third = group.call("step")
    found["shrunk"] = [step for _, step, _ in third], third[0][0] == first[0]
    found["quick"] = time.monotonic() - begun < 60  # not the ten minutes that a step may take
    found["same"] = group.resize(1), told[-1][1:3]
    found["wrong"] = [error_of(lambda value=value: group.resize(value)) for value in (1000, 0, "2:1", "many")]
    while ray.available_resources()["CPU"] < all_cpus - 1:  # Ray has not yet all that the other node had
        time.sleep(0.02)
    free = placement_group([{"CPU": all_cpus - 1}])
    ray.get(free.ready())
    group._placement_seconds = 2
    try:
        group.resize(2)
    except raylaunch.ClusterError as error:
        found["none free"] = error.message
    found["goes on"] = [step for _, step, _ in group.call("step")]
    found["told"] = told
print(json.dumps(found))
""",
        **torch_env,
    )
    assert found == {
        "in on_restart": "RuntimeError",
        "grown": [[2, 2], True],
        "same weights": True,
        "shrunk": [[3], True],
        "quick": True,
        "same": [None, [2, 1]],
        "wrong": ["ClusterError", "ValueError", "ValueError", "ValueError"],
        "none free": "the cluster did not provide 2 nodes within 2 s: the group goes on with 1",
        "goes on": [4],
        "told": [[[], 1, 2, 1], [[], 2, 1, 2]],
    }


def test_each_rank_reads_its_part_of_a_dataset(launcher):
    """Of Ray Data, in each epoch; after a rank has died in one, and after a resize, of a split among those there are.

    A split can also be an argument. Nothing of a split outlives the group.
    """
    found = outcome(
        launcher,
        """
        import ray.data, raylaunch.worker
        from ray._private.state import actors

        class Reader(Counter):
            def read(self, part=None, die=""):
                part = part or raylaunch.worker.dataset_shard("train")
                rows = []
                for batch in part.iter_batches(batch_size=10):
                    rows += map(int, batch["id"])
                    if die and self.rank == 1 and not os.path.exists(die):
                        open(die, "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                return rows
            def missing(self):
                raylaunch.worker.dataset_shard("test")

        def coordinators():
            found = actors().values()
            return [a for a in found if a["ActorClassName"] == "SplitCoordinator" and a["State"] != "DEAD"]

        ray.init(log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        numbers = ray.data.range(100, override_num_blocks=10)
        found, died = [], os.path.abspath("died")
        settings = {"placement": "pack", "max_restarts": 1, "cpus_per_worker": 0.1, "preload": ["ray.data"]}
        with group_of(Reader, 0, datasets={"train": numbers}, **settings) as group:
            found += [group.call("read"), group.call("read"), group.call("read", die=died, retry=True)]
            found.append(group.call("read", raylaunch.scatter(numbers.streaming_split(len(group), equal=True))))
            group.resize(2)
            found.append(group.call("read"))
            try:
                group.call("missing")
            except raylaunch.CallFailedError as error:
                missing = str(error.__cause__)
        until = time.monotonic() + 60
        while coordinators() and time.monotonic() < until:
            time.sleep(0.1)
        print(json.dumps({"each": [[len(rows) for rows in parts] for parts in found],
                          "all": [sorted(row for rows in parts for row in rows) == [*range(100)] for parts in found],
                          "died": os.path.exists(died), "missing": missing, "left": len(coordinators()),
                          "wrong": error_of(lambda: group_of(Reader, 0, datasets={"train": [1, 2]}))}))
        """,
    )
    assert found == {
        "each": [*[[50, 50]] * 4, [25] * 4],
        "all": [True] * 5,
        "died": True,
        "missing": "this rank has no dataset 'test': `datasets` of its `WorkerGroup` has 'train'",
        "left": 0,
        "wrong": "TypeError",
    }


def test_groups_share_a_placement_group(launcher):
    """With each other, and with actors of the caller. It stays, and nothing else is reserved, also over a restart."""
    found = outcome(
        launcher,
        """
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        ray.init(log_to_driver=False, logging_level="ERROR")
        shared = placement_group([{"CPU": 1}] * 3)

        class Letters:
            left = ["a", "b"]
            def next(self):
                return self.left.pop()

        free = lambda: sum(group["state"] != "REMOVED" for group in placement_group_table().values())
        found = {"groups": []}
        more = {"placement_group": shared, "nproc_per_node": 1, "cpus_per_worker": 0.25}
        with group_of(Counter, 0, bundles=[0, 2], max_restarts=1, **more) as policy:
            with group_of(Counter, 5, name="rollout", **more) as rollout:
                strategy = PlacementGroupSchedulingStrategy(shared, 1)
                actor = ray.remote(num_cpus=0.5)(Letters).options(scheduling_strategy=strategy).remote()
                found["calls"] = policy.call("add", 1), rollout.call("add", 1), ray.get(actor.next.remote())
                found["groups"].append(free())
                found["again"] = policy.call("die", 0, os.path.abspath("died"), retry=True)
                found["nodes"] = [place.node for place in rollout.ranks]
            found["rest"] = policy.call("add", 1), ray.get(actor.next.remote())
        found["groups"].append(free())
        found["wrong"] = [
            error_of(lambda: group_of(Counter, 0, bundles=[0])),
            error_of(lambda: group_of(Counter, 0, bundles=[3], placement_group=shared)),
            error_of(lambda: group_of(Counter, 0, placement_group="shared")),
        ]
        found["state"] = placement_group_table(shared)["state"]
        ray.kill(actor)
        remove_placement_group(shared)
        print(json.dumps(found))
        """,
    )
    assert found == {
        "groups": [1, 1],
        "calls": [[1, 1], [6, 6, 6], "b"],
        "again": [1, 1],
        "nodes": [0, 1, 2],
        "rest": [[2, 2], "a"],
        "wrong": ["TypeError", "ValueError", "TypeError"],
        "state": "CREATED",
    }


KNOWN = """
class Sleeper(Counter):
    def nap(self, until):
        print("rank", self.rank, "naps", flush=True)
        open(f"naps-{self.rank}", "w").close()
        while not os.path.exists(until):
            time.sleep(0.05)

ray.init(log_to_driver=False, logging_level="ERROR")
with group_of(Sleeper, 0) as group:
    group.call("nap", os.path.abspath("awake"))
    open("idle", "w").close()
    while not os.path.exists("over"):
        time.sleep(0.05)
"""


def test_commands_know_groups_as_runs(launcher, tmp_path):
    """By the name of the class: while a call is carried out, while none is, and when the group has ended."""
    (tmp_path / "program.py").write_text(PRELUDE + KNOWN)

    def said(*command: str) -> str:
        done = launcher.python("raylaunch", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def listed(*flags: str) -> list[Any]:
        runs = json.loads(said("ps", "--json", *flags))["runs"]
        return [(run["name"], run["state"], run["workers"]) for run in runs if run["folder"].startswith(str(tmp_path))]

    def are_at(place: str) -> bool:
        return re.search(rf"^2 ranks at {place}", said("stacks", "Sleeper"), re.MULTILINE) is not None

    program = launcher.command(str(tmp_path / "program.py"))
    try:
        wait_until(lambda: len([*tmp_path.glob("naps-*")]) == 2 or program.poll() is not None, 100, "the call")
        assert listed() == [("Sleeper", "running", 2)]
        assert re.match(r"Sleeper \S+: running, 2 workers on 1 node\n", said("status", "Sleeper"))
        assert sorted(said("logs", "Sleeper").splitlines()) == [f"[{rank}] rank {rank} naps" for rank in range(2)]
        wait_until(lambda: are_at(r"program.py:\d+ in nap"), 60, "the stacks of the call")
        report = Path(said("report", "Sleeper").strip())
        assert "Sleeper" in report.read_text()
        (tmp_path / "awake").touch()
        wait_until((tmp_path / "idle").exists, 100, "the end of the call")
        wait_until(lambda: are_at(r".*: 0-1\n(    .*\n)*    .* in _answer_next"), 60, "the stacks between calls")
        assert listed() == [("Sleeper", "running", 2)]
        (tmp_path / "over").touch()
        wait_until(lambda: program.poll() is not None, 100, "the end of the program")
        assert program.poll() == 0
        assert (listed(), listed("-a")) == ([], [("Sleeper", "succeeded", 2)])
        assert said("status", "Sleeper").startswith("Sleeper ")
        assert len(said("logs", "Sleeper").splitlines()) == 2
        assert json.loads(said("report", "--json", "Sleeper"))["state"] == "succeeded"
    finally:
        program.kill()
        program.communicate()


CALLERS = """
ray.init(log_to_driver=False, logging_level="ERROR")
settings = {"cpus_per_worker": 0.1, "env": {"MARK": os.environ["MARK"]}}

def hold(kind, own=None):
    group = group_of(Counter, 0, name=kind.replace(" ", "-"), placement_group=own, **settings)
    stored = group.call("rank_and", "stored", returns="ref")  # an actor of the group's does that
    assert group.call("add", 1) == [1, 1]
    with open(kind + ".new", "w") as file:
        json.dump([os.getpid(), own and own.id.hex()], file)
    os.rename(kind + ".new", kind)
    return group, stored

class Holder:
    def begin(self, folder, *args):
        os.chdir(folder)
        self.held = hold(*args)
    def drop(self):
        del self.held

def task(folder):
    os.chdir(folder)
    held = hold("task")
    time.sleep(1000)

here = os.getcwd()
mine = hold("driver")
while not os.path.exists("others"):
    time.sleep(0.02)
hold("closed")[0].close()
with hold("with")[0]:
    pass
waiting = ray.remote(num_cpus=0, max_retries=0)(task).remote(here)
own = ray.util.placement_group([{"CPU": 1}])
holders = [ray.remote(num_cpus=0)(Holder).remote() for _ in range(3)]
kinds = ("dropped", None), ("actor", None), ("actor in a group", own)
ray.get([holder.begin.remote(here, *args) for holder, args in zip(holders, kinds)])
ray.get(holders[0].drop.remote())
open("all", "w").close()
time.sleep(1000)
""".replace('"MARK"', f'"{MARK}"')


def test_nothing_is_left_of_a_group(launcher, tmp_path):
    """It is closed, or its object is collected, or its caller is killed, whatever that is in Ray. Its program goes on.

    What the caller has reserved stays, until its program ends.
    """
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + CALLERS)
    mark = os.urandom(8).hex()
    program = launcher.command(str(path), env={MARK: mark})

    def told(kind: str) -> tuple[int, str]:
        wait_until(lambda: (tmp_path / kind).exists() or program.poll() is not None, 200, f"the group: {kind}")
        return json.loads((tmp_path / kind).read_text() or "null")

    def ranks() -> int:
        return sum("rank" in title(pid) for pid in marked(mark))

    try:
        told("driver")
        its = set(left_in_ray(launcher.cluster))
        assert ranks() == 2
        (tmp_path / "others").touch()
        told("all")
        callers = {kind: told(kind) for kind in ("actor", "actor in a group", "task")}
        for pid, _ in callers.values():
            os.kill(pid, signal.SIGKILL)
        kept = its | {f"group {callers['actor in a group'][1]} CREATED"}
        wait_until(lambda: set(left_in_ray(launcher.cluster)) == kept, 100, "the actors and reservations to be gone")
        wait_until(lambda: ranks() == 2, 100, "all ranks but those of the program's own group to be gone")
        assert program.poll() is None
        program.kill()
        wait_until(lambda: left_in_ray(launcher.cluster) == [], 100, "the actors and reservations to be gone")
        wait_until(lambda: ranks() == 0, 100, "all ranks to be gone")
    finally:
        program.kill()
        program.communicate()


def title(pid: int) -> str:
    """Return the command line of a process; "": it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""

"""Threads of gloo's finish what they have begun before a process group is freed, and before the process ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from raylaunch.worker import torch_internals
from raylaunch.worker.runtime import gloo_threads
from tests.node.harness import Node

pytestmark = pytest.mark.timeout(300)

STARVES = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CPU, FOLDER = int(sys.argv[1]), sys.argv[2]
RANK, WORLD = int(os.environ["RANK"]) % 2, int(os.environ["RANK"]) // 2
DESTROYS, EXITS = ((True, False), (False, False), (False, True))[WORLD]


def main():
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/world-{WORLD}", rank=RANK, world_size=2)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(4)]))
    for step in range(4):
        if step == 3:  # from now on, a thread of gloo's gets the CPU when nobody else wants it
            for thread in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{thread}/comm") as file:
                    if "gloo" in file.read():
                        os.sched_setaffinity(int(thread), {CPU})
                        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        model(torch.ones(4, 20)).sum().backward()
    if DESTROYS:
        dist.destroy_process_group()


main()
if EXITS:
    sys.exit()
"""


@contextlib.contextmanager
def busy(cpu: int) -> Iterator[None]:
    spins = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def test_a_worker_ends_though_threads_of_gloo_hardly_run(state_node: Node, tmp_path: Path) -> None:
    """Three worlds: one destroys its group, two leave it, one of them by `sys.exit`.

    Under plain Python, most of these are aborted at their end, or wait for ever.
    """
    cpu = min(os.sched_getaffinity(0))
    with busy(cpu):
        script, port = state_node.script(STARVES), state_node.open_store()
        outcome = state_node.run(script, str(cpu), str(tmp_path), nproc=6, port=port)
    assert outcome.exit_codes == dict.fromkeys(range(6), 0), [outcome.stderr(rank) for rank in range(6)]


def test_threads_that_run_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that rest are not."""
    rests = []
    ended = threading.Event()

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)  # a quarter of a second without the GIL
        rests.append(True)
        ended.wait(200)

    monkeypatch.setattr(gloo_threads, "MOST_SECONDS_WITHOUT_NAMES", 60.0)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    gloo_threads.let_finish()
    assert rests == [True]
    ended.set()
    thread.join()


def test_a_thread_that_runs_for_ever_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the user's own."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)

    monkeypatch.setattr(gloo_threads, "MOST_SECONDS_WITHOUT_NAMES", 0.01)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    gloo_threads.let_finish()
    assert thread.is_alive()
    ended.set()
    thread.join()


def test_where_torch_names_its_threads_no_other_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gloo_tcp_loop` runs without a rest once the connections of a broken collective were shut down."""
    spins = ("gloo_tcp_loop", "R")
    looks = [[spins, ("pt_gloo_runloop", state)] for state in ("R", "D", "S")]
    monkeypatch.setattr(gloo_threads, "_other_threads", lambda: looks.pop(0))
    monkeypatch.setattr(gloo_threads, "MOST_SECONDS_WITHOUT_NAMES", 0.0)
    gloo_threads.let_finish()
    assert looks == []


def test_the_end_of_a_group_is_noticed_before_anything_is_freed() -> None:
    """Only the end, and only once, also where the module is watched twice."""
    module, calls = ModuleType("distributed_c10d"), []
    vars(module)["_update_default_pg"] = calls.append
    for _ in range(2):
        torch_internals.watch_group_ends(module, lambda: calls.append("before"))
    for group in ("a group", None):
        vars(module)["_update_default_pg"](group)
    assert calls == ["a group", "before", None]
    torch_internals.watch_group_ends(ModuleType("without"), lambda: None)

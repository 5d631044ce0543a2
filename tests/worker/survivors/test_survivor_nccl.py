"""A survivor with NCCL whose peer is gone, with `tests/fake_nccl.py` in its place: how it leaves its attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raylaunch.worker.survivors.survivor import LEAVE_SECONDS_WITH_NCCL
from tests.worker.alone import Alone

LEAVES = """
    import threading, time
    import torch
    import torch.distributed as dist
    from raylaunch.worker import WorldChanged
    from raylaunch.worker.survivors.made_groups import MadeGroups
    from tests import fake_nccl
    from tests.worker.survivors.test_survivor import Node

    def order():
        time.sleep(0.2)
        node.order(2)
        node.begin(2)

    made = MadeGroups()
    made.watch()
    fake_nccl.install()
    dist.init_process_group("fakenccl", rank=0, world_size=2, store=dist.HashStore())
    dist.new_group([0, 1], backend="fakenccl")
    made.make_group = lambda _: None
    node = Node(made)
    node.survivor.is_inside = True
    seconds = node.announced()
    threading.Thread(target=order).start()
    try:
        dist.all_reduce(fake_nccl.on_device(torch.ones(4)))
        torch.cuda.synchronize()
        time.sleep(1000)
    except (WorldChanged, RuntimeError):
        pass
    print(*(word for word, _ in node.rejoin()), seconds)
    fake_nccl.FAULTS.clear()
    node.close()
"""


def leaves(alone_worker: Alone, **faults: Any) -> Any:
    env = {"FAKE_NCCL": str(alone_worker.folder), "FAKE_NCCL_FAULTS": json.dumps(faults), "RAYLAUNCH_ATTEMPT": "1"}
    return alone_worker.forked(LEAVES, env=env)


STAYS = ["returned", "completed", "ready", str(LEAVE_SECONDS_WITH_NCCL)]


@pytest.mark.parametrize(
    "faults",
    [{}, {"abort_seconds": 0.6}, {"abort": "together"}, {"destructor_seconds": 1000}],
    ids=["plain", "slow", "together", "destructor"],
)
def test_it_leaves(alone_worker, faults):
    """Also if no group's abort ends before another one's has begun, and if a group could not be freed for minutes.

    It has asked for longer than a survivor without NCCL. NCCL's own sockets are not shut down before the abort.
    """
    assert leaves(alone_worker, **faults).printed() == STAYS
    assert not [*Path(alone_worker.folder).glob("sockets-*")]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", "NCCL could not be aborted (NCCL error: unhandled system error)"),
        ("poisons", "its device cannot be used any more (CUDA error: an illegal memory access was encountered)"),
    ],
)
def test_it_ends_itself_where_it_cannot_go_on(alone_worker, fault, why):
    """Before it says that it has returned. So it is replaced by another worker, and nothing counts as a failure."""
    run = leaves(alone_worker, abort=fault)
    assert run.code() == -9
    assert run.out.read_text() == ""
    assert f"raylaunch: {why}: this worker does not stay" in run.err.read_text()


MAY_STAY = """
    import torch.distributed as dist
    from raylaunch.worker.survivors.made_groups import MadeGroups
    from tests import fake_nccl

    fake_nccl.install()
    dist.init_process_group("{backend}", rank=0, world_size=1, store=dist.HashStore())
    print(MadeGroups().why_not_nccl() or "nothing")
"""


@pytest.mark.parametrize(
    ("backend", "version", "why"),
    [
        ("fakenccl", (2, 27, 3), "nothing"),
        ("fakenccl", (2, 26, 2), "NCCL 2.26.2 may hang when it is aborted; 2.27, which torch 2.8 has, does not"),
        ("gloo", (2, 26, 2), "nothing"),
    ],
)
def test_it_cannot_stay_with_an_nccl_whose_abort_may_hang(alone_worker, backend, version, why):
    env = {"FAKE_NCCL": str(alone_worker.folder), "FAKE_NCCL_FAULTS": json.dumps({"version": version})}
    assert alone_worker.forked(MAY_STAY.format(backend=backend), env=env).printed() == why.split()

"""What a check says when a rank does not join a collective of NCCL, with `tests/fake_nccl.py` in its place."""

from __future__ import annotations

import pytest

CHECKS = """
    import datetime, os, sys
    import torch
    import torch.distributed as dist
    from raylaunch.worker.selfcheck import checks, program
    from tests import fake_nccl

    program._make_nccl_raise()
    fake_nccl.install()
    ctx = checks.CheckContext(
        backend="fakenccl", rank=0, size={size}, device=torch.device("cpu"), timeout=datetime.timedelta(seconds=0.5),
        store=dist.HashStore(),
    )
    dist.init_process_group("fakenccl", rank=0, world_size={size}, store=dist.HashStore(), timeout=ctx.timeout)
    outcome = checks.run(dict(checks.CHECKS)["{name}"], ctx)
    print(outcome.status, outcome.late, outcome.raised, outcome.text, flush=True)
    os._exit(0)  # as `program` does: a thread that waits in C++ while the interpreter ends may abort the process
"""


@pytest.mark.parametrize("name", ["broadcast", "all_reduce", "barrier"])
@pytest.mark.parametrize(
    ("size", "said"), [(1, "ok False False"), (2, "wrong True True RuntimeError: Work timed out in blocking wait")]
)
def test_a_collective_that_a_rank_does_not_join_is_an_error_of_that_check(alone_worker, name, size, said):
    """Since torch 2.8 only a call with `async_op` waits in NCCL, and so has a timeout."""
    text = CHECKS.format(name=name, size=size)
    assert alone_worker.forked(text, env={"FAKE_NCCL": str(alone_worker.folder)}).printed() == said.split()

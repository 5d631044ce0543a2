"""Hangs on the GPU are found, and the place is named: in a kernel, and in a collective."""

from __future__ import annotations

import pytest

from tests.gpu import gpu_runs
from tests.gpu.gpu_runs import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(140)]
LIMIT = 15 if gpu_runs.simulated() else 40
"""Seconds; from the start of the workers, with CUDA's and nccl's, beside other steps."""


@pytest.mark.parametrize(("kind", "place"), [("kernel", "in wait_for_the_kernel"), ("collective", "in barrier")])
def test_a_hang(launch, record_property, kind, place):
    """A hang inside a kernel or a collective ends the attempt, and the report says where each rank was."""
    ranks = 2 if gpu_runs.simulated() else gpu_runs.count()
    run = launch("hangs.py", kind, nproc_per_node=ranks, max_restarts=1, hang_timeout=LIMIT, shutdown_timeout=3)
    wait_until(lambda: run.notes("hangs") or run.process.poll() is not None, 100, "the hang")
    run.wait()
    assert {note["attempt"] for note in run.notes("done")} == {2}
    assert "WorkersHung" in run.events
    assert place in run.events, run.err[-4000:]
    hung, again = max(note["at"] for note in run.notes("hangs")), min(note["at"] for note in run.notes("done"))
    record_property("hang to the end of the next attempt", f"{again - hung:.1f} s")
    record_property("limit", f"{LIMIT} s")

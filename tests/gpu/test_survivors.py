"""Workers that stay when another one dies: NCCL is aborted and made anew, and what they go on with is no garbage."""

from __future__ import annotations

import pytest

from tests.gpu import gpu_runs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(140)]


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "fully_shard"])
def test_the_others_stay(launch, record_property, kind):
    """When a rank is killed, the others stay, and all go on from one commit; with one GPU, by gloo on it."""
    ranks = max(2, gpu_runs.count())
    run = launch("survives.py", kind, nproc_per_node=ranks, gpus_per_worker=0, max_restarts=1, state_memory=20.0)
    run.wait(seconds=120)
    began, again, ended = run.notes("began"), run.notes("again"), run.notes("ended")
    assert [len(notes) for notes in (began, again, ended)] == [ranks] * 3
    assert len({note["steps"] for note in again}) == 1
    assert again[0]["steps"] > 0
    assert len({tuple(note["sums"]) for note in ended}) == 1
    assert all(0 < one < 1e9 for one in ended[0]["sums"]), ended
    stayed = {note["pid"] for note in began} & {note["pid"] for note in again}
    record_property("backend", began[0]["backend"])
    record_property("workers that stayed", f"{len(stayed)} of {ranks - 1}")
    killed = run.notes("killed")[0]["at"]
    record_property("kill to the function again", f"{max(note['at'] for note in again) - killed:.2f} s")
    assert len(stayed) == ranks - 1, run.err[-4000:]

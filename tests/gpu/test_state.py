"""`State` with CUDA tensors: what a commit and a restore cost, and that the tensors are what was committed."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]


@pytest.mark.parametrize("size", ["1e9", "1e10"])
def test_commit_and_restore(launch, record_property, size):
    """`State` commits 1 GB and 10 GB of CUDA tensors, and restores them after a kill -9."""
    words = ("12", "more", "yet more") if size == "1e9" else ("6",)
    run = launch("keeps_state.py", size, *words, max_restarts=1, state_memory=40.0)
    run.wait(seconds=100)
    committed, restored = run.notes("committed")[0], run.notes("restored")[0]
    assert restored["attempt"] == 2
    assert restored["right"]
    assert restored["steps"] in (committed["steps"], committed["steps"] + 1)  # the last one, if it was copied at once
    for name in ("step", "with_commit", "call", "first_commit", "pinned_copy"):
        record_property(name.replace("_", " "), f"{1000 * committed[f'{name}_seconds']:.1f} ms")
    killed, again = run.notes("killed")[0]["at"], min(note["at"] for note in run.notes("again"))
    record_property("kill to the next attempt, with pinned buffers to unpin", f"{again - killed:.2f} s")
    record_property("restore", f"{restored['seconds']:.2f} s")

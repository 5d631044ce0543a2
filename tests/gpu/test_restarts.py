"""Restarts with a CUDA context: whatever ends a worker, the GPU is free for the next attempt."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(140)]
FAULTS = ("kill@context", "segv@group", "oom@step", "illegal@step", "kill@step")
_SLACK = 64 * 2**20


def test_restart_after_each_fault(launch, record_property):
    """After kill -9, SIGSEGV, out of memory and an illegal access, the GPU's memory is free for the next attempt."""
    run = launch("faults.py", *FAULTS, max_restarts=len(FAULTS)).wait(seconds=130)
    faults = {note["attempt"]: note for note in run.notes("fault")}
    contexts = [note for note in run.notes("context") if note["rank"] == 0]
    reduced = {note["attempt"]: note for note in run.notes("reduced") if note["rank"] == 0}
    assert [*faults] == [1, 2, 3, 4, 5]
    assert len(contexts) == 6
    free = [note["free"] for note in contexts]
    assert min(free[1:]) >= free[0] - _SLACK, f"memory of an earlier attempt was still held: {free}"
    for number, word in enumerate(FAULTS, 1):
        fault, again = faults[number]["at"], contexts[number]["at"]
        record_property(f"{word} to the next context", f"{again - fault:.2f} s")
        record_property(f"{word} to the next all_reduce", f"{reduced[number + 1]['at'] - fault:.2f} s")
    record_property("free at each start", " ".join(f"{number / 2**20:.0f}" for number in free) + " MiB")


@pytest.mark.parametrize(
    ("fault", "hint"), [("oom", "the memory of the GPU ran out"), ("illegal", "CUDA_LAUNCH_BLOCKING")]
)
def test_the_failure_is_named(launch, record_property, fault, hint):
    """The report of a CUDA out of memory, and of an access that poisons the context, names it and has a hint."""
    run = launch("faults.py", f"{fault}@step").wait(code=1)
    assert hint in run.err, run.err[-4000:]
    if fault == "illegal":
        found = "an illegal memory access was encountered" in run.err
        record_property("kind", "illegal access" if found else "assertion on the device")

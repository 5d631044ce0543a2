"""A run works without any one of its capabilities, and without all."""

from __future__ import annotations

import pytest

from raylaunch.cluster.run import CAPABILITIES, run_job
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from tests.fakes import RunRecorder

SCRIPT = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""


class Observed(RunRecorder):
    """Also takes the plan."""

    def on_plan(self, *_) -> None:
        pass


WITHOUT = {name: [each for each in CAPABILITIES if each.name != name] for name in (each.name for each in CAPABILITIES)}


@pytest.mark.parametrize("capabilities", [*WITHOUT.values(), ()], ids=[*(f"no {name}" for name in WITHOUT), "none"])
def test_a_job_with_a_restart_runs(capabilities, tmp_path, monkeypatch):
    """On two agents of this machine, without Ray: one of two workers fails once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    job = Job(
        entrypoint=Entrypoint(script="train.py"),
        nnodes=2,
        nproc_per_node=1,
        max_restarts=1,
        preload=[],
        log_dir=str(tmp_path),
        show="all",
        ray=RayOptions(address="none"),
    )
    observed = Observed()
    outcome = run_job(job, "", observed, capabilities=capabilities)
    assert (outcome.result.exit_code, outcome.result.restarts) == (0, 1), observed.lines
    written = b"".join(part.data for part in observed.output).decode()
    assert all(f"rank {rank} of 2" in written for rank in range(2))

"""The same script under srun, under torchrun that srun starts, and under raylaunch, in turn on the same Slurm.

Prints, for 2 nodes with 2 ranks each, the seconds from `sbatch` until all ranks are past their first `all_reduce`, and
from the SIGKILL of rank 1 until they are past the next one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import pytest
import yaml

from tests.cluster.conftest import wait_until
from tests.private_cluster import free_ports
from tests.slurm.conftest import REQUEUE_SECONDS, Slurm
from tools.bench.contenders import Started, Task

PATIENCE = 200
DEATHS = 2
"""After the third failure, raylaunch would leave out the node for a while."""
BATCH = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node={tasks}
#SBATCH --open-mode=append
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}  # all nodes are on this machine
export COMMAND="{command}"
{lines}
"""
SRUN = (
    "srun --kill-on-bad-exit bash -c "
    "'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec $COMMAND'"
)
TORCHRUN = """\
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it, few restarts succeed
srun bash -c 'TMPDIR=$PWD exec ${COMMAND/ / -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --max-restarts 9 \
  --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT --rdzv-id bench --local-addr $MASTER_ADDR \
  --rdzv-conf is_host=$((SLURM_PROCID == 0)) }'"""


@pytest.mark.timeout(900)
def test_a_rank_is_killed_under_srun_and_under_raylaunch(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of srun ends with it: a loop in the batch script, Slurm's queue or torchrun starts the ranks again."""
    rows = [
        measured(slurm, "srun", 1, batch(SRUN), goes_on=False),
        measured(slurm, "srun in a loop", DEATHS, batch(f"until {SRUN}; do :; done")),
        measured(slurm, "srun and requeue", 1, batch(f"{SRUN} || scontrol requeue $SLURM_JOB_ID")),
        measured(slurm, "srun torchrun", DEATHS, batch(TORCHRUN, tasks=1)),
        measured(slurm, "raylaunch slurm", DEATHS, raylaunch),
    ]
    with capsys.disabled():
        print(
            f"\nseconds to the first step, and from a kill to the next (a job that is put back waits {REQUEUE_SECONDS}):",
            *rows,
            sep="\n",
        )


def batch(lines: str, tasks: int = 2) -> Callable[[Slurm, Started], None]:
    """What submits a batch script with these lines."""

    def submit(slurm: Slurm, started: Started) -> None:
        command = " ".join([sys.executable, *started.task.command(started.folder)])
        slurm.run("sbatch", text=BATCH.format(tasks=tasks, port=free_ports(1)[0], command=command, lines=lines))

    return submit


def raylaunch(slurm: Slurm, started: Started) -> None:
    """Submit the batch script that raylaunch makes."""
    script, *args = started.task.command(started.folder)
    job = {
        "name": "bench",
        "run_id": "bench",
        "entrypoint": {"script": script, "args": args},
        "nnodes": 2,
        "nproc_per_node": 2,
        "max_restarts": 9,
        "log_dir": str(started.folder / "runs"),
    }
    (file := started.folder / "job.yaml").write_text(yaml.safe_dump(job))
    slurm.submit(str(file))


def measured(
    slurm: Slurm, name: str, deaths: int, submit: Callable[[Slurm, Started], None], *, goes_on: bool = True
) -> str:
    """Run a job, and say how long it took."""
    (folder := slurm.folder / name.replace(" ", "-")).mkdir()
    task = Task(agents=2, workers=2, deaths=deaths, first=3.0, each=1.0)
    started = Started(task=task, folder=folder, mark="", began=time.monotonic(), commands=())
    submit(slurm, started)
    wait_until(lambda: started.has_passed(0), PATIENCE, f"{name} to start")
    row = f"{name}: {started.times(0, since=started.began)['passed']:.2f}"
    if goes_on:
        wait_until(lambda: started.has_passed(deaths), PATIENCE, f"{name} to go on after the last kill")
    wait_until(lambda: not slurm.jobs(), PATIENCE, f"the job of {name} to end")
    killed = [started.death(number) for number in range(deaths)]
    if not goes_on:
        assert not started.marks(1)
        return f"{row}, the job has ended after {time.monotonic() - killed[0]:.2f}"
    after = [started.times(number + 1, since=death)["passed"] for number, death in enumerate(killed)]
    return f"{row}, {statistics.median(after):.2f} ({max(after):.2f}), {len(after)}"

"""`ElasticDataLoader` in a run that a person resizes: each sample of an epoch comes once, and none is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.test_without_cluster import NO_RAYLETS, alone, alone_with_torch, start

__all__ = ["alone", "alone_with_torch"]

pytestmark = pytest.mark.timeout(300)
SAMPLES = 53
SCRIPT = f"""
import json, os
import torch, torch.distributed as dist
from pathlib import Path
from raylaunch.integrations.data import ElasticDataLoader
from raylaunch.worker import State, context

dist.init_process_group("gloo")
attempt, rank = context().attempt, dist.get_rank()
loader = ElasticDataLoader(torch.arange({SAMPLES}), batch_size=2)
state = State(every=1, loader=loader)
step = state.restore()
Path(f"begin-{{attempt}}").write_text(str(step))
has_enough = torch.zeros(1)
while not has_enough:
    for batch in loader:
        dist.barrier()
        Path(f"step-{{attempt}}-{{step}}-{{rank}}").write_text(json.dumps(batch.tolist()))
        state.commit(step)
        step += 1
    has_enough.fill_(os.path.exists("enough"))
    dist.broadcast(has_enough, 0)
state.finish()
Path("epochs").write_text(str(loader.epoch))
"""


def test_each_sample_comes_once_though_the_run_is_resized(alone_with_torch: tuple[dict[str, str], Path]) -> None:
    """Four ranks, then two, then four again."""
    env, folder = alone_with_torch
    env |= {"XDG_STATE_HOME": str(folder / "state")}
    job = {"nproc_per_node": 2, "nnodes": "1:2", "last_call": 200, "preload": ["torch.utils.data"]}
    job |= {"name": "train", "run_id": "one"}
    process = start(env, folder, SCRIPT, **job)

    def trains(attempt: int) -> None:
        def is_there() -> bool:
            return len([*folder.glob(f"step-{attempt}-*-0")]) > 3 or process.poll() is not None

        wait_until(is_there, 200, f"attempt {attempt}")

    trains(1)
    for attempt, nodes in ((2, "1"), (3, "2")):
        program = f"{NO_RAYLETS}; from raylaunch.cli.main import main; exit(main())"
        subprocess.run(
            [sys.executable, "-c", program, "resize", nodes, "one"], env=env, cwd=folder, timeout=200, check=True
        )
        trains(attempt)
    (folder / "enough").touch()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    begins = [int((folder / f"begin-{attempt}").read_text()) for attempt in (1, 2, 3)]
    assert 0 == begins[0] < begins[1] < begins[2]
    taken: Counter[int] = Counter()
    worlds: list[int] = []
    for attempt, (begin, end) in enumerate(zip(begins, (*begins[1:], 10**9), strict=True), 1):
        files = [path for path in folder.glob(f"step-{attempt}-*") if begin <= int(path.name.split("-")[2]) < end]
        worlds.append(len({path.name.split("-")[3] for path in files}))
        for path in files:
            taken.update(json.loads(path.read_text()))
    assert worlds == [4, 2, 4]
    assert taken == Counter(dict.fromkeys(range(SAMPLES), int((folder / "epochs").read_text())))

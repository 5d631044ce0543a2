"""`raylaunch.start`: several runs at once in one process, which share its connection to Ray."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """
import asyncio, json, os, time, raylaunch

def work(x):
    import os, time
    print(f"work {x}", flush=True)
    while x == "endless":
        time.sleep(0.1)
    return os.environ["RANK"], x

def begin(x):
    return raylaunch.start(work, (x,), nproc_per_node=1, backend="none", preload=[], show="none", name=f"run-{x}")

async def main():
    first, second, endless = begin("first"), begin("second"), begin("endless")
    found = {"results": await asyncio.gather(first, second), "logs": [first.logs(), second.logs(ranks=0, tail=1)]}
    while not endless.logs() or endless.status().state == "starting":  # a worker may write before its start is known
        await asyncio.sleep(0.1)
    found["state"] = endless.status().state
    endless.stop()
    try:
        await endless
    except raylaunch.RunStoppedError as error:
        found["stopped"] = error.exit_code
    found["end"] = [endless.status().state, endless.status().exit_code]
    found["dirs"] = [os.path.relpath(handle.run_dir).split("/")[1] for handle in (first, second, endless)]
    print(json.dumps(found), flush=True)
    left = begin("endless")
    while not left.logs():
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_several_runs_at_once(launcher):
    """Each has its own results, logs and end; at the end of the process the run that goes on ends, as all others do."""
    path = launcher.folder / "program.py"
    path.write_text(PROGRAM)
    done = launcher.python(str(path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "results": [[["0", "first"]], [["0", "second"]]],
        "logs": ["work first\n", "work second\n"],
        "state": "running",
        "stopped": 143,
        "end": ["stopped", 143],
        "dirs": ["run-first", "run-second", "run-endless"],
    }

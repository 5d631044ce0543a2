"""A forked child starts over at the bottom of the stack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from raylaunch.node.linux.processes import fork, run_at_bottom

def child():
    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    print("child", depth, sys.exc_info()[1], flush=True)
    return 7

def deep(levels):
    if levels:
        deep(levels - 1)
    try:
        pid = fork(child)
    finally:
        pass
    print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)

def main():
    deep(50)
    return 1

sys.exit(run_at_bottom(main))
"""


def test_a_child_runs_at_the_bottom_and_its_exit_code_is_the_process_own() -> None:
    """Two frames are below it, and no exception is being handled: not even in the child of a deep call."""
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "child 2 None\nparent 7\n"

"""The collector of the fork server: all modules are not looked at again and again while they are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from raylaunch.node import forkserver, messages
before = gc.get_threshold()
forkserver.warm_up(messages.Begin(preload=("preloaded",), start_method="spawn", page=""))
import preloaded
print(preloaded.seen[:2] == before[:2], preloaded.seen[2] > 1_000_000, gc.isenabled(), *gc.get_threshold())
"""


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("", "True True True 700 10 10"),
        ("gc.set_threshold(5, 5, 5)", "True True True 5 5 5"),
        ("gc.disable()", "True True False 700 10 10"),
    ],
)
def test_no_full_collection_while_modules_are_imported(tmp_path, sets, words):
    """Afterwards the collector is as it was, or as a module has set it."""
    (tmp_path / "preloaded.py").write_text(f"import gc\nseen = gc.get_threshold()\n{sets}\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{words}\n", done.stderr

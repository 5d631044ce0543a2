"""What the fork server imports before it serves: without full garbage collections, and the compiler if it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from raylaunch.node.protocol.forkserver_messages import Initialize
from raylaunch.node.preload import initial

before = gc.get_threshold()
initial.import_ahead(Initialize(preload=("preloaded",), start_method="spawn", page=""))
import preloaded
after = "as before" if gc.get_threshold() == before else gc.get_threshold()
print(preloaded.seen[:2] == before[:2], preloaded.seen[2] > 1_000_000, gc.isenabled(), after)
"""


@pytest.mark.parametrize(
    ("sets", "printed"),
    [
        ("", "True True True as before"),
        ("gc.set_threshold(5, 5, 5)", "True True True (5, 5, 5)"),
        ("gc.disable()", "True True False as before"),
    ],
)
def test_no_full_collection_while_modules_are_imported(tmp_path, sets, printed):
    """Afterwards the thresholds are as before, or as a module has set them."""
    (tmp_path / "preloaded.py").write_text(f"import gc\nseen = gc.get_threshold()\n{sets}\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{printed}\n", done.stderr


COMPILER = """
import sys
from raylaunch.node.protocol.forkserver_messages import Initialize
from raylaunch.node.preload import initial

initial.import_ahead(
    Initialize(preload=("torch",), start_method="spawn", page="", preload_auto=True, script=sys.argv[1])
)
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    ("script", "is_imported"), [("import torch", False), ("import torch.optim", True), (None, True)]
)
def test_the_compiler_is_imported_for_scripts_that_may_need_it(tmp_path, script, is_imported):
    """And for what is no script."""
    (tmp_path / "torch").mkdir()
    for module in ("__init__", "_dynamo"):
        (tmp_path / "torch" / f"{module}.py").touch()
    path = tmp_path / "train.py"
    path.write_text(script or "")
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, str(path) if script else ""],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"True {is_imported}\n", done.stderr

"""Compare everything that a script can find out about its process under torchrun and under raylaunch."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract.launchers import Launcher, Run, together
from tests.private_cluster import MARK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

DUMP = Path(__file__).parents[1] / "worker" / "dump.py"
IMPORTED = "its process has imported more of torch than the script alone would have"
WANTED: dict[str, str] = {
    "env MASTER_ADDR": "an address that other nodes can reach, even if there are none",
    "env MASTER_PORT": "any free port",
    "env TORCHELASTIC_RUN_ID": "names the run by its time instead of by chance",
    "env TORCHELASTIC_ERROR_FILE": "an absolute path, whatever the script's folder",
    "env RAYLAUNCH_ATTEMPT": "counts all starts, of which TORCHELASTIC_RESTART_COUNT counts some",
    "env RAYLAUNCH_FAST_DIR": "where checkpoints survive the loss of a node",
    "env RAYLAUNCH_PAGE": "where steps are marked, and checkpoints asked for",
    "env RAYLAUNCH_RUN_DIR": "where a script can write what belongs to the run, as for TensorBoard",
    "env RAYLAUNCH_STATE": "where a script that commits its state asks for memory",
    "env RAYLAUNCH_SURVIVORS": "where an elastic function says that its worker can stay",
    "env TORCH_FR_DUMP_TEMP_FILE": "what torch's Flight Recorder writes belongs to the run",
    "env TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "where that is asked which collective is missing when ranks hang",
    "env RAY_ADDRESS": "`ray.init()` in a script finds the cluster that it runs on",
    "env RAY_AUTH_MODE": "and is let in",
    "env RAY_AUTH_TOKEN": "and is let in",
    "command line": "a title in `ps`, which has the rank and no argument of the script",
    "exit handlers": IMPORTED,
    "faulthandler": "a crash leaves its Python stack in stderr.log",
    "files": "the file of its last words, closed on exec; stdin",
    "stdin gives": "the launcher may be on another machine, so nobody's stdin is read",
    "frozen objects": "the collector does not touch what workers share",
    "kernel threads": "libraries that end their threads for a fork start them again on use",
    "sys.meta_path": "takes note of what is imported, to have it ready at the next start",
    "sys.path": "our own package comes last, where it is not installed",
}
"""Fields of the dump in which a worker of raylaunch differs, and why. `env X` is the variable X."""
IN_SOME_VERSIONS: dict[str, str] = {
    "env TORCHINDUCTOR_CACHE_DIR": IMPORTED,
    "warnings filters": IMPORTED,
    "builtins": IMPORTED,  # the pybind11 of torch 2.6 keeps its own there
    "env TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun of torch 2.6 does not tell them",
}
"""Those that not each torch has."""


@pytest.fixture(scope="module")
def logs(launchers: Mapping[str, Launcher], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the log folders of a single worker with all defaults, run in the same folder by both launchers."""
    folder = tmp_path_factory.mktemp("dump")
    shutil.copy(DUMP, folder / "train.py")

    def start(name: str) -> Run:
        flags = ("--redirects", 3, "--log-dir", name, "train.py", "--lr", "1e-3", "")
        return launchers[name].run(*flags, folder=folder, torch=True, name=name, stdin="words\n", fresh=True)

    names = ("raylaunch", "torchrun")
    runs = together({name: lambda name=name: start(name) for name in names})
    for run in runs.values():
        assert run.code == 0, run.said
    return {name: folder / name for name in names}


@pytest.fixture(scope="module")
def dumps(logs: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what the worker of each launcher found."""
    return {name: json.loads(next(folder.rglob("stdout.log")).read_text()) for name, folder in logs.items()}


def fields(dump: dict[str, Any]) -> dict[str, Any]:
    """Replace the names that one Python has in its folder by one of them."""
    python = re.escape(str(Path(sys.executable).parent)) + r"/python[\d.]*"
    dump = json.loads(re.sub(python, "python", json.dumps(dump)))
    env = {f"env {name}": value for name, value in dump.pop("env").items() if name != MARK}
    return dump | env


def test_workers_differ_only_where_they_should(dumps: dict[str, dict[str, Any]]) -> None:
    """Each difference is in the table, and each row of the table is a difference."""
    ours, theirs = fields(dumps["raylaunch"]), fields(dumps["torchrun"])
    missing = object()
    differences = {
        name: (ours.get(name, missing), theirs.get(name, missing))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name, missing) != theirs.get(name, missing)
    }
    assert {name: found for name, found in differences.items() if name not in WANTED | IN_SOME_VERSIONS} == {}
    assert WANTED.keys() - differences.keys() == set()


def test_nothing_more_is_printed(logs: dict[str, Path]) -> None:
    """Libraries that are imported ahead print nothing, also when the interpreter ends."""
    assert {name: next(folder.rglob("stderr.log")).read_text() for name, folder in logs.items()} == dict.fromkeys(
        logs, ""
    )


def test_a_lone_worker_is_the_default(dumps: dict[str, dict[str, Any]]) -> None:
    """For one worker, OMP_NUM_THREADS is not set."""
    for name, dump in dumps.items():
        assert (dump["env"]["WORLD_SIZE"], dump["env"]["LOCAL_WORLD_SIZE"]) == ("1", "1"), name
        assert "OMP_NUM_THREADS" not in dump["env"], name

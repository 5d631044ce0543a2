"""The head of the cluster (its GCS) is killed and started again, with a storage and without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import head_storage
from tests.cluster.conftest import Launcher, left_in_ray, wait_until
from tests.head_storage import GcsProcess
from tests.private_cluster import free_ports, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]

SCRIPT = """
import itertools, os, sys, time
rank, attempt = os.environ["RANK"], os.environ["RAYLAUNCH_ATTEMPT"]
for step in itertools.count():
    print(attempt, step, os.getpid(), flush=True)
    if os.path.exists(sys.argv[1]):
        break
    time.sleep(0.02)
"""


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Launcher]:
    """A cluster whose head keeps its tables in files, or in Redis where this Ray cannot. We see no difference."""
    with contextlib.ExitStack() as stack:
        if not head_storage.why_no_rocksdb():
            (tmp_path / "tables").mkdir()
            storage = head_storage.rocksdb(tmp_path / "tables")
        elif reason := head_storage.why_not():
            pytest.skip(reason)
        else:
            storage = {"RAY_REDIS_ADDRESS": stack.enter_context(head_storage.redis(tmp_path, *free_ports(1)))}
        yield Launcher(tmp_path, stack.enter_context(private_cluster(cpus=6, lean=True, storage=storage)))


@pytest.fixture
def unstored(tmp_path: Path) -> Iterator[Launcher]:
    """A cluster whose head keeps its tables in its own memory."""
    with private_cluster(cpus=4, lean=True) as cluster:
        yield Launcher(tmp_path, cluster)


def settings(launcher: Launcher, end: str) -> dict[str, object]:
    """A job that trains until there is a file of this name."""
    launcher.script(SCRIPT)
    script = {"script": "train.py", "args": [end]}
    return {"name": end, "entrypoint": script, "nnodes": 2, "nproc_per_node": 1, "placement": "pack", "preload": []}


def detached(launcher: Launcher, end: str) -> str:
    """Start such a job with `-d` and return its name and id."""
    (launcher.folder / f"{end}.json").write_text(json.dumps(settings(launcher, end)))
    started = launcher.python("raylaunch", "-d", f"{end}.json")
    assert started.returncode == 0, started.stderr
    return f"{end}/{started.stdout.splitlines()[0]}"


def elsewhere(launcher: Launcher, *command: str):
    """Run a command as a user who knows of runs only what the cluster's registry has."""
    return launcher.python("raylaunch", *command, env={"XDG_STATE_HOME": str(launcher.folder / "elsewhere")})


def listed(launcher: Launcher) -> dict[str, int]:
    """Return the process ids of the drivers of all runs of the cluster that go on, by the names of the runs."""
    shown = elsewhere(launcher, "ps", "--json")
    runs = json.loads(shown.stdout)["runs"] if shown.returncode == 0 else []
    return {run["name"]: run["pid"] for run in runs if run["state"] == "running"}


def listed_both(launcher: Launcher) -> dict[str, int]:
    """Wait until both runs are listed: a thread of each driver enters it in the registry, and the head answers late."""
    found: dict[str, int] = {}

    def are_there() -> bool:
        found.clear()
        found.update(listed(launcher))
        return found.keys() == {"one", "two"}

    wait_until(are_there, 100, "both runs to be listed")
    return found


def steps(launcher: Launcher, name: str, rank: int = 0) -> list[list[str]]:
    found = next(iter(launcher.folder.glob(f"runs/{name}/2*/attempt-1/rank-{rank}/stdout.log")), None)
    return [line.split() for line in found.read_text().splitlines(keepends=True)] if found is not None else []


def result_of(launcher: Launcher, name: str) -> dict[str, Any]:
    """Return what the driver writes after it has told commands that the run has ended."""
    (folder,) = launcher.folder.glob(f"runs/{name}/2*")
    wait_until((folder / "result.json").exists, 100, f"the result of {name}")
    return json.loads((folder / "result.json").read_text())


def wait_for_steps(launcher: Launcher, *names: str) -> None:
    """Both ranks of these runs go on."""
    for name in names:
        for rank in (0, 1):
            before = len(steps(launcher, name, rank))
            wait_until(lambda n=name, r=rank, b=before: len(steps(launcher, n, r)) > b + 5, 100, f"steps of {name}")


def test_a_head_that_is_started_again_with_its_storage(stored):
    """Training goes on all the time, attached and detached, though a driver dies meanwhile; all commands work again."""
    gcs = GcsProcess.of(stored.cluster.mark)
    one = detached(stored, "one")
    two = stored.start(**settings(stored, "two"))
    wait_for_steps(stored, "one", "two")
    drivers = listed_both(stored)
    gcs.kill()
    try:
        wait_for_steps(stored, "one", "two")
        os.kill(drivers["one"], signal.SIGKILL)
        wait_for_steps(stored, "one", "two")
        gcs.start()
        wait_until(
            lambda: listed(stored).get("one", 0) not in (0, drivers["one"]), 100, "another driver, and the registry"
        )
        assert listed_both(stored)["two"] == drivers["two"]
        wait_for_steps(stored, "one", "two")
        three = detached(stored, "three")
        stopped = elsewhere(stored, "stop", three)
        assert stopped.returncode == 0, stopped.stderr
        elsewhere_too = {"XDG_STATE_HOME": str(stored.folder / "elsewhere")}
        attached = stored.command("raylaunch", "attach", "--since", "1d", one, env=elsewhere_too)
        shown = attached.stdout.readline()
        for name in ("one", "two"):
            (stored.folder / name).touch()
        more, said = attached.communicate(timeout=100)
        assert attached.returncode == 0, said
        assert two.wait().code == 0, two.err
        for name in ("one", "two"):
            result = result_of(stored, name)
            assert (result["exit_code"], result["restarts"], result["takeovers"]) == (0, 0, int(name == "one"))
            for rank in (0, 1):  # one process made all steps
                lines = steps(stored, name, rank)
                assert [line[1] for line in lines] == [str(step) for step in range(len(lines))]
                assert len({line[2] for line in lines}) == 1
        wait_until(lambda: left_in_ray(stored.cluster) == [], 100, "actors and placement groups to be gone")
        assert [line.split() for line in (shown + more).splitlines()] == steps(stored, "one")
    finally:
        gcs.end()


def test_a_head_that_is_started_again_without_storage(unstored):
    """It knows nothing of what ran before: the run ends with exit code 3, and says why."""
    gcs = GcsProcess.of(unstored.cluster.mark)
    one = detached(unstored, "one")
    two = unstored.start(**settings(unstored, "two"))
    wait_for_steps(unstored, "one", "two")
    gcs.kill()
    try:
        gcs.start()
        assert two.wait().code == 3
        why = "the head of the Ray cluster is gone: it was started anew, and knows nothing of what ran before"
        assert f"error: {why}" in two.err
        assert "storage" in two.err
        path = unstored.folder / "runs" / one / "result.json"
        wait_until(path.exists, 100, "the result of the detached run")
        result = json.loads(path.read_text())
        assert (result["exit_code"], result["why"]) == (3, why)
    finally:
        gcs.end()

"""Fixtures that run every test with both launchers, unless the test says why not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.contract.launchers import KEPT, Launcher, Run, launcher_env, missing_flags
from tests.contract.shared import shared_runs
from tests.private_cluster import Cluster, private_cluster
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

LAUNCHERS = ("raylaunch", "torchrun")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "raylaunch_only(reason): torchrun is not asked, for this reason")
    config.addinivalue_line("markers", "torchrun_has(flag): skipped for a torchrun that has not")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "launcher" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("raylaunch_only")
        assert only is None or only.args, "say why torchrun is not asked"
        names = LAUNCHERS[:1] if only else LAUNCHERS
        metafunc.parametrize("launcher", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start a Ray cluster with room for 2 x 4 workers in a clean environment; no actor or placement group may remain."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(KEPT):
            patch.delenv(name)
        with private_cluster(cpus=8, lean=True) as found:
            patch.undo()
            yield found
            script = found.folder / "left.py"
            script.write_text(_LEFT)
            command = WarmCommand(warm_of(found), str(script), env=launcher_env(found), cwd=found.folder)
            assert command.communicate(200) == ("", ""), "actors and placement groups that runs have left"
            assert command.returncode == 0


_LEFT = """
import ray, warnings
from ray._private.state import actors
from ray.util.placement_group import placement_group_table
warnings.simplefilter("ignore", FutureWarning)  # a tip of Ray 2.50 to 2.54
ray.init(log_to_driver=False, logging_level="ERROR")
for actor in actors().values():
    if actor["State"] != "DEAD":
        print("actor", actor["ActorClassName"], actor["ActorID"], actor["State"])
for group in placement_group_table().values():
    if group["state"] != "REMOVED":
        print("group", group["placement_group_id"], group["state"])
"""


@pytest.fixture(scope="session")
def warm_raylaunch(cluster: Cluster) -> WarmPython:
    return warm_of(cluster)


def warm_of(cluster: Cluster) -> WarmPython:
    """Return a process that has imported all that a run on the cluster needs."""
    assert cluster.warm is not None
    return cluster.warm


@pytest.fixture(scope="session")
def warm_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """A process that has imported torch; torchrun is forked from it, and may have it fork workers."""
    at = tmp_path_factory.mktemp("warm") / "torchrun.sock"
    found = WarmPython("torch.distributed.launcher.api", "torch.distributed.run", env=launcher_env(None), at=at)
    yield found
    found.close()


class Launchers(dict[str, Launcher]):
    """The launchers by name. The Ray cluster is started when raylaunch's is first used."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._request = request
        self._folders = folders
        folders.getbasetemp()  # made now, since several threads would make it at one time

    def __missing__(self, name: str) -> Launcher:
        numbers = itertools.count(1)
        self[name] = Launcher(
            name,
            lambda: self._folders.mktemp(f"{name}-{next(numbers)}", numbered=False),
            warm=self._request.getfixturevalue(f"warm_{name}"),
            cluster=self._request.getfixturevalue("cluster") if name == "raylaunch" else None,
        )
        return self[name]


@pytest.fixture(scope="session")
def launchers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    return Launchers(request, tmp_path_factory)


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest, launchers: Launchers) -> Launcher:
    """Return raylaunch on a running cluster or torchrun: each test runs with one, then with the other."""
    return launchers[request.param]


@pytest.fixture(autouse=True)
def nothing_is_left(launchers: Launchers) -> Iterator[None]:
    """Check that no process outlives the run that started it. Shared runs are checked after the first test that uses them."""
    yield
    left = [line for launcher in launchers.values() for line in launcher.left()]
    assert not left, "\n".join(left)


@pytest.fixture(autouse=True)
def torchrun_has(request: pytest.FixtureRequest) -> None:
    """Skip what a test asks of torchrun if it is about a flag that the torchrun at hand does not have."""
    asked = {mark.args[0] for mark in request.node.iter_markers("torchrun_has")}
    if "raylaunch" not in request.node.name and (missing := asked & missing_flags()):
        pytest.skip(f"torchrun of this torch has no {', '.join(sorted(missing))}")


@pytest.fixture(scope="session")
def runs(launcher: Launcher) -> dict[str, Run]:
    """Return the runs of shared.py, by name."""
    return shared_runs(launcher)

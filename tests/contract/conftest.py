"""Every test runs against both launchers, unless it says why not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.contract.launchers import KEPT, Launcher, Run
from tests.contract.shared import shared_runs
from tests.private_cluster import Cluster, private_cluster

LAUNCHERS = ("raylaunch", "torchrun")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "raylaunch_only(reason): torchrun is not asked, for this reason")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "launcher" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("raylaunch_only")
        assert only is None or only.args, "say why torchrun is not asked"
        names = LAUNCHERS[:1] if only else LAUNCHERS
        metafunc.parametrize("launcher", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Room for 2 x 4 workers. Its nodes have the same clean environment as the launchers; nothing of ours stays in it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(KEPT):
            patch.delenv(name)
        with private_cluster(cpus=8, lean=True) as found:
            patch.undo()
            yield found
            left = subprocess.run(
                [sys.executable, "-c", _LEFT],
                env=Launcher("raylaunch", lambda: found.folder, found).env(),
                capture_output=True,
                text=True,
                timeout=200,
                check=True,
            ).stdout
            assert left == "", f"actors and placement groups that runs have left:\n{left}"


_LEFT = """
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table
ray.init(log_to_driver=False, logging_level="ERROR")
for actor in actors().values():
    if actor["State"] != "DEAD":
        print("actor", actor["ActorClassName"], actor["ActorID"], actor["State"])
for group in placement_group_table().values():
    if group["state"] != "REMOVED":
        print("group", group["placement_group_id"], group["state"])
"""


class Launchers(dict[str, Launcher]):
    """By name; there is no Ray cluster before raylaunch is asked for."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._request = request
        self._folders = folders

    def __missing__(self, name: str) -> Launcher:
        numbers = itertools.count(1)
        self[name] = Launcher(
            name,
            lambda: self._folders.mktemp(f"{name}-{next(numbers)}", numbered=False),
            self._request.getfixturevalue("cluster") if name == "raylaunch" else None,
        )
        return self[name]


@pytest.fixture(scope="session")
def launchers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    return Launchers(request, tmp_path_factory)


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest, launchers: Launchers) -> Launcher:
    """raylaunch on a running cluster, or torchrun: each test is run with the one, then with the other."""
    return launchers[request.param]


@pytest.fixture(autouse=True)
def nothing_is_left(launchers: Launchers) -> Iterator[None]:
    """No process outlives the run that started it. Runs that tests share are looked at after the first of these."""
    yield
    left = [line for launcher in launchers.values() for line in launcher.left()]
    assert not left, "\n".join(left)


@pytest.fixture(scope="session")
def runs(launcher: Launcher) -> dict[str, Run]:
    """See shared.py."""
    return shared_runs(launcher)

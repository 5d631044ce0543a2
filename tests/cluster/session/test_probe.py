"""What a head that was asked must have in common with this process."""

from __future__ import annotations

import socket
import sys

import pytest
import ray

from raylaunch.cluster import ray_internals
from raylaunch.cluster.session import ray_session
from raylaunch.errors import ClusterError, ExitCode

PYTHON = ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def head(monkeypatch):
    """Something that listens, and whose metadata as a head are what the test says."""
    metadata: list[bytes] = []
    monkeypatch.setattr(ray_internals, "ask_head", lambda *_: metadata[0])
    monkeypatch.setattr(ray_internals, "token", lambda: "")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def probe(text: str) -> dict[str, object]:
            metadata[:] = [text.encode()]
            return ray_session.probe(f"127.0.0.1:{listening.getsockname()[1]}")

        yield probe


@pytest.mark.parametrize("ours", [("2.44.1", PYTHON), (ray.__version__, "3.9.18"), (ray.__version__, f"{PYTHON}9")])
def test_another_ray_or_python_is_an_error_before_connecting(head, ours):
    """One sentence names both."""
    with pytest.raises(ClusterError) as found:
        head(f'{{"ray_version": "{ours[0]}", "python_version": "{ours[1]}"}}')
    assert found.value.exit_code == ExitCode.UNAVAILABLE
    assert found.value.message.endswith(
        f" has Ray {ours[0]} and Python {ours[1]}, and this process has Ray {ray.__version__} and Python {PYTHON}"
    )


@pytest.mark.parametrize(
    "metadata",
    [
        "{}",
        f'{{"ray_version": "{ray.__version__}", "python_version": "{PYTHON}"}}',
        '{"ray_version": "1.0", "python_version": "3.6.0", "ray_init_cluster": true}',
    ],
    ids=["unknown", "the same", "a Ray that a program started for itself"],
)
def test_a_head_that_may_be_used_or_passed_by(head, metadata):
    """`discovery.choose` passes by what a program started for itself."""
    assert isinstance(head(metadata), dict)


def test_ray_may_be_told_to_ignore_the_third_number(head, monkeypatch):
    """Ray has a variable for that."""
    monkeypatch.setenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    head(f'{{"ray_version": "{ray.__version__}", "python_version": "{PYTHON}9"}}')


def test_an_address_without_a_port():
    """It is said which port was taken."""
    with pytest.raises(ClusterError, match=r"no Ray cluster at 127\.0\.0\.9: ") as found:
        ray_session.probe("127.0.0.9")
    assert found.value.hint.startswith("without a port, 6379 is taken: is it `127.0.0.9:PORT`")

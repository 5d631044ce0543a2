"""Finding a cluster, and clear errors within seconds if there is none."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from tests.private_cluster import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def refused(launcher, address: str, **env: str):
    run = launcher.start(f"ray.address={address}", entrypoint={"script": launcher.script("print('never')")}, env=env)
    run.wait()
    assert run.code == 3
    assert run.out == ""
    assert "Traceback" not in run.err
    return run.err


def test_an_address_at_which_nothing_listens(launcher):
    (port,) = free_ports(1)
    assert f"error: no Ray cluster at 127.0.0.1:{port}: Connection refused" in refused(launcher, f"127.0.0.1:{port}")


def test_an_address_that_is_not_rays(launcher):
    """Another server listens there. Ray's own client would try for two minutes."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        words = refused(launcher, f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert "does not answer as a Ray head node does" in words


def test_wrong_token(launcher, cluster):
    """A token that the cluster does not know, and none at all."""
    words = refused(launcher, cluster.address, RAY_AUTH_TOKEN="f" * 64)
    assert f"error: the Ray cluster at {cluster.address} refused our token" in words
    assert "hint: give its token in RAY_AUTH_TOKEN" in words
    words = refused(launcher, cluster.address, RAY_AUTH_MODE="disabled")
    assert "refused our token" in words


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://127.0.0.1:10001", "Ray Client"),
        ("127.0.0.1:port", "is not a Ray address"),
        ("no.such.host", "no Ray cluster"),
    ],
)
def test_not_an_address(launcher, address, words):
    """What cannot be an address of a cluster."""
    assert words in refused(launcher, address)


def test_ray_address(launcher, cluster):
    """`auto` takes RAY_ADDRESS; the workers find the same cluster in their environment, with its token."""
    script = launcher.script(
        """
        import os, ray
        ray.init(log_to_driver=False, logging_level="ERROR")
        print(os.environ["RANK"], ray.cluster_resources()["CPU"])
        """
    )
    run = launcher.run(entrypoint={"script": script}, nnodes=1, nproc_per_node=1)
    assert run.code == 0, run.err
    assert run.out == "0 4.0\n"


def test_named_address(launcher, cluster):
    """`ray.address=` wins over RAY_ADDRESS; the run folder holds the plan, with the ranks of each node."""
    run = launcher.start(
        f"ray.address={cluster.address}",
        entrypoint={"command": "true"},
        nnodes=1,
        env={"RAY_ADDRESS": "127.0.0.1:1"},
    ).wait()
    assert run.code == 0, run.err
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [bundle["nproc"] for bundle in plan["bundles"]] == [2]
    assert [seat["ranks"] for seat in plan["seats"]] == [[0, 1]]


def test_working_folder_by_ray(launcher, cluster):
    """`ray.working_dir` copies the folder to the nodes, and workers run in the copy."""
    launcher.script("import os, data; print(os.getcwd() != os.environ['HERE'], data.WORDS)")
    launcher.script("WORDS = 'from the copy'", name="data.py")
    run = launcher.run(
        entrypoint={"script": "train.py"},
        ray={"working_dir": "."},
        log_dir=str(launcher.folder / "runs"),
        env={"HERE": str(launcher.folder)},
        nnodes=1,
    )
    assert run.code == 0, run.err
    assert run.out == "True from the copy\n"

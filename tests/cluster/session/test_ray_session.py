"""Finding a cluster, and clear errors within seconds if there is none."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from tests.private_cluster import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def refused(launcher, address: str, **env: str):
    run = launcher.start(
        f"ray.address={address}", entrypoint={"script": launcher.script("print('never')")}, env=env or None
    )
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
        ("http://127.0.0.1:8265", "is the address of Ray's jobs API, and raylaunch needs the cluster's own address"),
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


def planned_as_auto(launcher, **env: str):
    """Run `--plan` where only the processes of the cluster can be seen, without RAY_ADDRESS."""
    port = launcher.cluster.address.rpartition(":")[2]
    code = (
        "import sys; from raylaunch.cluster.session import discovery; seen = discovery.running\n"
        f"discovery.running = lambda proc: [sign for sign in seen(proc) if sign.address.endswith(':{port}')]\n"
        "from raylaunch.cli.main import main; sys.exit(main(['--plan', '--nproc-per-node=1', 'train.py']))"
    )
    launcher.script("")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=launcher.folder,
        env=kept | {"TMPDIR": str(launcher.folder), "HOME": str(launcher.folder)} | env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_cluster_of_this_machine_is_found_by_its_raylet(launcher, cluster):
    """As `ray start --temp-dir` starts it: its address is in no file that Ray would find."""
    done = planned_as_auto(launcher, RAY_AUTH_TOKEN=cluster.token)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"cluster  [0-9.]+:{cluster.address.rpartition(':')[2]}\n", done.stdout)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RAY_AUTH_TOKEN": "f" * 64}, "refused our token (its address is from the raylet with process id "),
        ({}, "refused our token"),
        ({"RAY_AUTH_TOKEN": "a\nb"}, "the token has characters that are not printable ASCII"),
        ({"RAY_AUTH_MODE": "token"}, "no token can be sent to the Ray cluster at "),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty"),
    ],
)
def test_a_cluster_of_this_machine_that_does_not_admit_this_user(launcher, env, words):
    """The run does not go on without it, and Ray does not end this process."""
    done = planned_as_auto(launcher, **env)
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    assert "hint: give its token in RAY_AUTH_TOKEN" in done.stderr
    assert "hint: `ray.address: none`, or `--standalone`, runs the job on this machine without a cluster" in done.stderr
    assert "Stack" not in done.stderr


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

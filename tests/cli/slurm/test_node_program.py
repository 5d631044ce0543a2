"""The program of a Slurm node, without Slurm and with something else in the place of `ray start`."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from raylaunch.cli.slurm import node_program
from raylaunch.errors import ClusterError, ExitCode
from raylaunch.node.linux import procfs
from tests.cluster.conftest import wait_until


@pytest.fixture
def node(tmp_path, monkeypatch):
    """The environment of a task, whose folder and job are its own: by the job's id processes are found and killed.

    Signals are as before after the test.
    """
    monkeypatch.setattr(node_program, "_folder", lambda address: tmp_path / "ray")
    before = signal.getsignal(signal.SIGTERM)
    yield {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": f"{os.getpid()}", "SLURM_CPUS_ON_NODE": "2", "SLURM_PROCID": "1"}
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ray_is(monkeypatch):
    """`ray_is(code)` lets a Python program be `ray start`."""

    def replace(code):
        def start(module, environ, output=None):
            command = [sys.executable, "-c", code, *module]
            return subprocess.Popen(command, env=os.environ | environ, stdout=output, stderr=output)

        monkeypatch.setattr(node_program, "_start", start)

    return replace


@pytest.fixture
def head():
    """A head that listens, until it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(head):
    return "{}:{}".format(*head.getsockname())


def join(head, environ, **more):
    return node_program.main(["join"], environ | {"RAY_ADDRESS": address(head)} | more)


def test_what_ray_start_says_is_the_error(node, ray_is, head, tmp_path):
    """Its folder goes, so the whole text is in the message."""
    ray_is("print('no port'); raise SystemExit(1)")
    with pytest.raises(ClusterError, match="`ray start` failed on n1:\nno port"):
        join(head, node)
    assert not (tmp_path / "ray").exists()


def test_folders_of_jobs_that_were_killed_are_removed(node, ray_is, head, tmp_path, monkeypatch):
    """And not those of jobs that run, nor what somebody else has put there."""
    monkeypatch.setattr(node_program, "_folder", lambda address: tmp_path / "ray-1")
    for name in ("ray-2", "ray-3", "ray-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "ray-2/in-use.lock").touch()
    ray_is("raise SystemExit(1)")
    with open(tmp_path / "ray-3/in-use.lock", "w") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_SH)
        with pytest.raises(ClusterError):
            join(head, node)
    assert {path.name for path in tmp_path.iterdir()} == {"ray-3", "ray-x"}


def test_ray_start_is_tried_again(node, ray_is, head, tmp_path):
    """As on a machine that is too busy at first. What it had started then is killed."""
    ray_is(f"""
import pathlib, subprocess, sys, time
left = pathlib.Path("{tmp_path}/left")
if not left.exists():
    left.write_text(str(subprocess.Popen(["sleep", "100"]).pid))
    sys.exit("timed out")
print("Ray runtime started", flush=True)
pathlib.Path("{tmp_path}/started").touch()
time.sleep(100)
""")
    signal.signal(signal.SIGALRM, lambda *_: head.close() if (tmp_path / "started").exists() else None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    assert join(head, node) == ExitCode.OK
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert procfs.process_state(int((tmp_path / "left").read_text())) in ("Z", procfs.GONE)


def test_a_node_ends_with_its_head(node, ray_is, head):
    """The head has ended, so Ray does here, by SIGINT."""
    ray_is("import time; print('Ray runtime started', flush=True); time.sleep(100)")
    signal.signal(signal.SIGALRM, lambda *_: head.close())
    signal.setitimer(signal.ITIMER_REAL, 1)
    assert join(head, node) == ExitCode.OK


def test_a_node_that_is_told_to_leave_drains_and_comes_back(node, ray_is, head):
    """SIGTERM goes on to `ray start`, and when that has ended, the exit code says that the job is to be put back."""
    ray_is("""
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
print("Ray runtime started", flush=True)
signal.pause()
""")
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 2)
    assert join(head, node) == ExitCode.RESUMABLE


def test_a_node_whose_ray_ends_is_an_error(node, ray_is, head):
    """Nobody asked for it."""
    ray_is("import time; print('Ray runtime started', flush=True); time.sleep(1)")
    assert join(head, node) == ExitCode.UNAVAILABLE


def test_the_folder_of_another_user_is_refused(node, ray_is, head, tmp_path, monkeypatch):
    """Anybody may make a folder in /tmp."""
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ClusterError, match="is another user's"):
        join(head, node)


def test_a_folder_in_use_stays(node, ray_is, head, tmp_path):
    """Another node of the same cluster may run on this machine."""
    ray_is("raise SystemExit(1)")
    other = [sys.executable, "-c", "input()", str(tmp_path / "ray")]
    with subprocess.Popen(other, stdin=subprocess.PIPE) as process:
        with pytest.raises(ClusterError):
            join(head, node)
        process.kill()
    assert (tmp_path / "ray").exists()


def test_what_ray_leaves_is_killed(node, ray_is, head, tmp_path):
    """Such as what an agent has started that was killed: a process in a session of its own."""
    ray_is(f"""
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
raise SystemExit(1)
""")
    with pytest.raises(ClusterError):
        join(head, node)
    left = int((tmp_path / "pid").read_text())
    wait_until(lambda: procfs.process_state(left) in ("", "Z"), 60, "the process to be gone")


def test_what_ray_has_started_ends_even_if_the_program_is_killed(tmp_path):
    """Slurm kills the program, and where it tracks process groups, nothing that has a session of its own."""
    folder, mark = tmp_path / "ray", f"{tmp_path}"
    code = f"""
import os, pathlib, signal, subprocess
from raylaunch.cli.slurm import node_program
folder = pathlib.Path({str(folder)!r})
folder.mkdir()
with node_program._sweeper("RAYLAUNCH_SLURM_NODE={mark}", folder):
    env = os.environ | {{"RAYLAUNCH_SLURM_NODE": {mark!r}}}
    null = subprocess.DEVNULL
    print(subprocess.Popen(["sleep", "1000"], start_new_session=True, env=env, stdout=null).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: procfs.process_state(int(done.stdout)) in ("", "Z"), 60, "the process to be gone")
    wait_until(lambda: not folder.exists(), 60, "the folder to be gone")


def test_rays_agents_can_be_found(node, ray_is, head, tmp_path):
    """Ray's own processes set their titles, which would be written over the mark."""
    ray_is(f"""
import os
from ray._raylet import setproctitle
setproctitle("ray::DashboardAgent")
open({str(tmp_path / "environ")!r}, "wb").write(open("/proc/self/environ", "rb").read())
raise SystemExit(1)
""")
    with pytest.raises(ClusterError):
        join(head, node)
    assert os.fsencode(f"RAYLAUNCH_SLURM_NODE={os.getpid()}.1.") in (tmp_path / "environ").read_bytes()

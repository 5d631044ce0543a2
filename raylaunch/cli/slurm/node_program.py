"""The program that `srun` starts on each node of a Slurm job: Ray, and on the first node also the job.

    python -m raylaunch.cli.slurm.node_program run JOB_FILE...      # all nodes are in this Slurm job
    python -m raylaunch.cli.slurm.node_program lead JOB_FILE...     # each node is a job of its own: see stdin
    python -m raylaunch.cli.slurm.node_program join                 # such a node
    python -m raylaunch.cli.slurm.node_program sweep                # what each of them starts: see `_sweeper`

Slurm tells it by SIGTERM that the job ends soon. The first node passes that to the driver, which saves and stops the
run. A node that is a job of its own passes it to `ray start`, which drains it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from raylaunch.cli import run_once
from raylaunch.errors import ClusterError, ExitCode, signal_exit_code
from raylaunch.node.linux import processes

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Ports of heads, by the id of their Slurm job. They are below those that Linux takes for outgoing connections."""
_HEAD_SECONDS = 120.0
"""How long the head may take to start."""
_STARTS = 3
"""How often `ray start` is tried: it waits 30 s for its raylet, which a busy machine or file system may exceed."""
_END_SECONDS = 10.0
_POLL_SECONDS = 0.25
_DRAIN_SECONDS = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_MARK = "RAYLAUNCH_SLURM_NODE"
"""A variable of all processes that Ray starts on a node: the job and the number of the task."""
_KEEPS_ENVIRON = {"SPT_NOENV": "1"}
"""Lets Ray's agents, which outlive a dead head for a while, not write their titles over the mark (setproctitle)."""
_IN_USE = "in-use.lock"
"""A file in Ray's folder that is locked as long as a node of a job uses the folder."""
_STARTED = "Ray runtime started"
"""What `ray start` prints when its node is up."""


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what a node of a Slurm job does, and return the exit code. Raises ClusterError."""
    role, *job = words
    if role == "sweep":
        return _sweep()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.RESUMABLE))  # until there is somebody to tell
    if role == "join":
        return _join(environ["RAY_ADDRESS"], environ, leaves=True)
    address = f"{environ['SLURM_LAUNCH_NODE_IPADDR']}:{_FIRST_PORT + int(environ['SLURM_JOB_ID']) % _PORTS}"
    if environ["SLURM_PROCID"] != "0":
        return _join(address, environ, leaves=False)
    return _lead(address, job, environ, has_node_jobs=role == "lead")


def _lead(address: str, job: Sequence[str], environ: Mapping[str, str], *, has_node_jobs: bool) -> int:
    """Start Ray's head, and with `has_node_jobs` also the jobs on stdin; run a job, and return its exit code."""
    host, _, port = address.rpartition(":")
    options = ["--head", f"--port={port}", f"--node-ip-address={host}", f"--temp-dir={_folder(address)}"]
    options += ["--include-dashboard=false", *(["--num-cpus=0", "--num-gpus=0"] if has_node_jobs else _cpus(environ))]
    with _ray_node(address, options, {**environ, _DRAIN_SECONDS: "0"}):
        node_jobs = _submit(sys.stdin.read(), address, environ) if has_node_jobs else ""
        driver = _start(["raylaunch", *job], {**environ, "RAY_ADDRESS": address})
        signal.signal(signal.SIGTERM, lambda *_: driver.send_signal(signal.SIGTERM))
        code = driver.wait()
        if node_jobs:  # those that run end with the head
            subprocess.run(["scancel", "--state=PENDING", node_jobs], check=False)  # noqa: S603, S607
    return code if code >= 0 else signal_exit_code(-code)


def _submit(script: str, address: str, environ: Mapping[str, str]) -> str:
    """Submit the jobs of the nodes, and return their id."""
    # This job's own variables would be taken for options of the other's.
    kept = {name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    command = ["sbatch", "--parsable"]
    env = {**kept, "RAY_ADDRESS": address}
    done = subprocess.run(command, input=script, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise ClusterError(f"the nodes' jobs cannot be submitted: {done.stderr.strip()}")
    return done.stdout.partition(";")[0].strip()


def _join(address: str, environ: Mapping[str, str], *, leaves: bool) -> int:
    """Be a node of the cluster until its head ends. `leaves`: at SIGTERM the node is drained, and may come back.

    A node that is not alone in its job returns 0, since the exit code of `srun` is the highest one.
    """
    is_told = is_over = False

    def tell(*_: object) -> None:
        nonlocal is_told
        is_told = True
        ray.send_signal(signal.SIGTERM)

    _wait_for(address)
    drain = {} if leaves else {_DRAIN_SECONDS: "0"}
    with _ray_node(address, [f"--address={address}", *_cpus(environ)], {**environ, **drain}) as ray:
        signal.signal(signal.SIGTERM, tell if leaves else lambda *_: None)  # else the first node decides
        while ray.poll() is None and not (is_over := _has_ended(address)):
            time.sleep(_POLL_SECONDS)
        is_over = is_over or _has_ended(address)
    if is_over or not leaves:
        return ExitCode.OK
    return ExitCode.RESUMABLE if is_told else ExitCode.UNAVAILABLE


@contextlib.contextmanager
def _ray_node(address: str, options: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Have Ray on this node, as a child process: `ray start --block`. Raises ClusterError if it does not start."""
    folder, name = _folder(address), environ["SLURMD_NODENAME"]
    _remove_left(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ClusterError(f"{folder} on {name} is another user's", hint="remove it, or submit the job again")
    # Several clusters, and nodes of this one, may share a machine. So Linux chooses all ports but the head's.
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command = ["ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *ports, *options]
    node = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_PROCID']}."
    log = folder / f"ray-start-{node}log"
    with open(folder / _IN_USE, "w") as in_use, _sweeper(f"{_MARK}={node}", folder):
        fcntl.flock(in_use, fcntl.LOCK_SH)
        with open(folder / "start.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two that start at the same time would take the same names
            for _ in range(_STARTS):
                _kill_all_with(f"{_MARK}={node}")
                with log.open("w") as output:
                    process = _start(command, {**environ, _MARK: node, **_KEEPS_ENVIRON}, output.fileno())
                while _STARTED not in (said := log.read_text(errors="replace")) and process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                if process.poll() is None:
                    break
        try:
            if process.poll() is not None:
                raise ClusterError(f"`ray start` failed on {name}:\n{said}")
            yield process
        finally:
            process.send_signal(signal.SIGINT)  # and not SIGTERM, by which it would be drained first
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
            process.wait()


@contextlib.contextmanager
def _sweeper(mark: str, folder: Path) -> Iterator[None]:
    """Have a process that sweeps this node after the block, also if this process is killed in it.

    Where Slurm tracks processes by their groups, it kills this process and none of Ray's.
    """
    command = [sys.executable, "-m", "raylaunch.cli.slurm.node_program", "sweep"]
    nowhere = subprocess.DEVNULL  # Slurm waits until nobody can write to this process's output any more
    sweeper = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    assert sweeper.stdin is not None
    sweeper.stdin.write(os.fsencode(f"{mark}\n{folder}\n"))
    sweeper.stdin.flush()
    try:
        yield
    finally:
        sweeper.stdin.close()
        sweeper.wait()


def _sweep() -> int:
    """Read a mark and a folder. At the end of stdin, kill what has the mark, and remove Ray's folder."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark, folder = sys.stdin.read().splitlines()
    # An agent of raylaunch that was killed leaves processes for its successor, which stay for a minute.
    _kill_all_with(mark)
    if not any(_having(folder, "cmdline")):  # of all processes of Ray
        shutil.rmtree(folder, ignore_errors=True)
    return ExitCode.OK


def _kill_all_with(mark: str) -> None:
    """Kill the processes that have a mark, until there are none, or for some seconds."""
    deadline = time.monotonic() + _END_SECONDS
    while (left := [*_having(mark, "environ")]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _cpus(environ: Mapping[str, str]) -> list[str]:
    return [f"--num-cpus={environ['SLURM_CPUS_ON_NODE']}"]


def _folder(address: str) -> Path:
    """Return Ray's folder. The paths of its sockets may have 107 characters, so TMPDIR may be too long."""
    return Path(f"/tmp/raylaunch-slurm-{os.getuid()}-{address.rpartition(':')[2]}")  # noqa: S108


def _remove_left(own: Path) -> None:
    """Remove the folders of earlier jobs of which Slurm has killed all processes: with cgroups also the sweeper."""
    for folder in own.parent.glob(own.name.rpartition("-")[0] + "-*"):
        with contextlib.suppress(OSError), open(folder / _IN_USE) as in_use:
            if folder != own:
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _having(text: str, file: str) -> Iterator[int]:
    """Yield the processes that have a text in a file of theirs in /proc."""
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            if os.fsencode(text) in path.read_bytes():
                yield int(path.parent.name)


def _start(module: Sequence[str], environ: Mapping[str, str], output: int | None = None) -> subprocess.Popen[bytes]:
    """Start a Python module in a session of its own, so that Slurm's signals come to this process alone."""
    command = [sys.executable, "-m", *module]
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        processes.signal_on_parent_death(signal.SIGKILL, parent)

    return subprocess.Popen(  # noqa: S603
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509
    )


def _has_ended(address: str) -> bool:
    """Return whether nobody listens there. A head that does not answer is Ray's to judge."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + _HEAD_SECONDS
    while _has_ended(address):
        if time.monotonic() > deadline:
            raise ClusterError(f"there is no Ray head at {address}", hint="see the output of the job's first node")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(run_once.exit_code_of(lambda: main(sys.argv[1:], os.environ)))

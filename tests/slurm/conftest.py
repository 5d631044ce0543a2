"""A Slurm of four nodes on this machine: munged, slurmctld and a slurmd for each node, which leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import wait_until
from tests.private_cluster import MARK, end_marked, free_ports, marked, running

PROCTRACK = os.environ.get("PROCTRACK", "pgid")
NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
FIRST_PORT, MOST_JOBS = 20_000, 100
"""A job's id and the first one give the port of its head: see `node_program`. No Slurm here has more jobs."""
SWEEP_SECONDS = 20
"""How long processes may stay when all jobs have ended, of which some were killed."""
REQUEUE_SECONDS = 5
"""Slurm waits so long before a job that was put back starts again; 120 s by default."""
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
FirstJobId={job}
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=1000
PartitionName=all Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    folder: Path
    env: dict[str, str]
    first_job: int

    def run(self, *words: str, text: str = "") -> str:
        """Run a command of Slurm's or ours, and return what it prints."""
        done = subprocess.run(
            words, env=self.env, cwd=self.folder, input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *words: str) -> str:
        """Call `raylaunch slurm --submit`, and return the job's id."""
        return self.run(sys.executable, "-m", "raylaunch", "slurm", "--submit", *words).split()[-1]

    def jobs(self, *words: str) -> list[str]:
        """The lines of `squeue`, without its head."""
        return self.run("squeue", "--noheader", *words).splitlines()

    def output(self, job: str) -> str:
        """What a job has written so far, in all of its starts."""
        path = self.folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def ray_folders(self) -> list[Path]:
        """The folders of Ray that jobs have left; they have the ports of heads in their names."""
        heads = range(first := FIRST_PORT + self.first_job, first + MOST_JOBS)
        return [path for path in Path("/tmp").glob("raylaunch-slurm-*") if int(path.name.rpartition("-")[2]) in heads]

    def left(self) -> list[str]:
        """The processes that jobs have left: id, command line, parent."""
        return [f"{pid} `{command_line(pid)}`, child of {parent(pid)}" for pid in marked(self.env[MARK])]

    def wait_for_end_of_processes(self, seconds: float) -> None:
        """Wait until jobs have left nothing."""
        with contextlib.suppress(pytest.fail.Exception):
            wait_until(lambda: not self.left(), seconds, "processes to end")
        assert self.left() == []


@pytest.fixture(scope="session")
def all_slurm() -> Iterator[Slurm]:
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=path())]:
        pytest.skip(f"{', '.join(missing)} is not installed: `apt-get install slurm-wlm munge`")
    if os.getuid() != 0:
        pytest.skip("slurmd needs root")
    folder = Path(tempfile.mkdtemp(prefix="rl-slurm-", dir="/tmp"))
    mark = secrets.token_hex(8)
    try:
        first_job = start(folder)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
        yield Slurm(folder, env | {"PATH": path(), "SLURM_CONF": str(folder / "slurm.conf"), MARK: mark}, first_job)
    finally:
        stop(folder)
        end_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(all_slurm: Slurm) -> Iterator[Slurm]:
    """No job is there before and after a test, and no process of a job."""
    yield all_slurm
    for file in sorted(all_slurm.folder.glob("slurm-*.out")):  # pytest shows it when the test has failed
        print(f"--- {file.name}\n{file.read_text()}")
        file.unlink()
    with contextlib.suppress(AssertionError):
        all_slurm.run("scancel", "--user", "root")
    wait_until(lambda: not all_slurm.jobs(), 60, "jobs to end")
    all_slurm.wait_for_end_of_processes(SWEEP_SECONDS)


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def parent(pid: int) -> str:
    with contextlib.suppress(OSError):
        number = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return f"{number} `{command_line(number)}`"
    return "nobody: it has just ended"


def path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/usr/bin"


def start(folder: Path) -> int:
    """Start the daemons. Return the id of the first job, by which the heads' ports are not those of other tests."""
    folder.chmod(0o755)  # munged refuses sockets below a folder that others may not enter
    for name in ("munge", "state", *NODES):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o711)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    run(folder, "munged", "--force", *(f"--{option}={folder}/munge/{name}" for option, name in files.items()))
    port, *ports = consecutive_ports()
    first_job = 1 + (ports[-1] - FIRST_PORT) % (10_000 - MOST_JOBS)
    conf = CONF.format(
        host=socket.gethostname().partition(".")[0],
        folder=folder,
        port=port,
        first=ports[0],
        last=ports[-1],
        requeue=REQUEUE_SECONDS,
        job=first_job,
        proctrack=PROCTRACK,
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # read with PROCTRACK=cgroup
    run(folder, "slurmctld", "-c")
    for name in NODES:
        run(folder, "slurmd", "-N", name)
    return first_job


def consecutive_ports() -> list[int]:
    """As many as there are daemons: slurm.conf has them as a range."""
    while True:
        ports = sorted(free_ports(len(NODES) + 1))
        if ports[-1] - ports[1] == len(NODES) - 1:
            return ports


def run(folder: Path, *words: str) -> None:
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path()}
    subprocess.run(words, env=env, check=True, timeout=60)


def stop(folder: Path) -> None:
    """End the daemons, and those that they have started."""
    needle = os.fsencode(folder)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (pids := [*having(needle)]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(pytest.fail.Exception):
            wait_until(lambda pids=pids: not set(pids) & set(having(needle)), 10, "Slurm to end")


def having(needle: bytes) -> Iterator[int]:
    """The processes that have a text in their command lines or environments; zombies have neither."""
    for pid in running() - {os.getpid()}:
        with contextlib.suppress(OSError):
            if any(needle in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")):
                yield pid

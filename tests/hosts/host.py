"""One host: a set of Linux namespaces with a network, processes, a name and shared memory of its own.

Its first process reads from a pipe that only we hold. When that process ends the kernel ends all others there, and it
ends with us whatever happens to us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.warm_python import ForkedProcess

NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--time")
SLEPT = 86400
"""Seconds by which CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC on each host, as after a sleep of the machine."""
_TOOLS = ("ip", "unshare", "nsenter", "mount")

_FIRST_PROCESS = """
set -e
mount -t tmpfs shm /dev/shm
mount --bind "$0/hosts" /etc/hosts
mount --bind "$3/resolv.conf" /etc/resolv.conf
hostname "$1"
ip link set lo up
exec "$2" -ISc "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
"""
"""With SIGCHLD ignored, the kernel reaps the orphans that become its children."""


@dataclass(eq=False, slots=True)
class Host:
    """One host. `init` is the process id of its first process, seen from outside."""

    number: int
    holder: subprocess.Popen[str]
    init: int
    folder: Path
    node_id: str = ""
    """Ray's node id of the raylet that was started last."""
    ray: ForkedProcess | None = None
    """The `ray start` that was started last."""
    cut: bool = False
    lost_on_the_way_to: list[str] = field(default_factory=list)
    """Addresses that the host cannot send to."""
    bad_link: subprocess.Popen[str] | None = None
    """The program that delays or drops the host's packets."""

    @property
    def name(self) -> str:
        return f"host-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.{self.number // 256}.{self.number % 256}"

    @property
    def link(self) -> str:
        """The name of its network device at the bridge."""
        return f"to-{self.number}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a host. `pid` is its id seen from outside, by which it can be signalled; the host has another one."""

    pid: int
    command: str

    @property
    def environ(self) -> dict[str, str]:
        try:
            pairs = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return {}
        return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)

    @property
    def inner(self) -> int:
        """The process id inside the host."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
        return 0


def why_not() -> str:
    """Return why no hosts can be made here; `""`: they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: iproute2 and util-linux have them"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "try", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces do not work here: {tried.stderr.strip()}" if tried.returncode else ""


def start_host(number: int, folder: Path, shared: Path) -> Host:
    """Start the first process of a host.

    `folder` has its file `hosts`, and `shared` the file `resolv.conf` of all hosts.
    """
    first = ["sh", "-c", _FIRST_PROCESS, str(folder), f"host-{number}", sys.executable, str(shared)]
    holder = spawn(["unshare", *NAMESPACES, f"--boottime={SLEPT}", "--fork", "--kill-child", "--mount-proc", *first])
    return Host(number, holder, child(holder.pid), folder)


def spawn(command: list[str]) -> subprocess.Popen[str]:
    """Start the process, and wait for its first line, which says that it is inside the host."""
    # `unshare` has something to say of the mask of signals whenever its child is killed.
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True)
    assert process.stdout is not None
    if not process.stdout.readline():
        process.wait()
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return process


def send(pids: Iterable[int], number: int = signal.SIGTERM) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def child(pid: int) -> int:
    """Return the only child of a process."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and parent(int(folder.name)) == pid:
                return int(folder.name)
    raise RuntimeError(f"process {pid} has no child")


def pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""

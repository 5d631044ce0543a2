"""A Ray cluster of several hosts on one machine, and the faults that can be inflicted on a host.

The hosts hang on a bridge that lives in a network namespace of its own, so outside nothing is changed; and they end
with us whatever happens to us, so nothing has to be found and cleaned up but a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests import head_storage
from tests.head_storage import GcsProcess
from tests.hosts.host import NAMESPACES, Host, Process, child, parent, pid_space, send, spawn, start_host
from tests.private_cluster import LEAN, NO_PRESTART, RAY_START, WORKERS, warm_ray
from tests.warm_python import WarmPython

_PORT, _REDIS_PORT = 6379, 6380
_UP_SECONDS = 240.0
_PREFIX = "rlh-"
_NOBODY = "02:00:00:00:00:00"
"""An address on the network that no device has."""


class Hosts:
    """A Ray cluster of that many hosts, each with a raylet. The first is the head, where drivers run."""

    def __init__(self, count: int, *, cpus: int = 2, lean: bool = False, storage: bool = False) -> None:
        """`cpus`: what each raylet says it has; `lean`: Ray's workers and helpers are those of `lean_ray.py`, and none is prestarted.

        `storage`: the head keeps its tables in a Redis, and its GCS can be killed and started again.
        """
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        self.token = secrets.token_hex(32)
        self.hosts: list[Host] = []
        self._cpus = cpus
        self._lean = lean
        self._storage = contextlib.ExitStack() if storage else None
        self._count = 0
        self._commands: list[subprocess.Popen[Any]] = []
        self._inspector: subprocess.Popen[str] | None = None
        self._warm: WarmPython | None = None
        (self.folder / "resolv.conf").write_text("")
        self._switch = spawn(["unshare", "--net", "sh", "-c", "echo; exec cat"])
        try:
            self._at_switch("ip link add bridge type bridge")
            self._at_switch("ip link set bridge up")
            if count:
                self._start(count)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    @property
    def warm(self) -> WarmPython:
        """What Ray's processes and drivers are forked from, on whichever host they are."""
        if self._warm is None:
            kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            self._warm = warm_ray(kept | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}, self.folder)
        return self._warm

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{_PORT}"

    def _start(self, count: int) -> None:
        self._make_host()
        if self._storage is not None:
            start = partial(self.popen, self.head)
            self._storage.enter_context(head_storage.redis(self.folder, _REDIS_PORT, self.head.address, start))
        self._start_ray(self.head)
        self._inspector = self._start_inspector()
        for _ in range(1, count):
            self._start_ray(self._make_host())
        for host in self.hosts:
            self.wait_for(host)

    # Faults.

    def add(self, *, wait: bool = True, resources: dict[str, float] | None = None) -> Host:
        """Add a host. `wait`: wait until Ray knows it."""
        host = self._make_host()
        self._start_ray(host, resources or {})
        if wait:
            self.wait_for(host)
        return host

    def kill(self, host: Host) -> None:
        """Kill all processes on a host at once. The kernel closes their connections."""
        send({host.init}, signal.SIGKILL)
        host.holder.communicate()

    def power_off(self, host: Host) -> None:
        """Cut the network of a host, then kill all its processes: connections stay open at the other end."""
        self.cut(host)
        self.kill(host)

    def remove(self, host: Host) -> None:
        """Kill a host, and have Ray forget it too."""
        self.quick(host)
        if host.holder.poll() is None:
            self.kill(host)
        if host.node_id and self.alive(host):
            self.ask("bury", host.node_id)
        shutil.rmtree(host.folder, ignore_errors=True)
        self.hosts.remove(host)

    def cut(self, host: Host, to: Host | None = None) -> None:
        """Drop all packets to and from a host, silently. `to`: drop only what it sends to that host."""
        if to is None:
            self._at_switch(f"ip link set {host.link} down")
            host.cut = True
        else:
            self._at(host, f"ip neigh replace {to.address} lladdr {_NOBODY} dev eth0 nud permanent")
            host.lost_on_the_way_to.append(to.address)

    def heal(self, host: Host) -> None:
        """Undo `cut`. A host that is dead has no link any more."""
        if host.holder.poll() is None:
            if host.cut:
                self._at_switch(f"ip link set {host.link} up")
            for address in host.lost_on_the_way_to:
                self._at(host, f"ip neigh del {address} dev eth0")
        host.cut = False
        host.lost_on_the_way_to.clear()

    def slow(self, host: Host, milliseconds: int, *, jitter: int = 0, loss: float = 0.0) -> None:
        """Delay each packet to or from a host by about so many milliseconds, and drop a share of them."""
        self.quick(host)
        bad, good = f"bad-{host.number}", f"good-{host.number}"
        host.bad_link = spawn(
            [
                *("nsenter", f"--target={self._switch.pid}", "--net", sys.executable, "-IS"),
                *(str(Path(__file__).with_name("link.py")), bad, good, str(milliseconds), str(jitter), str(loss)),
            ]
        )
        self._at_switch(f"ip link add aside-{host.number} type bridge")
        for device, bridge in ((host.link, f"aside-{host.number}"), (bad, f"aside-{host.number}"), (good, "bridge")):
            self._at_switch(f"ip link set {device} master {bridge} up")
        self._at_switch(f"ip link set aside-{host.number} up")

    def quick(self, host: Host) -> None:
        """Undo `slow`."""
        if host.bad_link is not None:
            host.bad_link.communicate()
            self._at_switch(f"ip link del aside-{host.number}")
            if host.holder.poll() is None:
                self._at_switch(f"ip link set {host.link} master bridge")
        host.bad_link = None

    def pause(self, host: Host) -> None:
        """Stop all processes on a host by SIGSTOP. The kernel still answers, for example pings."""
        stopped: set[int] = set()
        while fresh := {process.pid for process in self.processes(host)} - stopped:
            send(fresh, signal.SIGSTOP)
            stopped |= fresh

    def resume(self, host: Host) -> None:
        """Undo `pause`."""
        pids = {process.pid for process in self.processes(host)}
        # `nsenter` stops itself when what it started stops.
        send(pids | {parent(pid) for pid in pids} & {command.pid for command in self._commands}, signal.SIGCONT)

    def drain(self, host: Host, deadline: float, why: str = "the machine will be taken away") -> None:
        """Give Ray's drain notice, as an autoscaler does for a node that is about to be preempted."""
        self.ask("drain", host.node_id, deadline, why)

    def sigterm(self, host: Host) -> None:
        """Send SIGTERM to `ray start --block`, as Kubernetes does: Ray drains the node for 30 s, then ends it."""
        assert host.ray is not None
        send({host.ray.pid})

    def kill_raylet(self, host: Host) -> None:
        """Kill only the raylet."""
        send({process.pid for process in self.processes(host) if "raylet/raylet " in process.command}, 9)

    def gcs(self) -> GcsProcess:
        """Return the head's GCS, to be killed and started again. `storage` must be set."""
        return GcsProcess(process.pid for process in self.processes(self.head, "/gcs_server "))

    def restart_gcs(self, gcs: GcsProcess) -> None:
        """Start it again after it was killed."""
        gcs.start(partial(self.popen, self.head))
        gcs.pid = inside(gcs.process)

    # Queries.

    def processes(self, host: Host, word: str = "") -> list[Process]:
        """Return all processes but the first whose command line contains the word."""
        found = []
        space = pid_space(host.init)
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != host.init and pid_space(int(folder.name)) == space:
                with contextlib.suppress(OSError):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command and word in command:
                        found.append(Process(int(folder.name), command.strip()))
        return found if space else []

    def shared_memory(self, host: Host) -> set[str]:
        """Return the names in the host's /dev/shm."""
        with contextlib.suppress(OSError):
            return set(os.listdir(f"/proc/{host.init}/root/dev/shm"))
        return set()

    def sockets(self, host: Host) -> set[str]:
        """Return the named Unix sockets of the host, abstract ones (`@...`) too."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{host.init}/net/unix").read_text().splitlines()[1:]
            return {parts[7] for line in lines if len(parts := line.split()) > 7}
        return set()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return Ray's table of nodes: dicts with the keys `address`, `alive` and `death`, by node id."""
        return self.ask("nodes")

    def alive(self, host: Host) -> bool:
        """Return whether Ray counts the host as alive."""
        return bool(self.nodes().get(host.node_id, {}).get("alive"))

    def wait_for(self, host: Host) -> None:
        """Wait until Ray knows the host."""
        deadline = time.monotonic() + _UP_SECONDS
        while not host.node_id:
            for node_id, node in self.nodes().items():
                if node["address"] == host.address and node["alive"]:
                    host.node_id = node_id
            if time.monotonic() > deadline or host.holder.poll() is not None:
                msg = f"{host.name} did not come up:\n{(host.folder / 'ray.log').read_text()}"
                raise RuntimeError(msg)
            time.sleep(0.05)

    def ask(self, question: str, *more: object) -> Any:
        """Ask the inspector a question about Ray's state; see inspector.py."""
        assert self._inspector is not None
        assert self._inspector.stdin is not None
        assert self._inspector.stdout is not None
        self._inspector.stdin.write(json.dumps([question, *more]) + "\n")
        self._inspector.stdin.flush()
        return json.loads(self._inspector.stdout.readline())

    # Processes on a host.

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment in which a process may connect to the cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        temp = {"TMPDIR": str(self.folder / "tmp")}
        return (
            kept | temp | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": self.address} | more
        )

    def popen(
        self, host: Host, command: list[str], *, cwd: Path | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a host. The process is `nsenter`, which ends as its only child does: see `inside`."""
        entered = ["nsenter", f"--target={host.init}", *NAMESPACES, "--", "env", "-C", str(cwd or "/"), *command]
        (self.folder / "tmp").mkdir(exist_ok=True)
        process = subprocess.Popen(entered, text=True, **({"env": self.env()} | options))
        self._commands.append(process)
        return process

    def run_in(self, host: Host, command: list[str], **options: Any) -> str:
        """Run a command on a host; return its output."""
        process = self.popen(host, command, stdout=subprocess.PIPE, **options)
        out, _ = process.communicate(timeout=200)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, out)
        return out

    def close(self) -> None:
        """End all hosts and processes."""
        for host in self.hosts:
            self.quick(host)
            if host.holder.poll() is None:
                self.kill(host)
        if self._storage is not None:
            self._storage.close()
        if self._warm is not None:
            self._warm.close()
        for process in [*self._commands, self._switch]:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_host(self) -> Host:
        self._count += 1
        folder = self.folder / str(self._count)
        (folder / "tmp").mkdir(parents=True)
        (folder / "hosts").touch()
        host = start_host(self._count, folder, self.folder)
        self.hosts.append(host)
        self._write_names()
        self._at_switch(f"ip link add {host.link} type veth peer name eth0 netns {host.init}")
        self._at_switch(f"ip link set {host.link} master bridge up")
        for command in (f"addr add {host.address}/16 dev eth0", "link set eth0 up", "route add default dev eth0"):
            self._at(host, f"ip {command}")
        return host

    def _write_names(self) -> None:
        """Write /etc/hosts of each host, where its own name leads to loopback, as on Debian and Ubuntu."""
        for host in self.hosts:
            names = {other.name: other.address for other in self.hosts} | {host.name: "127.0.1.1"}
            lines = [f"{address} {name}" for name, address in ({"localhost": "127.0.0.1"} | names).items()]
            (host.folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def _start_ray(self, host: Host, resources: dict[str, float] | None = None) -> None:
        place = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        if host is not self.head:
            place = [f"--address={self.address}"]
        options = [
            *(*place, f"--node-ip-address={host.address}"),
            *(f"--num-cpus={self._cpus}", "--num-gpus=0", f"--resources={json.dumps(resources or {})}"),
            *(f"--temp-dir={host.folder}", "--object-store-memory=80000000", "--disable-usage-stats", *LEAN),
        ]
        env = self.env(TMPDIR=str(host.folder / "tmp"), **(NO_PRESTART if self._lean else {}))
        if host is self.head:
            del env["RAY_ADDRESS"]
            env |= {"RAY_REDIS_ADDRESS": f"{host.address}:{_REDIS_PORT}"} if self._storage is not None else {}
        # A `ray start` that stays ends all of a head whose GCS ends.
        stays = ["--block"] if host is not self.head or self._storage is None else []
        argv = [str(self.folder / WORKERS) if self._lean else "", "start", *stays, *options]
        with open(os.devnull) as nothing, (host.folder / "ray.log").open("w") as log:
            files = (nothing, log, log)
            host.ray = self.warm.start(str(RAY_START), argv, env=env, cwd=Path("/"), files=files, beside=host.init)

    def _start_inspector(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("inspector.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        inspector = self.popen(self.head, command, **pipes)
        if inspector.stdout is None or not inspector.stdout.readline():
            msg = f"the head did not come up:\n{(self.head.folder / 'ray.log').read_text()}"
            raise RuntimeError(msg)
        return inspector

    def _at_switch(self, command: str) -> None:
        subprocess.run(["nsenter", f"--target={self._switch.pid}", "--net", *command.split()], check=True)

    def _at(self, host: Host, command: str) -> None:
        subprocess.run(["nsenter", f"--target={host.init}", "--net", *command.split()], check=True)


def inside(entered: subprocess.Popen[Any]) -> int:
    """Return the process id, seen from outside, of what `Hosts.popen` started."""
    return child(entered.pid)


def _sweep() -> None:
    """Return the folders of hosts whose test process was killed."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        owner = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)

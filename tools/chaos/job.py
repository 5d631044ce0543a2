"""The job under test: started on the head, watched by way of its event log and its step logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.hosts.host import Host, Process, parent
from tests.hosts.hosts import Hosts, inside
from tools.chaos.check_steps import AttemptSteps, Note, attempts, read

_SCRIPT = Path(__file__).with_name("train.py")
_ENDLESS = 10**9
SETTINGS: dict[str, Any] = {
    "nnodes": "1:4",
    "nproc_per_node": 2,
    "max_restarts": 100_000,
    "hang_timeout": 4,
    "exclude_after": 0,
    "last_call": 1,
    "shutdown_timeout": 10,
    "show": "none",
}


class Job:
    """`events` are the journal's lines, as far as they are written; times in them are seconds since 1970."""

    def __init__(self, hosts: Hosts, folder: Path, *args: str, detach: bool = False, **more: Any) -> None:
        """`args`: further ones of the script. `detach`: its driver is an actor, at first on the second host."""
        self.hosts = hosts
        self.folder = folder
        folder.mkdir(parents=True)
        self.training = folder / "training"
        command_line = [str(self.training), "--steps", str(_ENDLESS), *args]
        job = SETTINGS | more | {"entrypoint": {"script": str(_SCRIPT), "args": command_line}}
        (folder / "job.yaml").write_text(json.dumps(job))
        self._said = (folder / "said").open("w")
        command = [sys.executable, "-m", "raylaunch", "job.yaml"]
        self.is_detached = detach
        if detach:
            env = hosts.env(XDG_STATE_HOME=str(folder / "state"))
            started = hosts.popen(hosts[1], [*command, "-d"], cwd=folder, stdout=self._said, stderr=self._said, env=env)
            if started.wait(timeout=200):
                raise RuntimeError(f"the run did not start:\n{self.said()}")
            command = [sys.executable, "-m", "raylaunch", "attach"]
            self.process = hosts.popen(
                hosts.head, command, cwd=folder, stdout=subprocess.DEVNULL, stderr=self._said, env=env
            )
        else:
            self.process = hosts.popen(hosts.head, command, cwd=folder, stdout=self._said, stderr=self._said)
        self._began = 0.0
        self._read = 0
        self._last_read = b""
        self._lines: list[dict[str, Any]] = []

    # What it says.

    def lines(self) -> list[dict[str, Any]]:
        """Entries of events.jsonl, with `at` of the event in seconds since 1970.

        A driver that takes over may remove the last entries: then all is read again.
        """
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read - len(self._last_read))
                if file.read(len(self._last_read)) != self._last_read:
                    self._read, self._last_read, self._lines = 0, b"", []
                    file.seek(0)
                while (text := file.readline()).endswith(b"\n"):
                    self._read, self._last_read = file.tell(), text
                    self._take(text)
        return self._lines

    @property
    def log(self) -> Path:
        """The event log; a path that does not exist until there is one."""
        return next(iter(self.folder.glob("runs/*/*/events.jsonl")), self.folder / "events.jsonl")

    def _take(self, text: bytes) -> None:
        line = json.loads(text)
        if "job" in line:
            self._began = datetime.fromisoformat(line["began"]).timestamp()
        elif line["event"] is not None:
            line["event"]["at"] += self._began
            self._lines.append(line)

    def events(self, kind: str, since: float = 0.0, **facts: Any) -> list[dict[str, Any]]:
        """Return the events of a kind since a time, with these facts."""
        found = [line["event"] for line in self.lines() if line["event"]["is"] == kind and line["event"]["at"] >= since]
        return [event for event in found if all(event.get(name) in (fact, [fact]) for name, fact in facts.items())]

    def actions(self, kind: str) -> list[dict[str, Any]]:
        return [action for line in self.lines() for action in line["actions"] if action["is"] == kind]

    @property
    def attempt(self) -> int:
        return max((launch["attempt"] for launch in self.actions("Launch")), default=0)

    @property
    def roster(self) -> list[str]:
        launches = self.actions("Launch")
        return launches[-1]["roster"] if launches else []

    def nodes_on(self, host: Host) -> list[str]:
        """Return the names of all agents that ever joined from this host."""
        return [event["node"] for event in self.events("NodeJoined") if event["address"] == host.address]

    def asked(self, attempt: int) -> bool:
        """Return whether the workers of this attempt were asked to save, as before a planned end."""
        return any(ask["attempt"] == attempt for ask in self.actions("RequestCheckpoint"))

    def runs_on(self, host: Host) -> bool:
        """Return whether the current attempt has workers on this host."""
        return not set(self.nodes_on(host)).isdisjoint(self.roster)

    def notes(self) -> list[Note]:
        return read(self.training)

    def attempts(self) -> list[AttemptSteps]:
        return attempts(self.notes())

    def trains(self, beyond: int, since: float) -> AttemptSteps | None:
        """Return the first attempt after that one all of whose ranks have made their first step since then."""
        found = attempts(read(self.training, beyond))
        return next((one for one in found if one.trained > since * 1e9), None)

    def present(self) -> AttemptSteps | None:
        """Return the current attempt, if it has begun to train."""
        return next(iter(attempts(read(self.training, self.attempt - 1))), None)

    # The processes of the job.

    @property
    def driver(self) -> tuple[int, Host] | None:
        """The process id of the driver, and its host; None: there is none now."""
        if not self.is_detached:
            return inside(self.process), self.hosts.head
        for host in self.hosts.hosts:
            for process in self.hosts.processes(host, "ray::raylaunch: driver"):
                return process.pid, host
        return None

    def workers(self, host: Host) -> list[int]:
        """Return the process ids, as seen from outside, of the workers of the current attempt on this host."""
        nodes = set(self.nodes_on(host))
        started = [event for event in self.events("WorkersStarted", attempt=self.attempt) if event["node"] in nodes]
        pids = {pid for event in started for pid in event["pids"]}
        return [process.pid for process in self.processes(host) if process.inner in pids]

    def loaders(self, host: Host) -> list[int]:
        """Return the process ids of the workers' children, which load data."""
        workers = set(self.workers(host))
        return [process.pid for process in self.processes(host) if parent(process.pid) in workers]

    def processes(self, host: Host) -> list[Process]:
        """Return all processes of the job on this host but its agent."""
        return [each for each in self.hosts.processes(host, "raylaunch: ") if "ray::" not in each.command]

    def agents(self, host: Host) -> list[int]:
        return [process.pid for process in self.hosts.processes(host, "ray::raylaunch: agent")]

    def fork_servers(self, host: Host) -> list[int]:
        """Return the process ids of fork servers that have workers."""
        return list({parent(worker) for worker in self.workers(host)} - set(self.subreapers(host)))

    def subreapers(self, host: Host) -> list[int]:
        """Return the process ids of those that have started others of the job, and that none of the job has started.

        One whose agent was killed, and which waits for another agent, has no processes any more.
        """
        pids = {process.pid for process in self.processes(host)}
        return [pid for pid in {parent(pid) for pid in pids} & pids if parent(pid) not in pids]

    def helpers(self, host: Host) -> list[int]:
        """Return the process ids of the fork servers' other children: stores and zygotes."""
        servers, workers = set(self.fork_servers(host)), set(self.workers(host))
        return [each.pid for each in self.processes(host) if parent(each.pid) in servers and each.pid not in workers]

    def stores(self, host: Host) -> list[int]:
        """Return the process ids of stores: the host of rank 0 has its attempt's and the next one's."""
        return [pid for pid in self.helpers(host) if _name(pid) == "rl:store"]

    def zygotes(self, host: Host) -> list[int]:
        stores = self.stores(host)
        return [pid for pid in self.helpers(host) if pid not in stores]

    # The end of the job.

    def finish(self, steps_more: int = 40) -> int | None:
        """Let the job end a few steps later; return its exit code. None: it does not end."""
        found = self.attempts()
        last = (found[-1].last if found else 0) + steps_more
        aside = self.training / "last.tmp"
        aside.write_text(str(last))
        aside.replace(self.training / "last")
        wait_for(lambda: self.process.poll() is not None, 180)
        return self.process.returncode

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(inside(self.process), signal.SIGKILL)
            self.process.wait(timeout=100)
        self._said.close()

    def said(self) -> str:
        return (self.folder / "said").read_text()


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    """Poll until this returns something true, for `seconds` at most; return its last result."""
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def reference(folder: Path, count: int) -> Path:
    """Run the same training without faults, on one rank without raylaunch; return the file of its final parameters."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_SCRIPT), str(folder), "--steps", str(count), "--step-seconds", "0"]
    subprocess.run(command, env=os.environ | alone, check=True, timeout=900)
    return folder / "final.bin"

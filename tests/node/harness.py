"""A node without Ray for tests: a supervisor, waits with deadlines, and a check that nothing is left after each test.

Every process of a test carries RAYLAUNCH_TEST_MARK in its environment, by which orphans are found wherever they are.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.failure import Failure
from raylaunch.core.ranks import Member, Rendezvous, assign
from raylaunch.node import proc, processes
from raylaunch.node.messages import Ready, StoreOpen
from raylaunch.node.settings import NodeSettings
from raylaunch.node.supervisor import Event, Supervisor
from tests import private_cluster
from tests.private_cluster import MARK

SECONDS = 100.0
"""How long anything may take before a test calls it missing; nothing waits that long when all is well."""
ADDRESS = "127.0.0.1"

SAY = """
import os as _os

def say(*words):
    with open(_os.environ["SAY"], "w") as ears:
        ears.write(" ".join(map(str, words)) + "\\n")

def own_port(rank):
    import socket
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server, open("port.part", "w") as file:
            file.write(str(server.getsockname()[1]))
        _os.rename("port.part", "port")
    while not _os.path.exists("port"):
        pass
    return open("port").read()
"""
"""Put before a script: lets it tell the test something, and its ranks agree on a port that nobody else serves."""


def basic_env(mark: str) -> dict[str, str]:
    """No locale and no thread counts on purpose: Python's and torch's own defaults must do."""
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    return env | {MARK: mark, "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of workers ended, by rank."""

    exit_codes: dict[int, int]
    failures: dict[int, Failure]
    values: dict[int, bytes]
    folders: dict[int, Path]

    @property
    def exit_code(self) -> int:
        return self.exit_codes[0]

    @property
    def failure(self) -> Failure:
        return self.failures[0]

    def stdout(self, rank: int = 0) -> str:
        return (self.folders[rank] / "stdout.log").read_text(errors="surrogateescape")

    def stderr(self, rank: int = 0) -> str:
        return (self.folders[rank] / "stderr.log").read_text(errors="surrogateescape")


class Ears:
    """A pipe with a name, into which the scripts of a test `say` things."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._buffer = b""

    def hear(self, count: int = 1, seconds: float = SECONDS) -> list[str]:
        """The next so many lines."""
        deadline = time.monotonic() + seconds
        while self._buffer.count(b"\n") < count:
            left = deadline - time.monotonic()
            assert left > 0, f"heard only {self._buffer!r}"
            if select.select([self._fd], [], [], left)[0]:
                self._buffer += os.read(self._fd, 65536)
        *lines, self._buffer = self._buffer.split(b"\n", count)
        return [line.decode() for line in lines]

    def close(self) -> None:
        os.close(self._fd)


class Node:
    """A supervisor, with words for what tests do with it."""

    def __init__(self, start_method: str = "forkserver", **changes: Any) -> None:
        self.mark = uuid.uuid4().hex
        settings = NodeSettings(
            node="node-0",
            address=ADDRESS,
            run_dir="/nonexistent",
            run_id="tests",
            max_restarts=3,
            kind="script",
            target="",
            args=(),
            env=basic_env(self.mark),
            cwd="/",
            backend=None,
            preload=("torch",),
            start_method=start_method,
        )
        self.supervisor = Supervisor(replace(settings, **changes))
        self.attempt = 0
        self.folder = Path("/nonexistent")
        self._unseen: list[Event] = []
        self._basic_env = self.supervisor.settings.env

    def start(self) -> Ready:
        self.supervisor.start()
        return self.wait(Ready)

    def move_to(self, folder: Path, mark: str, ears: Ears) -> None:
        """Have the next attempts run for another test."""
        self.folder = folder
        self.mark = mark
        env = self._basic_env | {MARK: mark, "SAY": str(ears.path)}
        self.set(run_dir=str(folder / "run"), cwd=str(folder), env=env)

    def set(self, **changes: Any) -> None:
        self.supervisor.settings = replace(self.supervisor.settings, **changes)

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script; its path."""
        path = self.folder / name
        path.write_text(SAY + textwrap.dedent(text))
        return str(path)

    def launch(self, target: str, *args: Any, nproc: int = 1, port: int = 0, **changes: Any) -> int:
        """Start the next attempt of this; its number."""
        self.attempt += 1
        plain = {"kwargs": {}, "payload": b"", "pass_local_rank": False, "numa_binding": None}
        self.set(**({"kind": "script", "target": target, "args": args} | plain | changes))
        part = assign(self.attempt, [Member(node="node-0", address=ADDRESS, nproc=nproc)])[0]
        meeting = Rendezvous(
            master_addr=self.supervisor.settings.address,
            master_port=port,
            run_id="tests",
            max_restarts=3,
            restart_count=self.attempt - 1,
        )
        self.supervisor.launch(part, meeting)
        return self.attempt

    def run(self, target: str, *args: Any, nproc: int = 1, **changes: Any) -> Outcome:
        """Start it, and wait until all of it has ended by itself."""
        self.launch(target, *args, nproc=nproc, **changes)
        failures: dict[int, Failure] = {}
        while True:
            event = self.wait(WorkersExited)
            failures |= {failure.rank: failure for failure in event.failures}
            if not event.failures or len(failures) == nproc:
                break
        return self.outcome(nproc, failures)

    def outcome(self, nproc: int, failures: dict[int, Failure]) -> Outcome:
        return Outcome(
            exit_codes={rank: failures[rank].exit_code if rank in failures else 0 for rank in range(nproc)},
            failures=failures,
            values=self.supervisor.values(),
            folders={rank: self.rank_folder(rank) for rank in range(nproc)},
        )

    def rank_folder(self, rank: int = 0) -> Path:
        settings = self.supervisor.settings
        return Path(settings.folder(self.attempt, rank))

    def open_store(self) -> int:
        """The port of a store for the next attempt."""
        self.supervisor.open_store(self.attempt + 1)
        word = self.wait(StoreOpen)
        assert word.attempt == self.attempt + 1
        assert word.port, word.why
        return word.port

    def stop(self, grace: float = 0.0, attempt: int | None = None) -> WorkersStopped:
        attempt = self.attempt if attempt is None else attempt
        self.supervisor.stop(attempt, grace)
        return self.wait(WorkersStopped, lambda event: event.attempt == attempt)

    def wait(self, kind: type[Any], which: Callable[[Any], bool] = lambda _: True, seconds: float = SECONDS) -> Any:
        """The next event of a kind; those before it are dropped, those after it kept."""
        deadline = time.monotonic() + seconds
        while True:
            while self._unseen:
                event = self._unseen.pop(0)
                if isinstance(event, kind) and which(event):
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} within {seconds} s"
            if select.select([self.supervisor.fileno()], [], [], left)[0]:
                self._unseen.extend(self.supervisor.poll())

    def silence(self, seconds: float) -> list[Event]:
        """What happens in the given time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.supervisor.fileno()], [], [], left)[0]:
                self._unseen.extend(self.supervisor.poll())
        found, self._unseen = self._unseen, []
        return found

    def children(self) -> set[int]:
        """Processes that the fork server has: workers and stores, but not its reserve."""
        return children_of(self.supervisor.server_pid) - {self.reserve()}

    def reserve(self) -> int:
        """Process id of the fork server's; 0: there is none."""
        return reserve_of(self.supervisor.server_pid)

    def tidy(self) -> None:
        """End the present attempt."""
        if self.attempt:
            self.stop()
        self._unseen.clear()


def started(event: object) -> bool:
    return isinstance(event, WorkersStarted)


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found.update(int(child) for child in (thread / "children").read_text().split())
    return found


def reserve_of(server: int) -> int:
    """The one child of the fork server that leads a process group and no session; 0: there is none."""
    for pid in children_of(server):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == pid != os.getsid(pid) and proc.state(pid) not in ("Z", proc.GONE):
                return pid
    return 0


def marked(mark: str) -> dict[int, str]:
    """All processes that carry the mark, wherever they are, with their command lines."""
    found: dict[int, str] = {}
    for pid in private_cluster.marked(mark):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def until(check: Callable[[], Any], why: str, seconds: float = SECONDS) -> Any:
    """Look again and again; for what sends no word."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, why
        time.sleep(0.005)
    return found


def wait_gone(pid: int, seconds: float = SECONDS) -> None:
    """Until the process is no more (a zombie counts as gone)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], seconds)[0], f"process {pid} still lives"
    finally:
        os.close(fd)


def wait_stopped_by_signal(pid: int) -> None:
    """Until SIGSTOP has taken hold of it."""
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", f"{pid} is not stopped")


def none_left(mark: str, seconds: float = SECONDS) -> None:
    """Until no process carries the mark."""
    until(lambda: not marked(mark), f"processes of mark {mark} are left", seconds)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection((ADDRESS, port), timeout=1).close()
    except OSError:
        return False
    return True


def plain(*command: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -u ...`, with its output in files, as a worker's is."""
    with (cwd / "plain.out").open("w+") as out, (cwd / "plain.err").open("w+") as err:
        done = subprocess.run(
            [sys.executable, "-u", *command],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            timeout=SECONDS,
            check=False,
        )
    texts = ((cwd / name).read_text(errors="surrogateescape") for name in ("plain.out", "plain.err"))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def _open_fds() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return {fd for fd in found if "/proc/" not in fd}


def _shared_memory() -> set[str]:
    """Ray's own things aside."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("plasma", "ray"))}


def _nobodys(names: set[str]) -> set[str]:
    """Shared memory that no process has: what is in use belongs to another test that runs beside this one."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            used |= {name for name in names if f"/dev/shm/{name}" in text}
    return names - used


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def no_leaks(mark: str) -> Iterator[None]:
    """After every test: no new children, open files or shared memory, and no process with the test's mark."""
    children, fds, memory = processes.children(), _open_fds(), _shared_memory()
    yield
    none_left(mark)
    until(lambda: processes.children() <= children, "children are left")
    assert _open_fds() - fds == set()
    until(lambda: not _nobodys(_shared_memory() - memory), "shared memory is left")


@pytest.fixture
def ears(tmp_path: Path) -> Iterator[Ears]:
    ears = Ears(tmp_path / "ears")
    yield ears
    ears.close()


@contextlib.contextmanager
def lent(node: Node, folder: Path, mark: str, ears: Ears) -> Iterator[Node]:
    """A node that lives on after the test; whatever ran on it is ended and its fork server is as it was."""
    node.move_to(folder, mark, ears)
    yield node
    node.tidy()
    stores = len(node.supervisor._owed.stores)
    until(lambda: len(node.children()) <= stores, "the fork server has children left")


@contextlib.contextmanager
def running(start_method: str = "forkserver", **changes: Any) -> Iterator[Node]:
    node = Node(start_method, **changes)
    node.start()
    try:
        yield node
    finally:
        node.supervisor.close()
        none_left(node.mark)


@pytest.fixture(scope="session")
def warm_forking() -> Iterator[Node]:
    with running() as node:
        mark = node.mark
        yield node
    none_left(mark)


@pytest.fixture(scope="session")
def warm_spawning() -> Iterator[Node]:
    with running("spawn") as node:
        mark = node.mark
        yield node
    none_left(mark)


@pytest.fixture
def node(warm_forking: Node, tmp_path: Path, mark: str, ears: Ears) -> Iterator[Node]:
    """A warm node that forks, shared by tests that leave its fork server alive."""
    with lent(warm_forking, tmp_path, mark, ears) as node:
        yield node


@pytest.fixture(params=["forkserver", "spawn"])
def either(
    request: pytest.FixtureRequest, warm_forking: Node, warm_spawning: Node, tmp_path: Path, mark: str, ears: Ears
) -> Iterator[Node]:
    """A warm node that forks, and one that starts fresh interpreters."""
    with lent(warm_forking if request.param == "forkserver" else warm_spawning, tmp_path, mark, ears) as node:
        yield node


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path, mark: str, ears: Ears) -> Iterator[Node]:
    """A node of the test's own, for harm. It has no torch, which takes a second to import, unless the test gives it."""
    node = Node(env=basic_env(mark), preload=getattr(request, "param", ()))
    node.move_to(tmp_path, mark, ears)
    node.start()
    yield node
    node.supervisor.close()


def send(pid: int, number: int = signal.SIGKILL) -> None:
    assert pid > 1, "this would be a signal to ourselves, or to everybody"
    os.kill(pid, number)

"""A node without Ray for tests: a supervisor, waits with deadlines, and a check after each test that nothing is left.

Every process of a test has RAYLAUNCH_TEST_MARK in its environment, by which the check finds orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from raylaunch.core.failures.failure import Failure
from raylaunch.core.job.job import ENTRYPOINT_KINDS, Job
from raylaunch.core.machine.commits import CopyAddress, Holder, RestoreOrder
from raylaunch.core.machine.events_and_actions import WorkerEvent, WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.machine.observe import observe
from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.core.newtypes import NodeId, NodeTime, RunTime
from raylaunch.core.placement.environment import Member, Rendezvous, assign
from raylaunch.node.linux import processes
from raylaunch.node.protocol.node_goal import LaunchWorkers, OpenStore, StopWorkers
from raylaunch.node.protocol.node_spec import AgentSpec, NodeSpec
from raylaunch.node.protocol.node_status import Ready, StoreOpened, SupervisorEvent
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.supervisor.supervisor import Supervisor
from raylaunch.worker.state.buffer_client import ADDRESS_VARIABLE
from tests import (
    private_cluster,
    warm_fork_servers,  # noqa: F401, a fork server with WARM_TORCH is forked from what has torch
)
from tests.private_cluster import MARK, WARM_TORCH
from tests.warm_python import WarmPython

SECONDS = 100.0
"""How long a test waits for anything before it fails. A test that passes never waits that long."""
ADDRESS = "127.0.0.1"
_PTRACE_SEIZE, _WALL = 0x4206, 0x40000000

Event = SupervisorEvent | WorkerEvent

SCRIPT_PRELUDE = """
import os as _os

def say(*words):
    with open(_os.environ["SAY"], "w") as pipe:
        pipe.write(" ".join(map(str, words)) + "\\n")
"""
"""Code before each script: `say` writes a line to the test's `MessagePipe`."""


def hold(pid: int) -> None:
    """Let this process end, once it is killed, only when this thread lets it `go`.

    A tracer (ptrace(2)) stands for a kernel that takes long to free memory: while it has not waited for a process that
    is dead, the parent cannot either.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None) != 0:
        pytest.skip(f"processes may not be traced here: {os.strerror(ctypes.get_errno())}")


def go(pid: int) -> None:
    os.waitpid(pid, _WALL)


def basic_env(mark: str) -> dict[str, str]:
    """Return a minimal environment. It sets no locale and no thread counts, so that the defaults are tested."""
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    return env | {MARK: mark, "PYTHONDONTWRITEBYTECODE": "1"}


def restore_alone(memory: StateMemory, chosen: RestoreOrder | None = None) -> None:
    """Let the node's ranks restore what it holds, as the only node. `chosen`: this instead."""

    def restore(text: str) -> str:
        if text:
            memory.announce(chosen or msgspec.json.decode(text, type=RestoreOrder))
            return ""
        at = CopyAddress(node=NodeId("node-0"), host="", port=0)
        return msgspec.json.encode([Holder(at=at, ranks=(0,), held=memory.held())]).decode()

    memory.on_restore = restore


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the workers of one attempt ended, by rank."""

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


class MessagePipe:
    """A named pipe (FIFO) into which the scripts of a test write lines with `say`."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._buffer = b""

    def read_lines(self, count: int = 1, seconds: float = SECONDS) -> list[str]:
        """Return the next `count` lines; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while self._buffer.count(b"\n") < count:
            left = deadline - time.monotonic()
            assert left > 0, f"read only {self._buffer!r}"
            if select.select([self._fd], [], [], left)[0]:
                self._buffer += os.read(self._fd, 65536)
        *lines, self._buffer = self._buffer.split(b"\n", count)
        return [line.decode() for line in lines]

    def close(self) -> None:
        os.close(self._fd)


class Node:
    """A supervisor, and methods for what tests do with it."""

    def __init__(self, start_method: str = "forkserver", **changes: Any) -> None:
        self.mark = uuid.uuid4().hex
        job = Job(preload=["torch"], start_method=start_method, gpus_per_worker=0, backend="gloo")
        own = {"address": ADDRESS, "env": basic_env(self.mark) | changes.pop("more_env", {}), "cwd": "/"}
        own |= {name: changes.pop(name) for name in list(changes) if name in own}
        told = AgentSpec(
            job=job,
            run_dir="/nonexistent",
            node=NodeId("node-0"),
            address=None,
            submitter_env={},
            cwd=None,
            ray_address="",
        )
        preload = changes.get("preload", ())
        if changes.pop("preload_auto", False):
            changes["preload"] = "auto"
        self.supervisor = Supervisor(_changed(told, changes), **own)
        restore_alone(self.supervisor.state)
        if self.supervisor.spec.agent.job.preload == "auto":
            self.supervisor._starts.preload = tuple(preload)  # noqa: SLF001, it takes time to import torch
        self.attempt = 0
        #: What the supervisor has told last of its workers.
        self.told = WorkersStatus()
        self.folder = Path("/nonexistent")
        self.unseen: list[Event] = []
        self._basic_env = self.supervisor.spec.env

    def start(self) -> Ready:
        self.supervisor.start()
        return self.wait(Ready)

    def use_for_test(self, folder: Path, mark: str, pipe: MessagePipe) -> None:
        """Run the next attempts in this folder, with this mark, and with `say` writing to this pipe."""
        self.folder = folder
        self.mark = mark
        env = self._basic_env | {MARK: mark, "SAY": str(pipe.path)}
        self.set(run_dir=str(folder / "run"), cwd=str(folder), env=env)

    def set(self, **changes: Any) -> None:
        """Change fields of the node's specification, of what its agent was told, or of its job, for the next attempts.

        `kind`, `target` and the fields of `Entrypoint` make a new entry point.
        """
        spec = self.supervisor.spec
        of_node = {name: changes.pop(name) for name in list(changes) if name in _names(NodeSpec)}
        self.supervisor.spec = replace(spec, agent=_changed(spec.agent, changes), **of_node)

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script; return its path."""
        path = self.folder / name
        path.write_text(SCRIPT_PRELUDE + textwrap.dedent(text))
        return str(path)

    def launch(self, target: str, *args: Any, nproc: int = 1, port: int = 0, **changes: Any) -> int:
        """Launch the next attempt; return its number."""
        self.attempt += 1
        defaults = {"kwargs": {}, "payload": b"", "pass_local_rank": False, "numa_binding": None}
        self.set(**({"kind": "script", "target": target, "args": list(args)} | defaults | changes))
        part = assign(self.attempt, [Member(node="node-0", address=ADDRESS, nproc=nproc)])[0]
        rendezvous = Rendezvous(
            master_addr=self.supervisor.spec.address,
            master_port=port,
            run_id="tests",
            max_restarts=3,
            restart_count=self.attempt - 1,
        )
        self.supervisor.state.begin(part)
        order, env = (
            LaunchWorkers(assignment=part, rendezvous=rendezvous),
            {ADDRESS_VARIABLE: self.supervisor.state.address},
        )
        workers = self.supervisor.spec.workers(order)
        self.supervisor.launch(order, tuple(replace(worker, env=worker.env | env) for worker in workers))
        return self.attempt

    def run(self, target: str, *args: Any, nproc: int = 1, **changes: Any) -> Outcome:
        """Launch an attempt, and wait until all its workers have ended by themselves."""
        self.launch(target, *args, nproc=nproc, **changes)
        return self.run_to_end(nproc)

    def run_to_end(self, nproc: int) -> Outcome:
        """Wait until all workers of the attempt have ended by themselves."""
        failures: dict[int, Failure] = {}
        while True:
            try:
                event = self.wait(WorkersExited)
            except AssertionError as error:
                texts = [self.outcome(nproc, failures).stderr(rank) for rank in failures]
                msg = f"these ranks failed, and others did not: {failures}\n{texts}"
                raise AssertionError(msg) from error
            failures |= {failure.rank: failure for failure in event.failures}
            if not event.failures or len(failures) == nproc:
                break
        return self.outcome(nproc, failures)

    def outcome(self, nproc: int, failures: dict[int, Failure]) -> Outcome:
        return Outcome(
            exit_codes={rank: failures[rank].exit_code if rank in failures else 0 for rank in range(nproc)},
            failures=failures,
            values={rank: value for rank in range(nproc) if (value := self.result(rank))},
            folders={rank: self.rank_folder(rank) for rank in range(nproc)},
        )

    def result(self, rank: int) -> bytes:
        """Return what the function of a rank returned or raised, pickled; empty: nothing."""
        found = bytearray()
        while part := self.supervisor.read_result(rank, len(found)):
            found += part
        return bytes(found)

    def rank_folder(self, rank: int = 0) -> Path:
        return Path(self.supervisor.spec.rank_dir(self.attempt, rank))

    def open_store(self) -> int:
        """Open the store of the next attempt; return its port."""
        self.supervisor.handle(OpenStore(attempt=self.attempt + 1))
        opened = self.wait(StoreOpened)
        assert opened.attempt == self.attempt + 1
        assert opened.port, opened.why
        return opened.port

    def stop(self, grace: float = 0.0, attempt: int | None = None) -> WorkersStopped:
        """Stop the attempt (the current one, if none is given), and return the event that it has stopped."""
        attempt = self.attempt if attempt is None else attempt
        self.supervisor.handle(StopWorkers(attempt=attempt, grace=grace))
        if self.told.attempt < attempt or self.told.stopped is None:
            return self.wait(WorkersStopped, lambda event: event.attempt == attempt)
        while attempt in self.supervisor.goal.stopping:  # it has stopped before, so its status stays as it is
            self.unseen += self.events_within(0.01)
        return WorkersStopped(at=RunTime(0.0), attempt=attempt, node=NodeId("node-0"))

    def wait(self, kind: type[Any], which: Callable[[Any], bool] = lambda _: True, seconds: float = SECONDS) -> Any:
        """Return the next event of this kind for which `which` is true. Earlier events are dropped, later ones kept."""
        deadline = time.monotonic() + seconds
        while True:
            while self.unseen:
                event = self.unseen.pop(0)
                if isinstance(event, kind) and which(event):
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} within {seconds} s"
            if select.select([self.supervisor.fileno()], [], [], left)[0]:
                self._poll()

    def _poll(self) -> None:
        """Add what there is to `unseen`, with the core's events where the workers have changed, as in the driver."""
        for event in self.supervisor.poll():
            if isinstance(event, WorkersStatus):
                before, self.told = self.told, event
                now, sent_at = RunTime(0.0), NodeTime(0.0)
                self.unseen.extend(observe(NodeId("node-0"), before, event, now=now, sent_at=sent_at))
            else:
                self.unseen.append(event)

    def events_within(self, seconds: float) -> list[Event]:
        """Return all events that come within so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.supervisor.fileno()], [], [], left)[0]:
                self._poll()
        found, self.unseen = self.unseen, []
        return found

    def children(self) -> set[int]:
        """Return the process ids of workers and stores: the children of the fork server."""
        return children_of(self.supervisor.client.pid)

    def end_attempt(self) -> None:
        """Stop the current attempt, if there is one, and forget its events."""
        if self.attempt:
            self.stop()
        self.unseen.clear()


def _names(kind: type) -> set[str]:
    return {one.name for one in fields(kind)}


def _changed(told: AgentSpec, changes: dict[str, Any]) -> AgentSpec:
    """Return what an agent is told with other fields of its own, of the job or of the job's entry point."""
    entry = told.job.entrypoint
    kind, target = changes.pop("kind", entry.kind or "script"), changes.pop("target", entry.target)
    more = {name: changes.pop(name) for name in ("args", "kwargs", "pass_local_rank") if name in changes}
    what = {**dict.fromkeys(ENTRYPOINT_KINDS), "function" if kind == "pickle" else kind: target}
    of_agent = {name: changes.pop(name) for name in list(changes) if name in _names(AgentSpec)}
    job = replace(told.job, entrypoint=replace(entry, **what, **more), **changes)
    return replace(told, job=job, **of_agent)


def started(event: object) -> bool:
    return isinstance(event, WorkersStarted)


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found.update(int(child) for child in (thread / "children").read_text().split())
    return found


def marked(mark: str, known: Collection[int] = ()) -> dict[int, str]:
    """Return all processes with this mark, with their command lines. `known`: those that cannot have it."""
    found: dict[int, str] = {}
    for pid in private_cluster.marked(mark, known):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def until(check: Callable[[], Any], why: str, seconds: float = SECONDS) -> Any:
    """Poll until `check` returns something true, and return that; fail with `why` after so many seconds."""
    began = time.monotonic()
    while not (found := check()):
        waited = time.monotonic() - began
        assert waited < seconds, why
        time.sleep(min(0.05, max(0.005, waited / 20)))  # many conditions read all of /proc, and others need the CPUs
    return found


def wait_gone(pid: int, seconds: float = SECONDS) -> None:
    """Wait until the process has ended. A zombie counts as ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], seconds)[0], f"process {pid} still lives"
    finally:
        os.close(fd)


def wait_stopped_by_signal(pid: int) -> None:
    """Wait until SIGSTOP has stopped the process."""
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", f"{pid} is not stopped")


def wait_none_left(mark: str, seconds: float = SECONDS, known: Collection[int] = ()) -> None:
    """Wait until no process has the mark. `known`: those that cannot have it."""
    until(lambda: not marked(mark, known), f"processes of mark {mark} are left", seconds)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection((ADDRESS, port), timeout=1).close()
    except OSError:
        return False
    return True


def run_python(*command: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -u` with its output in files, as a worker's is."""
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


def _sockets() -> set[str]:
    return {fd for fd in _open_fds() if "socket:" in fd}


def _shared_memory() -> set[str]:
    """Return the names of shared memory. Folders there, and Ray's files, are made by other runs on the machine."""
    with os.scandir("/dev/shm") as found:
        return {one.name for one in found if one.is_file() and not one.name.startswith(("plasma", "ray"))}


def _unmapped(names: set[str]) -> set[str]:
    """Return the names that no process has mapped. Mapped ones belong to tests that run at the same time."""
    if not names:
        return names  # to read all maps, as for each test otherwise, takes a tenth of a second of CPU
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="surrogateescape")
            used |= {name for name in names if f"/dev/shm/{name}" in text}
    return names - used


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def no_leaks(mark: str) -> Iterator[None]:
    """Check after each test: no new children, open files or shared memory, and no process with its mark."""
    children, fds, memory, known = processes.children(), _open_fds(), _shared_memory(), private_cluster.running()
    yield
    wait_none_left(mark, known=known)
    until(lambda: processes.children() <= children, "children are left")
    assert _open_fds() <= fds, f"open files are left: {_open_fds() - fds}"
    until(lambda: not _unmapped(_shared_memory() - memory), f"shared memory is left: {_shared_memory() - memory}")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[MessagePipe]:
    pipe = MessagePipe(tmp_path / "pipe")
    yield pipe
    pipe.close()


@contextlib.contextmanager
def shared_node(node: Node, folder: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """Use a node that lives on after the test: at the end, stop its attempt, wait for its processes and undo `set`."""
    before = node.supervisor.spec
    node.use_for_test(folder, mark, pipe)
    yield node
    node.end_attempt()
    if node.supervisor.attempt_state is not None:
        node.supervisor.attempt_state.close()  # the agent keeps results until the next attempt
    node.supervisor.spec = before
    stores = len(node.supervisor.goal.stores)
    until(lambda: len(node.children()) <= stores, "the fork server has children left")


@contextlib.contextmanager
def running(start_method: str = "forkserver", **changes: Any) -> Iterator[Node]:
    node = Node(start_method, **changes)
    node.start()
    try:
        yield node
    finally:
        node.supervisor.close()
        wait_none_left(node.mark)


def shared(start_method: str, preload: tuple[str, ...], **changes: Any) -> Iterator[Node]:
    with running(start_method, preload=preload, **changes) as node:
        mark = node.mark
        yield node
    wait_none_left(mark)


@pytest.fixture(scope="session")
def shared_forkserver_node() -> Iterator[Node]:
    yield from shared("forkserver", ())


@pytest.fixture(scope="session")
def shared_torch_node() -> Iterator[Node]:
    yield from shared("forkserver", ("torch",))


@pytest.fixture(scope="session")
def shared_spawn_node() -> Iterator[Node]:
    yield from shared("spawn", ("torch",))


@pytest.fixture
def node(shared_forkserver_node: Node, tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node that forks its workers. Tests that leave its fork server alive share it.

    It has nothing imported: a worker that was forked with torch frees all of it when it ends, which takes a third of a
    second of CPU.
    """
    with shared_node(shared_forkserver_node, tmp_path, mark, pipe) as node:
        yield node


@pytest.fixture
def torch_node(shared_torch_node: Node, tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node like `node` with torch imported, for scripts that use it."""
    with shared_node(shared_torch_node, tmp_path, mark, pipe) as node:
        yield node


@pytest.fixture(scope="session")
def shared_state_node(warm_torch: WarmPython) -> Iterator[Node]:
    modules = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.parallel")
    yield from shared("forkserver", modules, more_env={WARM_TORCH: str(warm_torch.executable())})


@pytest.fixture
def state_node(shared_state_node: Node, tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node like `torch_node`, for scripts with `State`: with all of torch that those use, and without commits."""
    sockets = len(_sockets())
    with shared_node(shared_state_node, tmp_path, mark, pipe) as node:
        yield node
        node.end_attempt()
        node.supervisor.state.files.drop(lambda *_: True)
        until(lambda: not node.events_within(0.01) and len(_sockets()) <= sockets, "the connection of a worker is left")


@pytest.fixture(params=["forkserver", "spawn"])
def either(
    request: pytest.FixtureRequest,
    shared_forkserver_node: Node,
    shared_spawn_node: Node,
    tmp_path: Path,
    mark: str,
    pipe: MessagePipe,
) -> Iterator[Node]:
    """A shared node that forks its workers, and then one that starts a new interpreter for each."""
    with shared_node(
        shared_forkserver_node if request.param == "forkserver" else shared_spawn_node, tmp_path, mark, pipe
    ) as node:
        yield node


@pytest.fixture(params=["forkserver", "spawn"])
def torch_either(
    request: pytest.FixtureRequest,
    shared_torch_node: Node,
    shared_spawn_node: Node,
    tmp_path: Path,
    mark: str,
    pipe: MessagePipe,
) -> Iterator[Node]:
    """The same, with torch imported where workers are forked."""
    with shared_node(
        shared_torch_node if request.param == "forkserver" else shared_spawn_node, tmp_path, mark, pipe
    ) as node:
        yield node


@pytest.fixture
def own_node(tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node for this test alone, which may kill its processes. Without torch, whose import takes a second."""
    yield from started_for_test(Node(env=basic_env(mark), preload=()), tmp_path, mark, pipe)


def started_for_test(node: Node, folder: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    node.use_for_test(folder, mark, pipe)
    node.start()
    yield node
    node.supervisor.close()


def send_signal(pid: int, number: int = signal.SIGKILL) -> None:
    assert pid > 1, "this would be a signal to ourselves, or to everybody"
    os.kill(pid, number)

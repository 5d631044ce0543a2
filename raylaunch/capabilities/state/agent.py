"""The agent's part: pushes the commits of its ranks to another host, and fetches what its node lacks.

It does the same for files by `FileCopies`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import NoneType

import msgspec

from raylaunch.capabilities.state.file_copies import FileCopies
from raylaunch.capabilities.state.sections import StateGoal, StateStatus, dump, load_goal
from raylaunch.cluster.capability import AgentPart, AgentPort
from raylaunch.core.decoding import prepare
from raylaunch.core.job.job import Job
from raylaunch.core.machine.commits import Commit, CopyAddress, HeldCommit, Holder, RestoreOrder
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.text import printable
from raylaunch.node.protocol import acceptor
from raylaunch.node.state import transfer
from raylaunch.node.state.part_server import PartServer
from raylaunch.node.state.state_files import StateFiles
from raylaunch.node.state.transfer import CopyRefusedError, TornError
from raylaunch.worker.runtime import files_wait
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.checkpoints import durable_folder
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder

_LOOK_SECONDS = 0.02
"""How often is looked whether there is another commit to copy."""
_RETRY_SECONDS = (0.1, 0.3, 1.0)
"""The pauses after failures in a row; the last one is repeated."""
_ASK_SECONDS, _ASK_AGAIN_SECONDS = 3.0, 0.3
"""How long a subreaper may take to answer: it first imports what it needs. Where a host's processes are all gone, its
kernel refuses at once. From one that has not answered, nothing comes in later attempts either if its host is gone."""
_MOST_ASKED = 16
"""How many are asked at a time: those whose hosts are gone take their seconds together."""
_OUTSIDE_TRIES = 4
"""How often a part is fetched from outside of the world, from where nobody may answer any more."""

prepare(RestoreOrder)


@dataclass(slots=True)
class _Work:
    """What threads are for. They end soon after `stop` is set."""

    attempt: int = 0
    target: CopyAddress | None = None
    """Where commits of the attempt are copied to."""
    is_begun: bool = False
    stop: threading.Event = field(default_factory=threading.Event)


class StateCopies(AgentPart):
    """Copies of one node. Its methods are called in the agent's event loop, and return at once."""

    def __init__(self, port: AgentPort) -> None:
        """Raise OSError if the node cannot write to the job's durable folder."""
        self._port = port
        if (folder := DurableFolder.of(None, _durable_env(port.spec.job) | port.spec.job.env)) is not None:
            try:
                folder.check_writable()
            except OSError as error:
                msg = f"checkpoints cannot be written to {folder.path} on the node {port.address}: {error.strerror}"
                raise OSError(error.errno, msg) from None
        self._memory = port.memory
        self._status = StateStatus()
        self._server = self._serving(port.address)
        #: What the driver says of the newest attempt, which may not have begun; and of the one that has.
        self._shown = self._goal = StateGoal()
        self._assignment: Assignment | None = None
        #: What others than the nodes of the world hold; None: they are being asked.
        self._lost: tuple[Holder, ...] | None = ()
        #: Those that have not answered in an attempt.
        self._silent: set[CopyAddress] = set()
        port.memory.on_restore = self._restore
        self._files = FileCopies(port.memory, self._port.spec.copy_secret, self._say_in_loop, self._found_files)
        self._pushing, self._fetching = _Work(), _Work()

    def _serving(self, address: str) -> PartServer | None:
        try:
            files = self._memory.files
            server = PartServer(
                acceptor.listen(address), files, lambda: self._memory.spared, secret=self._port.spec.copy_secret
            )
            server.start()
        except (OSError, RuntimeError) as error:
            self._port.warn(f"no copies of the state are made: {error}")
            return None
        files.answer_when_killed(server.fileno(), self._port.spec.copy_secret)
        at = CopyAddress(node=self._port.spec.node, host=address, port=server.address.port)
        self._tell(StateStatus(at=at))
        return server

    def workers_changed(self) -> None:
        """Copy the script's commits from the first one on."""
        work = self._pushing
        if work.target is not None and not work.is_begun and any(True for _ in self._memory.files):
            work.is_begun = True
            arguments = work, work.attempt, work.target
            threading.Thread(target=self._push_all, args=arguments, daemon=True, name="raylaunch-state-copies").start()

    def _found_files(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._port.call(lambda: self._tell(replace(self._status, has_files=True)))

    def _tell(self, status: StateStatus) -> None:
        self._status = status
        self._port.tell(dump(status))

    def _say_in_loop(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._port.call(lambda: self._port.warn(why))

    def shown(self, section: bytes) -> None:
        """Copy to another agent than before, if the attempt has begun; else what it says counts from then on."""
        self._shown = load_goal(section)
        if self._assignment is not None and self._shown.attempt == self._assignment.attempt:
            self._follow(self._shown)

    def workers(self, assignment: Assignment, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        """Begin another attempt: its workers learn where buffers and checkpoints are, and may wait for files."""
        attempt, self._assignment = assignment.attempt, assignment
        goal = self._shown if self._shown.attempt == attempt else StateGoal(attempt=attempt)
        self._stop()
        self._pushing, self._fetching = _Work(), _Work()
        self._memory.begin(assignment)
        self._ask_lost(goal.lost)
        awaits_files = self._files.launched(assignment, goal.peers)
        self._follow(goal)
        env = _durable_env(self._port.spec.job) | {buffer_client.ADDRESS_VARIABLE: self._memory.address}
        env |= {files_wait.WAIT_VARIABLE: str(attempt)} if awaits_files else {}
        return tuple(replace(spec, env=spec.env | env) for spec in specs)

    def _follow(self, goal: StateGoal) -> None:
        """Copy the commits of the attempt, which has begun, to the agent that the goal names."""
        self._goal = goal
        self._memory.await_copy(goal.awaits_copy)
        target = goal.copies_to
        if target is None or target == self._pushing.target:
            return
        self._pushing.stop.set()
        self._pushing = _Work(attempt=goal.attempt, target=target)
        self._memory.begin_copies(goal.attempt)
        self._files.copy_to(target)
        self.workers_changed()

    def _stop(self) -> None:
        self._pushing.stop.set()
        self._fetching.stop.set()

    def _ask_lost(self, addresses: tuple[CopyAddress, ...]) -> None:
        """Ask others than the nodes of the world what they hold, before the ranks choose what to restore."""
        self._lost = None if addresses else ()
        if addresses:
            arguments = self._fetching, addresses
            threading.Thread(target=self._ask_all, args=arguments, daemon=True, name="raylaunch-state-lost").start()

    def _restore(self, text: str) -> str:
        """Return what the ranks choose from, as JSON; "": not known yet. `text`: what they have chosen, or ""."""
        if not text:
            if self._lost is None:
                return ""
            return msgspec.json.encode((self._holder(), *self._lost)).decode()
        order = msgspec.json.decode(text, type=RestoreOrder)
        has_rank_0 = self._assignment is not None and 0 in self._assignment.ranks
        if order.lost and has_rank_0:
            self._port.warn(order.lost)
        if order.commit is None and self._goal.has_survivors:  # they wait for the next attempt
            if has_rank_0:
                self._tell(replace(self._status, stuck_attempt=self._goal.attempt))
        elif order.sources:
            arguments = self._fetching, order
            threading.Thread(target=self._fetch_all, args=arguments, daemon=True, name="raylaunch-state-fetch").start()
        else:
            self._memory.announce(order)
        return ""

    def _holder(self) -> Holder:
        assert self._assignment is not None
        at = self._status.at or CopyAddress(node=self._port.spec.node, host=self._port.address, port=0)
        ranks = tuple(self._assignment.ranks)
        return Holder(at=at, host=self._port.host, ranks=ranks, held=self._memory.held())

    def asked(self) -> bytes:
        """Write the last checkpoint of the run, which is over. Return how far that is."""
        return msgspec.msgpack.encode(self._memory.write_last())

    def close(self) -> None:
        """Close the port and end the threads: nothing is copied or fetched any more."""
        self._stop()
        self._files.close()
        if self._server is not None:
            self._server.close()

    # In threads.

    def _push_all(self, work: _Work, attempt: int, target: CopyAddress) -> None:
        transfer.lower_priority()
        done: Commit | None = None
        failures = 0
        while not work.stop.wait(_LOOK_SECONDS):
            parts = self._memory.to_copy(attempt)
            if not parts or parts[0].commit == done:
                continue
            began = time.monotonic()
            try:
                self._push(work, target, parts)
            except (OSError, CopyRefusedError) as error:
                failures = self._failed(work, failures, f"has no copy of its state on {target.node}", error)
                continue
            failures, done = 0, parts[0].commit
            self._memory.copied(done)
            until = 2 * time.monotonic() - began
            while time.monotonic() < until and not self._memory.is_hurried and not work.stop.wait(_LOOK_SECONDS):
                pass

    def _push(self, work: _Work, target: CopyAddress, parts: tuple[HeldCommit, ...]) -> None:
        files, rate = self._memory.files, transfer.COPY_BYTES_PER_SECOND
        push(
            files,
            target,
            self._port.spec.copy_secret,
            parts,
            is_marked=parts[0] in files.kept(),
            is_stopped=work.stop.is_set,
            rate=float("inf") if self._memory.is_hurried else rate,
        )

    def _ask_all(self, work: _Work, addresses: tuple[CopyAddress, ...]) -> None:
        found: list[Holder] = []
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(min(len(addresses), _MOST_ASKED)) as pool:
            found = [one for one in pool.map(self._asked_of, addresses) if one is not None]

        def learn() -> None:
            if not work.stop.is_set():
                self._lost = tuple(found)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._port.call(learn)

    def _asked_of(self, address: CopyAddress) -> Holder | None:
        """Ask twice if the connection breaks: an agent may just be killed, and its subreaper answers then."""
        seconds = _ASK_AGAIN_SECONDS if address in self._silent else _ASK_SECONDS
        for _ in range(2):
            try:
                with transfer.connection(address, self._port.spec.copy_secret, seconds=seconds) as line:
                    return Holder(at=address, held=transfer.ask(line, tuple[HeldCommit, ...], "held"))
            except ConnectionError:
                continue
            except (OSError, CopyRefusedError):
                break
        self._silent.add(address)
        return None

    def _fetch_all(self, work: _Work, order: RestoreOrder) -> None:
        """Get all parts that the node lacks, and then let its workers restore."""
        assert order.commit is not None
        for source, ranks in order.sources:
            parts = [HeldCommit(rank=rank, world_size=order.world_size, commit=order.commit) for rank in ranks]
            failures = 0
            # Where one outside is gone, workers say what they lack, and the next attempt goes on without it.
            while not work.stop.is_set() and not (source.outside and failures == _OUTSIDE_TRIES):
                try:
                    with transfer.connection(source, self._port.spec.copy_secret) as line:
                        for part in parts:
                            fetch(self._memory.files, line, part, (order.commit, order.kept))
                    break
                except (OSError, CopyRefusedError) as error:
                    failures = self._failed(work, failures, f"cannot get its state from {source.node}", error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._port.call(lambda: None if work.stop.is_set() else self._memory.announce(order))

    def _failed(self, work: _Work, failures: int, what: str, error: Exception) -> int:
        """Wait before the next try. From the second failure on, say why."""
        if failures and not work.stop.is_set():
            why = printable(f"a node {what}: {error or type(error).__name__}")
            self._say_in_loop(why)
        work.stop.wait(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
        return failures + 1


def _durable_env(job: Job) -> dict[str, str]:
    """Return the variables by which `State` knows where checkpoints are, but for those that the job itself sets."""
    if not job.durable:
        return {}
    env = {
        durable_folder.FOLDER_VARIABLE: job.durable,
        durable_folder.EVERY_VARIABLE: f"{job.durable_every:g}",
        durable_folder.KEEP_VARIABLE: f"{job.durable_keep}",
    }
    return {name: value for name, value in env.items() if name not in job.env}


def push(
    files: StateFiles,
    target: CopyAddress,
    secret: str,
    parts: Iterable[HeldCommit],
    *,
    is_marked: bool = True,
    is_stopped: Callable[[], bool] = lambda: False,
    rate: float = transfer.COPY_BYTES_PER_SECOND,
) -> None:
    """Copy parts to another agent, at most `rate` bytes per second. `is_marked`: as in `CopyRequest`.

    Raises CopyRefusedError, and OSError, also where it is stopped.
    """
    with transfer.connection(target, secret) as line:
        for part in parts:
            with files.reading(part.rank, part.commit, part.world_size) as fd:
                if fd is None:
                    msg = "it was overwritten before it was copied"
                    raise TornError(msg)
                size = transfer.part_bytes(fd, part)
                transfer.ask(line, NoneType, "push", part=part, size=size, is_marked=is_marked)
                transfer.send_part(line, fd, part, size, is_stopped=is_stopped, rate=rate)
                transfer.read_answer(line, NoneType)


def fetch(files: StateFiles, line: socket.socket, part: HeldCommit, spared: Collection[Commit | None]) -> None:
    """Get a part from another agent, unless it is there. Raises CopyRefusedError and OSError."""
    there = files.find(part.rank, part.commit, part.world_size)
    if there is not None and not there.is_light:  # of a light part, what is needed may be the whole one
        return
    size = transfer.ask(line, int, "fetch", part=part)
    with files.writing_copy(part, size, spared) as file:
        if isinstance(file, str):
            raise CopyRefusedError(file)
        transfer.receive_part(line, file, part, size)

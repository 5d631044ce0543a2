"""The agent's part: follows what the driver says of copies, and answers workers that choose what to restore.

`CommitPushes` and `CommitFetches` copy commits, and `FileCopies` files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
from msgspec import msgpack

from raylaunch.capabilities.state.commit_copies import CommitFetches, CommitPushes, CopyPort
from raylaunch.capabilities.state.file_copies import FileCopies
from raylaunch.capabilities.state.sections import StateGoal, StateStatus
from raylaunch.cluster.capability import AgentPart, AgentPort
from raylaunch.core.decoding import prepare
from raylaunch.core.job.job import Job
from raylaunch.core.machine.commits import CopyAddress, Holder, RestoreOrder
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.protocol import acceptor
from raylaunch.node.state.part_server import PartServer
from raylaunch.worker.runtime import files_wait
from raylaunch.worker.runtime.spec import WorkerSpec
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.checkpoints import durable_folder
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder

prepare(RestoreOrder)


class StateCopies(AgentPart):
    """Copies of one node. Its methods are called in the agent's event loop, and return at once."""

    def __init__(self, port: AgentPort) -> None:
        """Raise OSError if the node cannot write to the job's durable folder."""
        self._port, self._memory = port, port.memory
        self._env = _durable_env(port.spec.job) | {buffer_client.ADDRESS_VARIABLE: port.memory.address}
        if (folder := DurableFolder.of(None, self._env | port.spec.job.env)) is not None:
            try:
                folder.check_writable()
            except OSError as error:
                msg = f"checkpoints cannot be written to {folder.path} on the node {port.address}: {error.strerror}"
                raise OSError(error.errno, msg) from None
        self._status = StateStatus()
        self._server = self._serving(port.address)
        #: What the driver says of the newest attempt, which may not have begun; and of the one that has.
        self._shown = self._goal = StateGoal()
        self._assignment: Assignment | None = None
        port.memory.on_restore = self._restore
        self._files = FileCopies(port.memory, port.spec.copy_secret, self._say, self._found_files)
        copy_port = CopyPort(memory=port.memory, secret=port.spec.copy_secret, say=self._say, call=self._call)
        self._pushes, self._fetches = CommitPushes(copy_port), CommitFetches(copy_port)

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
        self._pushes.begin()

    def _call(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._port.call(work)

    def _say(self, why: str) -> None:
        self._call(lambda: self._port.warn(why))

    def _found_files(self) -> None:
        if not self._status.has_files:
            self._call(lambda: self._tell(replace(self._status, has_files=True)))

    def _tell(self, status: StateStatus) -> None:
        self._status = status
        self._port.tell(msgpack.encode(status))

    def shown(self, section: bytes) -> None:
        """Copy to another agent than before, if the attempt has begun; else what it says counts from then on."""
        self._shown = msgpack.decode(section, type=StateGoal)
        if self._assignment is not None and self._shown.attempt == self._assignment.attempt:
            self._follow(self._shown)

    def workers(self, assignment: Assignment, specs: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
        """Begin another attempt: its workers learn where buffers and checkpoints are, and may wait for files."""
        attempt, self._assignment = assignment.attempt, assignment
        goal = self._shown if self._shown.attempt == attempt else StateGoal(attempt=attempt)
        self._pushes.stop()
        self._memory.begin(assignment)
        self._fetches.begin(goal.lost)
        awaits_files = self._files.launched(assignment, goal.peers)
        self._follow(goal)
        env = self._env | ({files_wait.WAIT_VARIABLE: str(attempt)} if awaits_files else {})
        return tuple(replace(spec, env=spec.env | env) for spec in specs)

    def _follow(self, goal: StateGoal) -> None:
        """Copy the commits of the attempt, which has begun, to the agent that the goal names."""
        self._goal = goal
        self._memory.await_copy(goal.awaits_copy)
        if goal.copies_to is not None and goal.copies_to != self._pushes.target:
            self._pushes.copy_to(goal.copies_to, goal.attempt)
            self._files.copy_to(goal.copies_to)

    def _restore(self, text: str) -> str:
        """Return what the ranks choose from, as JSON; "": not known yet. `text`: what they have chosen, or ""."""
        if not text:
            if self._fetches.lost is None:
                return ""
            return msgspec.json.encode((self._holder(), *self._fetches.lost)).decode()
        order = msgspec.json.decode(text, type=RestoreOrder)
        has_rank_0 = self._assignment is not None and 0 in self._assignment.ranks
        if order.lost and has_rank_0:
            self._port.warn(order.lost)
        if order.commit is None and self._goal.has_survivors:  # they wait for the next attempt
            if has_rank_0:
                self._tell(replace(self._status, stuck_attempt=self._goal.attempt))
        else:
            self._fetches.fetch(order)
        return ""

    def _holder(self) -> Holder:
        assert self._assignment is not None
        at = self._status.at or CopyAddress(node=self._port.spec.node, host=self._port.address, port=0)
        ranks = tuple(self._assignment.ranks)
        return Holder(at=at, host=self._port.host, ranks=ranks, held=self._memory.held())

    def asked(self) -> bytes:
        """Write the last checkpoint of the run, which is over. Return how far that is."""
        return msgpack.encode(self._memory.write_last())

    def close(self) -> None:
        """Close the port and end the threads: nothing is copied or fetched any more."""
        self._pushes.stop()
        self._fetches.stop()
        self._files.close()
        if self._server is not None:
            self._server.close()


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

"""Polls what no message tells the supervisor of, while there is something to wait for."""

from __future__ import annotations

from collections.abc import Iterator

from raylaunch.node.linux.timerfd import TimerFd
from raylaunch.node.protocol.messages import (
    CheckpointAnswer,
    CommitCheckpoint,
    DumpStacks,
    ProposeCheckpoint,
    StackDumpStarted,
    StacksDumped,
    StepProposed,
)
from raylaunch.node.supervisor import checkpoint_poll, stack_dumps
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.checkpoint_poll import CheckpointPoll
from raylaunch.node.supervisor.stack_dumps import StackDumps
from raylaunch.worker.heartbeats.shared_page import SharedPage

PolledEvent = StacksDumped | StepProposed | CheckpointAnswer


class PagePoller:
    """The checkpoint that is requested of workers, and the stack dumps that they are writing."""

    def __init__(self, page: SharedPage, node: str) -> None:
        self._node = node
        self._timer = TimerFd()
        self._checkpoint = CheckpointPoll(page)
        self._proposed: list[StepProposed] = []
        self._dumps = StackDumps(node)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `poll` is due."""
        return self._timer.fileno()

    def wake(self) -> None:
        """Make the file descriptor readable, so that `poll` is called soon."""
        self._timer.set(0)

    def propose_checkpoint(self, order: ProposeCheckpoint, state: AttemptState | None) -> None:
        """Propose a step to the present attempt's workers."""
        reached = self._checkpoint.propose(order, state)
        if reached is not None:
            event = StepProposed(node=self._node, attempt=order.attempt, step=order.step, reached=reached)
            self._proposed.append(event)
        self.wake()

    def commit_checkpoint(self, order: CommitCheckpoint) -> None:
        """Have the workers save at the step that was proposed."""
        self._checkpoint.commit(order)

    def drop_checkpoint(self) -> None:
        """Withdraw the request for a checkpoint, if there is one."""
        self._checkpoint.drop()

    def dump_stacks(self, order: DumpStacks, state: AttemptState | None) -> None:
        """Wait for the stacks of the attempt's workers, which the fork server is about to signal."""
        live = state.live() if state is not None and state.attempt == order.attempt else []
        self._dumps.start(order.attempt, live)
        self.wake()

    def dump_started(self, event: StackDumpStarted, fd: int | None) -> None:
        """Take note that the fork server has signalled a worker, which writes into this file."""
        self._dumps.add_file(event, fd)

    def poll(self, state: AttemptState | None) -> Iterator[PolledEvent]:
        """Yield what there is by now, and set the timer for the next call."""
        yield from self._proposed
        self._proposed.clear()
        answer = self._checkpoint.poll(state)
        if answer is not None:
            yield answer
        dumped = self._dumps.poll()
        if dumped is not None:
            yield dumped
        if self._checkpoint.is_open:
            self._timer.set(checkpoint_poll.POLL_SECONDS)
        else:
            self._timer.set(stack_dumps.POLL_SECONDS if self._dumps.is_open else None)

    def close(self) -> None:
        """Close the files of stack dumps, and the timer."""
        self._dumps.close()
        self._timer.close()

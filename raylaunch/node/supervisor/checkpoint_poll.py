"""The node's part of a checkpoint of the whole world, in two phases, by way of the shared page.

All workers of all nodes must save at one step. First a step is proposed, and workers that come to it wait. When every
node has reported how far its workers were by then, the driver commits the step, or proposes another that no worker has
passed. Workers answer on the page without a message, so it is polled while a checkpoint is open.
"""

from __future__ import annotations

from raylaunch.node.protocol.messages import CheckpointAnswer, CommitCheckpoint, ProposeCheckpoint
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage

POLL_SECONDS = 0.01


class CheckpointPoll:
    """At most one checkpoint at a time."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self.attempt: int | None = None

    def propose(self, order: ProposeCheckpoint, state: AttemptState | None) -> int | None:
        """Propose a step to workers: they wait at the first step from it on that they ask about.

        Returns the last step that any of them had passed when they could first know; None: they never ask.
        """
        self.attempt = order.attempt
        if state is None or state.attempt != order.attempt or not _all_ask(self._page, state):
            return None
        self._page.numbers[fields.PROPOSED_STEP] = order.step + 1
        return max(self._page.numbers[slot + fields.POLLED_STEP] for slot in _slots(state)) - 1

    def commit(self, order: CommitCheckpoint) -> None:
        """Have the workers save at the step that was proposed last. An order for another step changes nothing."""
        if self.attempt == order.attempt and self._page.numbers[fields.PROPOSED_STEP] == order.step + 1:
            self._page.numbers[fields.COMMITTED_STEP] = order.step + 1

    def drop(self) -> None:
        """Withdraw the request. Workers that wait for a commit go on; those that are saving are not disturbed."""
        self.attempt = None
        if self._page.numbers[fields.COMMITTED_STEP] != self._page.numbers[fields.PROPOSED_STEP]:
            self._page.numbers[fields.PROPOSED_STEP] = self._page.numbers[fields.COMMITTED_STEP] = 0

    @property
    def is_open(self) -> bool:
        """Whether there is something to poll for."""
        return self.attempt is not None

    def poll(self, state: AttemptState | None) -> CheckpointAnswer | None:
        """Return the answer once, as soon as all live workers have saved, or as it is known that they never ask."""
        attempt = self.attempt
        if attempt is None:
            return None
        step = None
        if state is not None and state.attempt == attempt and _all_ask(self._page, state):
            slots = _slots(state)
            if not all(self._page.numbers[slot + fields.WAITING_FOR_STOP] for slot in slots):
                return None
            step = min(self._page.numbers[slot + fields.SAVED_STEP] for slot in slots) - 1
        self.attempt = None
        return CheckpointAnswer(attempt=attempt, step=step)


def _all_ask(page: SharedPage, state: AttemptState) -> bool:
    """Return whether there are workers, and each of them has called `should_checkpoint` before."""
    slots = _slots(state)
    has_slots = bool(slots) and len(state.pids) <= fields.MAX_WORKERS
    return has_slots and all(page.numbers[slot + fields.POLLED_STEP] for slot in slots)


def _slots(state: AttemptState) -> list[int]:
    return [fields.slot_offset(local_rank) for local_rank, _, _ in state.live()]

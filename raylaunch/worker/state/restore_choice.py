"""How the ranks choose what they restore: by what each node holds, over the TCPStore in which they meet anyway.

The first rank of each node asks the agent what the node holds, and tells the others. Rank 0 chooses, and each first
rank tells its agent, which gets the parts that the node lacks and then shows the choice on the shared page.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic, sleep

import msgspec

from raylaunch.core.machine.commits import Holder, choose
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.commit_agreement import CommitAgreement

_POLL_SECONDS, _AGAIN_SECONDS = 0.002, 0.05
_PATIENCE = 2.0
"""Seconds for which a worker asks its agent that does not know it."""


def agree(
    agreement: CommitAgreement, alive: Callable[[], None], attempt: int, world_size: int, rank: int, nodes: int
) -> None:
    """Choose what to restore with the first ranks of the other nodes, and tell the agent. `rank`: the first of a node.

    `alive` is called while this waits. Raises OSError where the agent cannot be reached.
    """
    while not (held := _told(Request(attempt=attempt, rank=rank, index=0, asks_held=1))):
        alive()  # survivors, or subreapers of lost nodes, are not done
        sleep(_POLL_SECONDS)
    node = int(os.environ.get("GROUP_RANK", "0"))
    order = agreement.exchange(node, nodes, held, lambda words: orders(words, world_size))
    _told(Request(attempt=attempt, rank=rank, index=0, order=order))


def _told(request: Request) -> str:
    """Return what the agent says. If it does not know this worker, a survivor is about to learn of another attempt."""
    give_up_at = monotonic() + _PATIENCE
    while True:
        try:
            return buffer_client.ask(request)[1]
        except ConnectionError:
            if monotonic() >= give_up_at:
                raise
            sleep(_AGAIN_SECONDS)


def orders(words: Sequence[str], world_size: int) -> list[str]:
    """Choose on rank 0: return the `RestoreOrder` for each node, as JSON. `words`: what each knows of, as `Holder`."""
    holders = [one for word in words for one in msgspec.json.decode(word, type=tuple[Holder, ...])]
    return [msgspec.json.encode(order).decode() for order in choose(holders, world_size)]

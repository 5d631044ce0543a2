"""The lifeline: a socket of an agent, whose other end its subreaper and fork server have. Nothing is ever sent on it.

The agent closes its end, or dies, when everything of the node is to end.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

_REMOVE_SECONDS = 2.0


def agent_is_gone(lifeline: int) -> bool:
    """Return whether the agent is dead, or wants everything of the node to end: its end of the socket is closed."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    return bool(poll.poll(0))


def remove_folders(folders: Iterable[str], lifeline: int) -> None:
    """Remove the node's folders at its end, except where the agent or the state keeper has a lock.

    Waits until the agent is gone, for a short time: what kills the subreaper often kills the agent next. If it lives,
    it notices the end of the fork server, and closes the socket, but goes on with what it has a lock on. The lock of a
    dead agent does not count, since its end may take a while.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    happened = poll.poll(1000 * _REMOVE_SECONDS)
    if not happened:
        return
    from raylaunch.node.linux import scratch  # noqa: PLC0415  # the subreaper stays small

    is_dead = bool(happened[0][1] & select.POLLHUP)  # else only its end is shut down
    for folder in folders:
        scratch.remove_unless_locked(folder, *([] if is_dead else [os.path.join(folder, scratch.AGENT_LOCK)]))

"""The lifeline: a socket of an agent, whose other end its subreaper and fork server have.

The agent shuts down its end, or dies, when everything of the node is to end. If all but the subreaper is to end, it
sends one byte, and the subreaper sends one back when that is done. Where the fork server or the subreaper has died by
itself, the other one sends a byte when all that was left has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable


def agent_is_gone(lifeline: int) -> bool:
    """Return whether the agent is dead, or wants the processes of the node to end."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    return bool(poll.poll(0))


def agent_is_dead(lifeline: int) -> bool:
    """Return whether the agent is dead, and has not only shut down its end."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))


def wait_for_end(lifeline: int) -> None:
    """Wait until the agent is dead or has shut down its end. Answer each byte: the processes have ended.

    After a byte the caller may have to outlive the agent, so it goes on in a process that is not the agent's child: Ray
    kills the children of an actor first, and then the actor.
    """
    with contextlib.suppress(ConnectionResetError):  # the agent died, and had not read what was sent to it
        while os.read(lifeline, 1):
            if os.fork():
                os._exit(0)
            tell_that_all_have_ended(lifeline)


def tell_that_all_have_ended(lifeline: int) -> None:
    """Tell the agent that all processes but the subreaper have ended."""
    with contextlib.suppress(OSError):
        os.write(lifeline, b"x")


def remove_folders(folders: Iterable[str], lifeline: int, *, is_last: bool) -> None:
    """Remove the node's folders at its end, except where the agent has a lock.

    `is_last`: the caller is the subreaper, or that is dead; else what the subreaper has a lock on stays, too.

    Waits until the agent is gone: what kills the subreaper often kills the agent next, as Ray does where it kills an
    actor. If it lives, it notices the end of the fork server, and closes the socket, but goes on with what it has a
    lock on. The locks of a dead process do not count, since its end may take a while.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    happened = poll.poll()
    from raylaunch.node.linux import scratch  # noqa: PLC0415  # the subreaper stays small

    is_dead = bool(happened[0][1] & select.POLLHUP)  # else only its end is shut down
    locks = ([] if is_last else [""]) + ([] if is_dead else [scratch.AGENT_LOCK])
    for folder in folders:
        if not any(scratch.is_locked(os.path.join(folder, lock)) for lock in locks):
            scratch.remove(folder)

"""At the end of a run, its last commit goes to disk, if the job wants that, before the agents end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future

from msgspec import msgpack

from raylaunch.core.decoding import prepare
from raylaunch.core.newtypes import NodeId
from raylaunch.node.state.checkpoint_writes import LastWrite

_LOOK_SECONDS = 0.1
_FIRST_SECONDS, _TELL_SECONDS = 1.0, 5.0
"""Seconds before the first message about how far the nodes are, and between further ones."""
ANSWER_SECONDS = 20.0
"""How long an agent may take to answer."""
STALLED_SECONDS = 600.0
"""After how long without a byte written the checkpoint is given up: the disk does not answer."""
prepare(LastWrite)

Ask = Callable[[NodeId], Future[bytes]]
"""Asks a node's agent, which answers with a `LastWrite`. LookupError: there is no agent."""


def write(ask: Ask, nodes: Collection[NodeId], say: Callable[[str], None]) -> None:
    """Order nodes to write the last checkpoint, and wait for it. `say` takes what to tell a person.

    A signal that interrupts this gives the checkpoint up: the agents, which end then, leave nothing incomplete.
    """
    found = {node: LastWrite(is_over=False) for node in nodes}
    asked: dict[NodeId, tuple[Future[bytes], float]] = {}
    tell_at, stalled_at, written = time.monotonic() + _FIRST_SECONDS, time.monotonic() + STALLED_SECONDS, 0
    said = ""
    while waiting := [node for node in nodes if not found[node].is_over]:
        now = time.monotonic()
        for node in waiting:
            found[node] = _look(ask, node, asked, found[node], now)
        of_all = [*found.values()]
        if (bytes_now := sum(one.written for one in of_all)) != written:
            written, stalled_at = bytes_now, now + STALLED_SECONDS
        if now >= stalled_at:
            say(f"the last checkpoint is given up: nothing was written of it for {STALLED_SECONDS:g} s")
            return
        if now >= tell_at and not all(one.is_over for one in of_all):
            tell_at = now + _TELL_SECONDS
            if (text := _progress(of_all)) != said:
                said = text
                say(text)
        if asked:
            futures.wait([future for future, _ in asked.values()], timeout=_LOOK_SECONDS)
        else:
            time.sleep(_LOOK_SECONDS if any(not one.is_over for one in of_all) else 0)
    if any(one.folder for one in found.values()):
        for why in dict.fromkeys(one.why for one in found.values() if one.why):
            say(why)


def _look(
    ask: Ask, node: NodeId, asked: dict[NodeId, tuple[Future[bytes], float]], last: LastWrite, now: float
) -> LastWrite:
    """Return how far a node is. An agent is asked again when it has answered."""
    try:
        if node not in asked:
            asked[node] = ask(node), now
        answer, since = asked[node]
        if answer.done():
            del asked[node]
            return msgpack.decode(answer.result(), type=LastWrite)
        if now - since < ANSWER_SECONDS:
            return last
        why = f"its agent has not answered for {ANSWER_SECONDS:g} s"
    except LookupError:
        return LastWrite(is_over=True)
    except Exception as error:  # noqa: BLE001  # whatever it is, the agent cannot say more
        why = str(error).partition("\n")[0] or type(error).__name__
    return LastWrite(is_over=True, why=f"{node} has not written its part of the last checkpoint: {why}")


def _progress(found: Collection[LastWrite]) -> str:
    folder = next((one.folder for one in found if one.folder), "disk")
    written, total = (sum(sizes) / 2**20 for sizes in zip(*((one.written, one.total) for one in found), strict=True))
    how_far = f"{min(written, total):.0f} of {total:.0f} MiB" if total else "it begins"
    return f"writing the last checkpoint to {folder}: {how_far}; Ctrl-C gives it up"

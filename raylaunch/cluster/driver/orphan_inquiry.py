"""Asks the state keepers of agents that were killed what they hold, before the driver decides how to go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.core.newtypes import NodeId
from raylaunch.node.protocol.copy_messages import CopyAddress
from raylaunch.node.state import part_transfer
from raylaunch.node.state.part_transfer import CopyRefusedError

_SECONDS = 1.0
"""How long a state keeper may take to answer. Where a host's processes are all gone, its kernel refuses at once."""


class OrphanInquiry:
    """Asks for each agent once, in a thread."""

    def __init__(self) -> None:
        self._asked: set[NodeId] = set()

    def __reduce__(self) -> tuple[type[OrphanInquiry], tuple[()]]:
        """Leave out what was asked: the answer would come to this process. A driver that takes over asks again."""
        return OrphanInquiry, ()

    def is_open(self, gone: AgentLost, where: CopyAddress | None, tell: Callable[[AgentLost], None]) -> bool:
        """Return whether to wait for an answer before this loss is dealt with. It is asked for if it was not yet.

        `where`: where the agent served what it held; None: it held nothing. `tell` gets the loss again, with the
        answer; it is called in a thread. An agent that was silent may be alive, and is not asked for.
        """
        if where is None or gone.silent or gone.held is not None:
            return False
        if gone.node not in self._asked:
            self._asked.add(gone.node)
            thread = threading.Thread(target=self._ask, args=(gone, where, tell), daemon=True, name="raylaunch-orphans")
            try:
                thread.start()
            except RuntimeError:  # "can't start new thread"
                return False
        return True

    @staticmethod
    def _ask(gone: AgentLost, where: CopyAddress, tell: Callable[[AgentLost], None]) -> None:
        try:
            held = part_transfer.ask_list(where, seconds=_SECONDS)
        except (OSError, CopyRefusedError):
            held = ()
        tell(replace(gone, held=held))

"""What the next fork server has to be told if the present one dies."""

from __future__ import annotations

import signal

from raylaunch.node.protocol import forkserver_messages, messages
from raylaunch.node.protocol.messages import SignalWorkers, StopWorkers
from raylaunch.node.protocol.node_spec import NodeSpec


class PendingOrders:
    """Stores that are to be open, attempts that are being stopped, and orders that no fork server has got yet."""

    def __init__(self) -> None:
        #: Ports of stores by attempt; 0: not open yet.
        self.stores: dict[int, int] = {}
        #: Attempts that were told to stop and are not gone yet.
        self.stopping: set[int] = set()
        self._unsent: list[forkserver_messages.ForkServerOrder] = []

    def add(self, order: forkserver_messages.ForkServerOrder, *, sent: bool) -> None:
        """Add an order. `sent` False: there is no fork server that could get it now.

        Raises ValueError for a signal that does not exist.
        """
        if isinstance(order, StopWorkers | SignalWorkers) and order.signal not in signal.Signals.__members__:
            msg = f"there is no signal {order.signal!r}"
            raise ValueError(msg)
        if isinstance(order, forkserver_messages.StartStore):
            self.stores[order.attempt] = order.port
        if isinstance(order, StopWorkers):
            self.stopping.add(order.attempt)
        if not sent:
            self._unsent.append(order)

    def acknowledge(self, event: forkserver_messages.ForkServerEvent) -> None:
        """Remove what this event of the fork server fulfils."""
        match event:
            case messages.StoreOpened():
                self.stores[event.attempt] = event.port
            case messages.WorkersForked():
                self.stores = {attempt: port for attempt, port in self.stores.items() if attempt >= event.attempt}
            case forkserver_messages.WorkersGone():
                self.stopping.discard(event.attempt)
            case _:
                pass

    def take_unsent(self) -> list[forkserver_messages.ForkServerOrder]:
        """Remove and return the orders that were not sent."""
        unsent, self._unsent = self._unsent, []
        return unsent

    @property
    def launch(self) -> forkserver_messages.StartWorkers | None:
        """The unsent order to start an attempt, unless that attempt was told to stop."""
        launches = [order for order in self._unsent if isinstance(order, forkserver_messages.StartWorkers)]
        return launches[-1] if launches and launches[-1].attempt not in self.stopping else None

    def prepare_for_successor(self, spec: NodeSpec) -> None:
        """The fork server died: let `take_unsent` return what its successor needs: its stores and an unsent launch."""
        stores = [spec.store(attempt, port) for attempt, port in self.stores.items()]
        self._unsent = [*stores, *([self.launch] if self.launch is not None else [])]

"""What the fork server owes its supervisor. If it dies, the one that follows has to make it good."""

from __future__ import annotations

from raylaunch.node import messages
from raylaunch.node.settings import NodeSettings


class Owed:
    """Stores that are to be open, attempts that are to be stopped, and orders that nobody has heard yet."""

    def __init__(self) -> None:
        #: Their ports; 0: not told yet.
        self.stores: dict[int, int] = {}
        self.stopping: set[int] = set()
        self._unheard: list[messages.Order] = []

    def asked(self, order: messages.Order, *, heard: bool) -> None:
        """The supervisor wants this."""
        if isinstance(order, messages.OpenStore):
            self.stores[order.attempt] = order.port
        if isinstance(order, messages.StopWorkers):
            self.stopping.add(order.attempt)
        if not heard:
            self._unheard.append(order)

    def answered(self, word: messages.Word) -> None:
        """The fork server says this."""
        match word:
            case messages.StoreOpen():
                self.stores[word.attempt] = word.port
            case messages.Started():
                self.stores = {attempt: port for attempt, port in self.stores.items() if attempt >= word.attempt}
            case messages.Stopped():
                self.stopping.discard(word.attempt)
            case _:
                pass

    def take(self) -> list[messages.Order]:
        """What nobody has heard yet, to be said."""
        unheard, self._unheard = self._unheard, []
        return unheard

    @property
    def launch(self) -> messages.StartWorkers | None:
        """The attempt that is still to begin, if nobody has heard of it."""
        launches = [order for order in self._unheard if isinstance(order, messages.StartWorkers)]
        return launches[-1] if launches and launches[-1].attempt not in self.stopping else None

    def inherit(self, settings: NodeSettings) -> None:
        """The fork server died. Another is to hear of its stores, and of the launch that it did not hear of."""
        stores = [settings.store(attempt, port) for attempt, port in self.stores.items()]
        self._unheard = [*stores, *([self.launch] if self.launch is not None else [])]

"""Brings arguments to ranks, and results to Ray. Objects of Ray's go by way of the `ObjectLender` of their node."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from raylaunch.worker_group.lines import RankLine
from raylaunch.worker_group.rank.frames import Buffer
from raylaunch.worker_group.rank.messages import Begin, Call
from raylaunch.worker_group.rank.shared_parts import SharedParts

ObjectRef = Any
"""Of Ray, which is not imported before there is one."""
Sent = list[Buffer] | ObjectRef
"""A value as it is sent: its parts, or an object of Ray's."""


@dataclass(slots=True, kw_only=True)
class Delivery:
    """Arguments on their way to a rank. It is told by the inbox whenever one of its objects is there."""

    line: RankLine
    node: str
    """Of the rank, in Ray."""
    message: Begin | Call
    values: Sequence[Sent]
    lent: dict[ObjectRef, Future[bytes]]
    is_over: bool = False

    def parts(self) -> list[list[Buffer]]:
        """Return the parts of each value. Raises what `ray.get` does."""
        return [[self.lent[value].result()] if not isinstance(value, list) else value for value in self.values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a rank has returned is in Ray, or is not."""

    number: int
    """Of the call."""
    rank: int
    lender: Any
    ref: ObjectRef
    error: BaseException | None


class Deliveries:
    """In the group's thread."""

    def __init__(self, inbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        #: By Ray node.
        self._lenders: dict[str, Any] = {}
        #: By number of the call, Ray node and object. Each object is lent once on each node.
        self._lent: dict[int, dict[tuple[str, ObjectRef], Future[bytes]]] = {}

    def send(self, number: int, line: RankLine, node: str, message: Begin | Call, values: Sequence[Sent]) -> None:
        """Send a message with its values, now or when the objects among them are at the rank's node.

        `number`: `release` is called with it.
        """
        refs = {value: self._lend(number, node, value) for value in values if not isinstance(value, list)}
        delivery = Delivery(line=line, node=node, message=message, values=values, lent=refs)
        if not refs:
            self.go_on(delivery)
        for future in [*refs.values()]:
            future.add_done_callback(lambda _: self._inbox.put(delivery))

    def _lend(self, number: int, node: str, ref: ObjectRef) -> Future[bytes]:
        lent = self._lent.setdefault(number, {})
        if (node, ref) not in lent:
            lent[node, ref] = self._lender(node).lend.remote(number, ref).future()
        return lent[node, ref]

    def go_on(self, delivery: Delivery) -> BaseException | None:
        """Send what is complete now. Return why it cannot be.

        If the lender is gone, the rank ends, too: what it has from there does not last.
        """
        if delivery.is_over or not all(future.done() for future in delivery.lent.values()):
            return None
        delivery.is_over = True
        try:
            parts = delivery.parts()
        except BaseException as error:  # noqa: BLE001
            if not _is_of_actor(error):
                return error
            self._lenders.pop(delivery.node, None)
            delivery.line.close()
            return None
        finally:
            delivery.lent.clear()  # they refer to the delivery, and would keep it, and objects of Ray's with it
        lengths = tuple(map(len, parts))
        delivery.line.send(replace(delivery.message, lengths=lengths), [*itertools.chain.from_iterable(parts)])
        return None

    def store(self, number: int, rank: int, node: str, shared: SharedParts) -> None:
        """Have Ray store what a rank has returned. `Stored` follows."""
        lender = self._lender(node)
        ref, done = lender.store.options(num_returns=2).remote(shared)

        def told(future: Future[None]) -> None:
            self._inbox.put(Stored(number=number, rank=rank, lender=lender, ref=ref, error=future.exception()))

        done.future().add_done_callback(told)  # `ref.future()` would fetch it

    def stored(self, stored: Stored) -> None:
        """If the lender is gone, the next call gets another one."""
        if _is_of_actor(stored.error):
            self._lenders = {node: lender for node, lender in self._lenders.items() if lender is not stored.lender}

    def release(self, number: int) -> None:
        """A call is over: what ranks do not refer to any more is not held for them."""
        for node in {node for node, _ in self._lent.pop(number, ())}:
            if node in self._lenders:
                self._lenders[node].release.options(num_returns=0).remote(number)

    def _lender(self, node: str) -> Any:
        if node not in self._lenders:
            import ray  # noqa: PLC0415
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

            where = NodeAffinitySchedulingStrategy(node or ray.get_runtime_context().get_node_id(), soft=False)
            self._lenders[node] = _lender_class().options(num_cpus=0, scheduling_strategy=where).remote()
        return self._lenders[node]

    def close(self) -> None:
        """End the lenders."""
        lenders, self._lenders = self._lenders, {}
        ray: Any = sys.modules.get("ray")
        if lenders and ray.is_initialized():  # else they have ended with the connection
            for lender in lenders.values():
                with contextlib.suppress(ValueError):  # it was of a connection before
                    ray.kill(lender)


def _is_of_actor(error: BaseException | None) -> bool:
    from ray import exceptions  # noqa: PLC0415

    return isinstance(error, exceptions.RayActorError) and not isinstance(error, exceptions.RayTaskError)


@functools.cache
def _lender_class() -> Any:
    import ray  # noqa: PLC0415

    from raylaunch.worker_group.object_lender import ObjectLender  # noqa: PLC0415

    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(ObjectLender)

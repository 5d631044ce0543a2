"""Results come from their nodes part by part, however large they are and however long that takes."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from raylaunch.cluster.driver import results
from raylaunch.errors import ClusterError
from raylaunch.node.supervisor.attempt_state import PART_BYTES

BIG = os.urandom(2 * PART_BYTES)


class Nodes:
    """A fleet whose nodes hold these results."""

    def __init__(self, held: dict[tuple[str, int], bytes]) -> None:
        self.held = held
        self.asked: list[tuple[str, int, int]] = []
        #: A node answers when this is set.
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.pool = ThreadPoolExecutor(4)

    def read_result(self, node: str, rank: int, offset: int) -> Future[bytes]:
        self.asked.append((node, rank, offset))
        return self.pool.submit(self.part, node, rank, offset)

    def part(self, node: str, rank: int, offset: int) -> bytes:
        self.may_answer.wait(100)
        if (node, rank) not in self.held:
            raise LookupError("it has no agent any more")
        return self.held[node, rank][offset : offset + PART_BYTES]


def fetched(nodes: Nodes, *names: str, heard=lambda _: time.monotonic()) -> dict[int, bytearray]:
    try:
        return results.fetch(nodes, dict(enumerate(names)), heard)
    finally:
        nodes.may_answer.set()
        nodes.pool.shutdown()


def test_results_of_any_size():
    """One of several parts, a small one, and none at all: its rank has an empty entry."""
    nodes = Nodes({("a", 0): BIG, ("a", 1): b"small", ("b", 2): b"", ("b", 3): BIG + b"more"})
    found = fetched(nodes, "a", "a", "b", "b")
    assert found == {0: BIG, 1: b"small", 2: b"", 3: BIG + b"more"}
    offsets = [offset for _, rank, offset in nodes.asked if rank == 3]
    assert offsets == [0, PART_BYTES, 2 * PART_BYTES]


def test_a_result_that_is_gone_with_its_node():
    """The error names the rank and the node."""
    nodes = Nodes({("a", 0): b"small"})
    with pytest.raises(
        ClusterError, match="what rank 1 returned could not be fetched from b: it has no agent any more"
    ):
        fetched(nodes, "a", "b")


def test_results_are_awaited_as_long_as_the_nodes_report(monkeypatch):
    """However long they take. Ray would not report a host that was cut off for a minute."""
    monkeypatch.setattr(results, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(results, "SILENT_SECONDS", 100.0)
    nodes, looks = Nodes({("a", 0): b"late"}), itertools.count()
    nodes.may_answer.clear()

    def heard(_: str) -> float:
        if next(looks) == 10:
            nodes.may_answer.set()
        return time.monotonic()

    assert fetched(nodes, "a", heard=heard) == {0: b"late"}
    monkeypatch.setattr(results, "SILENT_SECONDS", 0.02)
    nodes = Nodes({})
    nodes.may_answer.clear()
    with pytest.raises(ClusterError, match="what rank 0 returned could not be fetched from a: nothing was heard of it"):
        fetched(nodes, "a", heard=lambda _: 0.0)

"""What the first ranks of several nodes choose to restore, by what each node says that it holds."""

from __future__ import annotations

import msgspec

from raylaunch.core.machine.commits import Commit, CopyAddress, HeldCommit, Holder, RestoreOrder
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.worker.state.commit_agreement import orders


def part(rank: int, *, copied: bool = False) -> HeldCommit:
    return HeldCommit(rank=rank, world_size=4, commit=Commit(1, 7), copied=copied, first_sharer=0, digest=1 << 60)


def holder(number: int, *parts: HeldCommit, ranks: tuple[int, ...] = ()) -> Holder:
    at = CopyAddress(node=NodeId(f"node-{number}"), host=f"10.0.0.{number}", port=7000 + number, outside=not ranks)
    return Holder(at=at, host=HostId(f"host-{number}"), ranks=ranks, held=parts)


def ordered(*words: list[Holder]) -> list[RestoreOrder]:
    found = orders([msgspec.json.encode(word).decode() for word in words], 4)
    return [msgspec.json.decode(text, type=RestoreOrder) for text in found]


def test_each_node_is_told_where_it_gets_the_parts_that_it_lacks():
    first = holder(1, part(0), part(1), part(2, copied=True), part(3, copied=True), ranks=(0, 1))
    one, two = ordered([first], [holder(2, ranks=(2, 3))])
    assert one == RestoreOrder(commit=Commit(1, 7), world_size=4, kept=Commit(1, 7))
    assert two.sources == ((first.at, (2, 3)),)


def test_what_only_a_lost_node_has_is_fetched_from_there():
    lost = holder(9, part(2), part(3))
    one, two = ordered([holder(1, part(0), part(1), ranks=(0, 1)), lost], [holder(2, ranks=(2, 3))])
    assert (one.commit, one.sources) == (Commit(1, 7), ())
    assert two.sources == ((lost.at, (2, 3)),)

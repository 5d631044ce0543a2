"""Tensors that are equal on all ranks: which are, how ranks divide them, and how it is noticed that they differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from raylaunch.core.machine.commits import Commit, HeldCommit  # noqa: E402
from raylaunch.worker.state import commit_buffer, shared_tensors  # noqa: E402
from raylaunch.worker.state.commit_agreement import CommitAgreement, Proposal  # noqa: E402
from raylaunch.worker.state.commit_buffer import CommitBuffer  # noqa: E402
from raylaunch.worker.state.shared_tensors import Digest, PartMemory  # noqa: E402
from raylaunch.worker.state.snapshots.restored import Restored  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import Snapshot  # noqa: E402
from tests.profiles import examples  # noqa: E402

LEAST = 2**14  # bytes of a tensor that is divided
FIRST = 3  # of the ranks of the node


def written(found: Snapshot, local_rank: int, sharers: int) -> CommitBuffer:
    """Write a snapshot as a rank does."""
    share = commit_buffer.share_of(found.shared_bytes, local_rank, sharers)
    fd = os.memfd_create("test")
    os.ftruncate(fd, commit_buffer.bytes_needed(found.tensor_bytes, len(found.pickled), len(share)))
    buffer = CommitBuffer(fd)
    buffer.write_pickle(found.pickled, tensors=found.tensor_bytes)
    memory = PartMemory(buffer)
    for target, source in memory.pairs(found.tensors):
        target.copy_(source)
    start = commit_buffer.share_start(found.tensor_bytes, len(found.pickled))
    for target, source in memory.share_pairs(start, share, found.shared):
        target.copy_(source)
    held = HeldCommit(
        rank=FIRST + local_rank,
        world_size=FIRST + sharers,
        commit=Commit(1, 8),
        first_sharer=FIRST,
        sharers=sharers,
        digest=1,
    )
    sizes = {"tensors": found.tensor_bytes, "pickled": len(found.pickled), "shared": found.shared_bytes}
    buffer.header.seal(held, **sizes)
    return buffer


def fetched(buffer: CommitBuffer) -> CommitBuffer:
    """Return a buffer with as many bytes as the part has, as another node gets them."""
    fd = os.memfd_create("test")
    os.write(fd, bytes(buffer.memory)[: buffer.header.part_bytes()])
    return CommitBuffer(fd)


@given(total=st.integers(0, 2000), sharers=st.integers(1, 80))
@examples(200)
def test_shares_are_aligned_and_as_equal_as_that_allows(total, sharers):
    shares = [commit_buffer.share_of(total, index, sharers) for index in range(sharers)]
    assert [place for share in shares for place in share] == [*range(total)]
    assert all(share.start % commit_buffer.ALIGNMENT == 0 for share in shares if share)
    assert max(map(len, shares)) < total / sharers + 1 + commit_buffer.ALIGNMENT


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.int64, torch.float8_e5m2]


@given(
    sharers=st.integers(1, 5),
    tensors=st.lists(st.tuples(st.integers(0, 3 * LEAST), st.sampled_from(DTYPES)), max_size=5),
)
@examples(60)
def test_shares_are_put_together_again(sharers, tensors):
    """Each rank has own tensors besides, and those that are too small to be divided."""
    made = [
        torch.randint(0, 2**62, (length + 8,)).view(torch.uint8)[: length * kind.itemsize] for length, kind in tensors
    ]
    equal = [one.view(kind) for one, (_, kind) in zip(made, tensors, strict=True)]
    parts = [
        Snapshot({"model": equal, "own": torch.full((LEAST,), rank)}, ["model"], {"model": lambda _: True})
        for rank in range(sharers)
    ]
    divided = sum(commit_buffer.round_up(one.numel() * one.element_size()) for one in equal if one.nbytes >= LEAST)
    assert parts[0].shared_bytes == divided
    buffers = [fetched(written(part, rank, sharers)) for rank, part in enumerate(parts)]
    for rank, buffer in enumerate(buffers):
        found = Restored(buffer, [], buffers)
        assert found.item("own").tolist() == [rank] * LEAST
        for copied in (True, False):
            for one, was in zip(found.item("model", copied=copied), equal, strict=True):
                assert torch.equal(one.view(torch.uint8), was.view(torch.uint8))


def test_a_tensor_that_is_memory_of_any_part_is_noticed():
    equal = torch.arange(4 * LEAST)
    snapshots = [Snapshot({"model": equal}, ["model"], {"model": lambda _: True}) for _ in range(2)]
    buffers = [written(one, rank, 2) for rank, one in enumerate(snapshots)]
    found = Restored(buffers[0], [], buffers)
    assert not found.is_aliased([found.item("model"), equal])
    for buffer in buffers:
        assert found.is_aliased([equal, PartMemory(buffer).own[8192:]])


def test_a_share_that_is_missing_is_said():
    equal = torch.arange(4 * LEAST)
    buffers = [written(Snapshot({"model": equal}, ["model"], {"model": lambda _: True}), rank, 3) for rank in range(3)]
    with pytest.raises(ValueError, match="does not have all shares"):
        Restored(buffers[0], [], buffers[:2]).item("model")


@pytest.mark.parametrize("damage", [{"first_sharer": FIRST - 1}, {"first_sharer": FIRST + 1}, {"sharers": -1}])
def test_a_damaged_header_is_refused(damage):
    buffer = written(Snapshot({"x": torch.arange(LEAST)}, ["x"], {"x": lambda _: True}), 0, 1)
    held = buffer.header.held()
    assert held is not None
    buffer.header.seal(replace(held, **damage), tensors=0, pickled=0, shared=8)
    with pytest.raises(ValueError, match="damaged"):
        buffer.header.share()


def test_tensors_that_are_not_contiguous_are_each_rank_s_own():
    found = Snapshot({"x": torch.ones(200, 100).t()}, ["x"], {"x": lambda _: True})
    assert (found.shared_bytes, len(found.tensors)) == (0, 1)


# Which tensors are equal.


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Averager(torch.optim.SGD):
    """As those of torch.distributed.optim: not each step makes parameters equal."""


def test_parameters_of_ddp_and_the_states_of_their_optimizers_are_equal(group):
    plain = torch.nn.Sequential(torch.nn.Linear(90, 90), torch.nn.BatchNorm1d(9000))
    other = torch.nn.Linear(90, 90)
    model = DistributedDataParallel(plain)
    objects = {
        "model": model,
        "plain": plain,
        "other": other,
        "adam": torch.optim.Adam(model.parameters()),
        "mixed": torch.optim.Adam([*model.parameters(), *other.parameters()]),
        "averager": Averager(model.parameters(), lr=0.1),
        "empty": torch.optim.SGD([{"params": []}], lr=0.1),
    }
    found = shared_tensors.find(objects)
    assert set(found) == {"model", "adam"}
    states = model.state_dict()
    is_equal = {name.removeprefix("module."): found["model"](tensor) for name, tensor in states.items()}
    parameters = {name for name, _ in plain.named_parameters()}
    assert {name for name, equal in is_equal.items() if equal} == parameters
    assert found["adam"](torch.ones(3))


def test_what_ddp_ignores_may_differ(group):
    plain = torch.nn.ModuleDict({"a": torch.nn.Linear(90, 90), "b": torch.nn.Linear(90, 90)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["b.weight"])  # noqa: SLF001
    model = DistributedDataParallel(plain)
    found = shared_tensors.find({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert set(found) == {"model"}
    assert found["model"](plain["a"].weight.detach())
    assert not found["model"](plain["b"].weight.detach())


def test_models_of_smaller_groups_differ_between_the_groups(group):
    alone = dist.new_group([0])
    model = DistributedDataParallel(torch.nn.Linear(90, 90), process_group=alone)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert shared_tensors.find(objects) == {}


# Digests.


def of(*tensors, number: int = 1, is_full: bool = False) -> int:
    size, shared = 0, []
    for tensor in tensors:
        shared.append((shared_tensors.OFFSETS_FROM + size, tensor))
        size += tensor.nbytes
    return Digest(shared, number, is_full=is_full).value()


@pytest.mark.parametrize("at", [0, 777, -1])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_full_digest_is_of_all_bytes(at, offset):
    """Also of tensors that do not begin at a multiple of 8 bytes."""
    one = torch.arange(100_001, dtype=torch.float32)[offset:]
    other = one.clone()
    assert of(one, is_full=True) == of(other, is_full=True) > 0
    other[at] += 1
    assert of(one, is_full=True) != of(other, is_full=True)


def test_equal_bytes_in_other_places_differ():
    """Another layout."""
    assert of(torch.zeros(20), torch.zeros(30)) != of(torch.zeros(30), torch.zeros(20))


@pytest.mark.parametrize("tensors", [1, 3, 32, 40])
def test_each_part_of_each_tensor_has_its_turn(tensors):
    equal = [torch.arange(50_000, dtype=torch.float32) for _ in range(tensors)]
    for place in (3, 20_000, 49_999):
        for which in {0, tensors - 1}:
            other = [*equal]
            other[which] = equal[which].clone()
            other[which][place] = -1
            assert any(of(*equal, number=n) != of(*other, number=n) for n in range(1, 4 * 5 + 1))


def test_all_bytes_that_change_everywhere_are_noticed_at_once():
    equal = [torch.rand(5000) for _ in range(40)]
    assert of(*equal) != of(*(one * 1.0001 for one in equal))


class Counters:
    """A store of an attempt."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, value: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + value
        return self.counts[key]

    def set(self, key: str, value: str) -> None:
        pass


@given(
    commits=st.lists(st.lists(st.integers(1, 2**30), min_size=3, max_size=3), min_size=1, max_size=8),
)
@examples(100)
def test_ranks_notice_together_in_which_commit_digests_differ(commits):
    store, ranks = Counters(), [CommitAgreement(rank, 3, lambda: None) for rank in range(3)]
    for rank in ranks:
        rank._store = store  # noqa: SLF001
    for number, digests in enumerate(commits, start=1):
        for rank, digest in zip(ranks, digests, strict=True):
            rank.announce(number, Proposal(), digest)
        same = {rank.had_same_digest(number) for rank in ranks}
        if len(set(digests)) > 1:
            mean = sum(digests) / 3
            assert same == {False} or mean in digests
            return
        assert same == {True}


def test_what_a_digest_is_made_of_is_copied_with_the_commit(monkeypatch):
    """To read it from the device would wait for the step after the commit, which the script has launched by then."""
    monkeypatch.setattr(torch, "empty", lambda shape, **given: torch.zeros(shape, dtype=given["dtype"]))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    found = Digest([(shared_tensors.OFFSETS_FROM, torch.arange(9.0))], 1, is_full=True)
    value = found.value()
    ((target, source),) = found.moves()
    assert found.value() != value
    target.copy_(source)
    source.fill_(0)
    assert found.value() == value


def test_tensors_of_the_cpu_need_no_such_copy():
    found = Digest([(shared_tensors.OFFSETS_FROM, torch.arange(9.0))], 1, is_full=True)
    value = found.value()
    assert found.moves() == []
    assert found.value() == value

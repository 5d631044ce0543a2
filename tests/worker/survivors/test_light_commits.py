"""Light commits: what a survivor completes, when it must not, and how `State` makes and restores them."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from raylaunch.core.machine.commits import Commit, CompleteCommit, HeldCommit, RestoreOrder  # noqa: E402
from raylaunch.core.placement.environment import Member, assign  # noqa: E402
from raylaunch.worker import State, WorldChanged  # noqa: E402
from raylaunch.worker.heartbeats import heartbeat_writer, shared_page  # noqa: E402
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter  # noqa: E402
from raylaunch.worker.state import commit_buffer, rank_commits, shared_tensors  # noqa: E402
from raylaunch.worker.state.buffer_client import BufferClient, Request  # noqa: E402
from raylaunch.worker.state.commit_agreement import CopyRounds  # noqa: E402
from raylaunch.worker.state.commit_buffer import LIGHT_BUFFERS, CommitBuffer  # noqa: E402
from raylaunch.worker.state.rank_buffers import RankBuffers  # noqa: E402
from raylaunch.worker.state.snapshots.restored import Restored  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import Snapshot  # noqa: E402
from raylaunch.worker.survivors.light_commits import LightCommits  # noqa: E402
from tests.node.harness import restore_alone  # noqa: E402
from tests.node.state.test_state_memory import memory_of  # noqa: E402

WIDTH = 100
INTERVAL = 70


class Rank:
    """A rank of a world of two that makes light commits, and the memory that its node has for it."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.files: dict[int, int] = {}
        self.light = LightCommits()
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        client = BufferClient(1, number, ask=self._ask)
        self.buffers = RankBuffers(client, number, range(2), spared=None, copies=CopyRounds(None, number, 1))

    def _ask(self, request: Request) -> tuple[int | None, str]:
        if request.bytes and request.index not in self.files:
            self.files[request.index] = os.memfd_create("test")
        fd = self.files.get(request.index)
        if fd is not None and request.bytes > os.fstat(fd).st_size:
            os.ftruncate(fd, request.bytes)
        return (os.dup(fd) if fd is not None else None), ""

    def step(self) -> None:
        """Train by one step, with gradients that are the same on all ranks."""
        torch.manual_seed(2)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()

    def items(self) -> dict[str, Any]:
        own = torch.full((5000,), self.number)
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "own": own}

    def commit(self, steps: int, **more: Any) -> Snapshot:
        """Commit what is the rank's own; of the model and its optimizer, that is what is too small to be divided."""
        shared = {name: lambda _: True for name in ("model", "optimizer")}
        found = Snapshot(self.items() | more, ["model", "optimizer"], shared)
        held = HeldCommit(rank=self.number, world_size=2, commit=Commit(1, steps), sharers=2)
        self.light.commit(self.buffers, held, found, INTERVAL)
        return found

    def committed(self, steps: int) -> CommitBuffer | None:
        """Return the buffer with the light commit after so many steps."""
        for index in LIGHT_BUFFERS:
            buffer = CommitBuffer(os.dup(self.files[index])) if index in self.files else None
            held = buffer.header.held() if buffer is not None else None
            if held is not None and held.commit.steps == steps:
                return buffer
        return None

    def completed(self, size: int = 0, newest: int = 0) -> CommitBuffer:
        """Give the rank a file, and have it complete its last light commit; return what the file has then."""
        fd = os.memfd_create("completed")
        os.ftruncate(fd, size or 2**20)
        buffer = CommitBuffer(os.dup(fd))
        self.light.use(fd, newest)
        self.light.complete()
        assert not is_open(fd)
        return buffer

    def close(self) -> None:
        self.light.close()
        for fd in self.files.values():
            os.close(fd)


def is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


@pytest.fixture
def rank() -> Iterator[Rank]:
    found = Rank()
    found.step()
    found.commit(1)  # from here on it knows that there is an optimizer
    found.step()
    yield found
    found.close()


def same(one: Any, other: Any) -> bool:
    """Return whether two states are bitwise the same."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(raw(one), raw(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def raw(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_after_an_abort_nothing_is_committed_from_a_device(rank, monkeypatch, is_on_device):
    """A commit of it waits until the step is done there, which an abort of NCCL may have ended with garbage."""

    def refuse() -> None:
        raise WorldChanged

    if is_on_device:
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(rank_commits, "survivors", [SimpleNamespace(leave_if_ordered=refuse)])
    with pytest.raises(WorldChanged) if is_on_device else contextlib.nullcontext():
        rank.commit(2)
    assert (rank.committed(2) is None) == is_on_device
    assert (rank.completed().header.held() is None) == is_on_device


def test_after_an_abort_no_step_of_the_optimizer_begins(rank, monkeypatch):
    """An abort of NCCL ends a collective as if it had a result: the step would be of garbage, and spoil the commit."""

    def refuse() -> None:
        raise WorldChanged

    rank.commit(2)
    monkeypatch.setattr(rank_commits, "survivors", [SimpleNamespace(leave_if_ordered=refuse)])
    with pytest.raises(WorldChanged):
        rank.step()
    assert rank.completed().header.held().commit == Commit(1, 2)


def test_what_a_survivor_completes_is_bitwise_what_it_had(rank):
    """Its own part has all tensors, and any other rank finds there what its light part lacks."""
    other = Rank(1)
    other.step()
    other.commit(1)
    other.step()
    for each in (rank, other):
        each.commit(2)
    light = other.committed(2)
    assert light.header.held().light
    assert light.header.part_bytes() < 4 * commit_buffer.HEADER_BYTES + 40_000
    whole = rank.completed()
    held = whole.header.held()
    digest = light.header.held().digest
    assert held == HeldCommit(rank=0, world_size=2, commit=Commit(1, 2), replicated=False, sharers=1, digest=digest)
    assert (whole.header.interval, light.header.interval) == (INTERVAL, INTERVAL)
    assert whole.header.part_bytes() > 6 * WIDTH * WIDTH * 4
    for each, buffer in ((rank, whole), (other, light)):
        found = Restored(buffer, (), [whole])
        assert all(same(found.item(name), item) for name, item in each.items().items())
    other.close()


def test_light_commits_take_turns_and_their_buffers_grow(rank):
    """The one before stays until the next one is sealed, since another rank may not have got so far."""
    for steps in (2, 3, 4):
        rank.commit(steps, value=bytes(20_000 * steps))
        rank.step()
        found = [one for one in (2, 3, 4) if rank.committed(one) is not None]
        assert found == [one for one in (2, 3, 4) if steps - 2 < one <= steps]
    assert Restored(rank.committed(4), ()).item("value") == bytes(80_000)


def test_a_light_commit_that_is_interrupted_does_not_count(rank, monkeypatch):
    """The one before does, which a survivor can complete: nothing has changed since."""
    for steps in (2, 3):
        rank.commit(steps)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommitBuffer, "write_pickle", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rank.commit(4)
    assert (rank.committed(2), rank.committed(4)) == (None, None)
    assert rank.completed().header.held().commit == Commit(1, 3)


def ends_in_the_middle(rank: Rank) -> None:
    """Begin a step of the optimizer, which a lost peer ends."""

    def fail() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        rank.optimizer.step(fail)


def change_in_place(rank: Rank) -> None:
    with torch.no_grad():
        rank.model[1].weight[3, 4] += 1


def change_moments(rank: Rank) -> None:
    rank.optimizer.state[rank.model[0].weight]["exp_avg"].mul_(1)


def tear(rank: Rank) -> None:
    """Begin to write another commit into the buffer."""
    rank.committed(2).header.unseal()


def overwrite(rank: Rank) -> None:
    held = rank.committed(2).header.held()
    rank.committed(2).header.seal(held, tensors=0, pickled=0, shared=0)
    rank.committed(2).header.seal(HeldCommit(rank=0, world_size=2, commit=Commit(1, 9)), tensors=0, pickled=0)


@pytest.mark.parametrize("change", [Rank.step, ends_in_the_middle, change_in_place, change_moments, tear, overwrite])
def test_nothing_is_completed_if_something_has_changed_since(rank, capfd, change: Callable[[Rank], None]):
    """The optimizer has begun a step, a tensor was changed in place, or the light commit is not there any more.

    None of that is an error.
    """
    rank.commit(2)
    change(rank)
    assert rank.completed().header.held() is None
    assert capfd.readouterr().err == ""


def test_a_commit_that_others_have_not_made_is_not_completed(rank):
    """The tensors are those of this commit, and not of the one before, which all ranks have."""
    for steps in (2, 3):
        rank.step()
        rank.commit(steps)
    assert rank.completed(newest=2).header.held() is None
    assert rank.completed(newest=3).header.held().commit == Commit(1, 3)


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_samples_notice_what_torch_does_not_count(rank, steps):
    """A change by `.data` or by a kernel of another library: each tensor is sampled with one commit of several."""
    found = rank.commit(steps)
    _, sampled = found.shared[steps % len(found.shared)]
    sampled.data.view(-1)[7] += 1  # which does not change the version of the parameter
    before = [tensor._version for _, tensor in found.shared]  # noqa: SLF001
    rank.commit(steps)
    sampled.data.view(-1)[7] += 1
    assert [tensor._version for _, tensor in found.shared] == before  # noqa: SLF001
    assert rank.completed().header.held() is None
    rank.commit(steps)
    assert rank.completed().header.held() is not None


def test_tensors_of_inference_mode_have_no_version_and_are_completed(rank):
    with torch.inference_mode():
        more = torch.arange(30_000)
    rank.commit(2, optimizer={"more": more})
    whole = rank.completed()
    assert same(Restored(whole, (), [whole]).item("optimizer"), {"more": more})


def test_nothing_is_committed_before_an_optimizer_of_torch_has_begun_a_step():
    """Without one nobody says when the tensors are about to change."""
    rank = Rank()
    for steps in (1, 2):
        with torch.no_grad():
            rank.model[0].weight += 1
        rank.commit(steps)
    assert (rank.files, rank.completed().header.held()) == ({}, None)
    rank.step()
    rank.commit(3)
    assert rank.completed().header.held().commit == Commit(1, 3)
    rank.close()


def test_until_a_step_begins_a_survivor_has_the_tensors(rank):
    """It need not restore them; and if others die before, it completes the same commit."""
    found = rank.commit(2)
    rank.light.complete()  # another rank of the node has the file
    for _ in range(2):
        live = rank.light.live(Commit(1, 2))
        assert [(offset, id(tensor)) for offset, tensor in found.shared] == [(at, id(one)) for at, one in live.items()]
        assert rank.light.live(Commit(1, 1)) == {}
        assert rank.completed().header.held().commit == Commit(1, 2)
    rank.step()
    assert rank.light.live(Commit(1, 2)) == {}


def test_a_step_that_was_not_done_by_the_optimizer_changes_nothing(rank):
    """As one that a gradient scaler skips: the last commit is completed."""
    rank.commit(2)
    rank.commit(3)
    assert rank.completed().header.held().commit == Commit(1, 3)


def test_what_goes_wrong_is_said_and_nothing_is_raised(rank, capfd):
    """A file that is too small; the file is closed."""
    rank.commit(2)
    assert rank.completed(size=2 * commit_buffer.HEADER_BYTES).header.held() is None
    assert capfd.readouterr().err.startswith("raylaunch: the last steps must be done again: ")
    rank.commit(3)
    fd = os.open(os.devnull, os.O_RDONLY)  # which cannot be mapped
    rank.light.use(fd, 0)
    rank.light.complete()
    assert capfd.readouterr().err.startswith("raylaunch: the last steps must be done again: ")
    assert not is_open(fd)


def test_files_that_are_not_needed_are_closed(rank):
    first, second, third = (os.memfd_create("test") for _ in range(3))
    rank.light.use(first, 0)
    rank.light.use(second, 0)
    assert (is_open(first), is_open(second)) == (False, True)
    rank.light.complete()
    assert not is_open(second)
    rank.light.use(third, 0)
    rank.light.close()
    assert not is_open(third)
    rank.light.complete()


def test_a_file_that_comes_after_the_end_is_closed(rank):
    """The thread that gets it ends after the function."""
    rank.light.close()
    fd = os.memfd_create("test")
    rank.light.use(fd, 0)
    was_open = is_open(fd)
    rank.light.close()
    assert not was_open


def test_an_optimizer_of_other_tensors_says_nothing_of_these(rank):
    """These are changed by another library, by `.data`, and a lost peer has ended that in the middle.

    Samples find that if they are of a tensor that was changed already.
    """
    other = torch.nn.Linear(2, 2)
    del rank.optimizer
    rank.light.close()
    rank.light = LightCommits()
    found = Snapshot({"model": rank.model.state_dict()}, ["model"], {"model": lambda _: True})
    held = HeldCommit(rank=0, world_size=2, commit=Commit(1, 2), sharers=2)
    for _ in range(2):
        rank.light.commit(rank.buffers, held, found, INTERVAL)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    rank.light.commit(rank.buffers, held, found, INTERVAL)
    rank.model[1].weight.data.add_(1)
    assert rank.completed().header.held() is None


def survives(rank: Rank) -> None:
    """Leave the function, which has made the `State`, and so the buffers."""
    del rank.buffers
    rank.completed()


def go_on(rank: Rank) -> None:
    """Make the next two commits."""
    for steps in (3, 4):
        rank.step()
        rank.commit(steps)
    rank.step()


@pytest.mark.parametrize("end", [go_on, survives, lambda rank: rank.light.close()])
def test_the_tensors_of_a_commit_are_not_kept_for_longer_than_needed(rank, end):
    """A model that the function has made is freed when the function is left."""
    found = weakref.ref(rank.commit(2))
    gc.collect()
    assert found() is not None
    end(rank)
    gc.collect()
    assert found() is None


def test_after_the_function_optimizers_are_on_their_own_again():
    rank = Rank()
    rank.commit(1)
    light = weakref.ref(rank.light)
    rank.close()
    del rank.light
    gc.collect()
    assert light() is None, "torch calls it before each step"


# `State`.


class Dispatcher:
    """The light commits of both ranks, which are threads of this process."""

    def __init__(self) -> None:
        self.ranks = [LightCommits(), LightCommits()]
        self.made: list[tuple[int, int]] = []

    def announce(self) -> None:
        pass

    def leave_if_ordered(self) -> None:
        pass

    def explains(self, error: BaseException) -> bool:
        return False

    def commit_light(self, buffers: RankBuffers, held: HeldCommit, found: Snapshot, interval: int) -> Any:
        self.made.append((held.rank, held.commit.steps))
        return self.ranks[held.rank].commit(buffers, held, found, interval)

    def live(self, commit: Commit) -> dict[int, Any]:
        del commit
        return {}  # all models are new


class World:
    """Two ranks of a node, which are threads of this process, with a store and a node of their own."""

    def __init__(self, memory: Any, page: Any, light: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.page, self.light = memory, page, light
        self._patch = monkeypatch
        self._local = threading.local()
        self.attempt = 0
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.states: list[State] = []
        self.errors: list[Exception] = []
        monkeypatch.setattr(heartbeat_writer, "current_writer", lambda: self._local.writer)

    def begin(self, seed: int, chosen: CompleteCommit | None = None, **settings: Any) -> list[int]:
        """Begin an attempt with new models; return after how many steps each rank goes on.

        `chosen`: what is restored; None: what the ranks choose.
        """
        self.attempt += 1
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
        self.memory.begin(assign(self.attempt, [Member(node="node-0", address="", nproc=2)])[0])
        self.page.reset(self.attempt, 2)
        restore_alone(self.memory, chosen and RestoreOrder(commit=chosen.commit, world_size=chosen.world_size))
        self.memory.is_final = True
        self.models, self.optimizers, self.states = [], [], []
        return [self._begin_rank(number, seed, settings) for number in range(2)]

    def _begin_rank(self, number: int, seed: int, settings: dict[str, Any]) -> int:
        env = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.store.port,
            heartbeat_writer.ATTEMPT_VARIABLE: self.attempt,
        }
        for name, value in env.items():
            self._patch.setenv(name, str(value))
        self._local.writer = HeartbeatWriter(self.page.numbers, shared_page.slot_offset(number))
        torch.manual_seed(seed)
        model = DistributedDataParallel(torch.nn.Linear(400, 400))
        optimizer = torch.optim.Adam(model.parameters())
        state = State(model=model, optimizer=optimizer, random_state=False, **settings)
        self.models.append(model)
        self.optimizers.append(optimizer)
        self.states.append(state)
        return state.restore()

    def step(self, step: int, ranks: tuple[int, ...] = (0, 1), *, is_committed: bool = True) -> None:
        """Do a step on these ranks, and commit it."""
        for rank in ranks:
            torch.manual_seed(step)
            self.optimizers[rank].zero_grad()
            self.models[rank].module(torch.randn(2, 400)).square().mean().backward()
            self.optimizers[rank].step()
        threads = [threading.Thread(target=self._commit, args=(rank, step)) for rank in ranks if is_committed]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def _commit(self, rank: int, step: int) -> None:
        self._local.writer = HeartbeatWriter(self.page.numbers, shared_page.slot_offset(rank))
        self.states[rank]["own"] = rank, step
        try:
            self.states[rank].commit(step)
        except Exception as error:
            self.errors.append(error)

    def survive(self, rank: int, dead: tuple[int, ...] = ()) -> None:
        """Have a rank complete its last light commits, since others have died. `dead`: those of its node."""
        file, newest = self.memory.file_to_complete(self.attempt, rank, dead)
        if file is not None:
            self.light.ranks[rank].use(os.dup(file.fd), newest)
        self.light.ranks[rank].complete()

    def contents(self) -> list[Any]:
        found = zip(self.models, self.optimizers, self.states, strict=True)
        return [({**model.state_dict()}, optimizer.state_dict(), state["own"]) for model, optimizer, state in found]


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """Make the first store of this process, with which torch opens a pipe that stays."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    light = Dispatcher()
    monkeypatch.setattr(rank_commits, "survivors", [light])
    monkeypatch.setenv(shared_page.PAGE_VARIABLE, "some:0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with memory_of(monkeypatch) as (memory, page):
        found = World(memory, page, light, monkeypatch)
        yield found
        for one in light.ranks:
            one.close()
        vars(found).clear()
        dist.destroy_process_group()
        gc.collect()


def train(world: World, steps: range) -> None:
    """Make one whole commit, and light ones after it."""
    for step in steps:
        world.step(step)
        for state in world.states:
            state._schedule.committed(step + 1, 8)  # noqa: SLF001 - as if few were to be whole


def test_a_light_commit_is_restored_with_what_a_survivor_has_added(world):
    """Rank 1 has died: both go on after the last step, with what they had. So again from what was restored."""
    assert world.begin(seed=1) == [0, 0]
    train(world, range(5))
    before = world.contents()
    world.survive(0)
    assert world.begin(seed=2) == [5, 5]
    assert same(world.contents(), before)
    assert world.begin(seed=3) == [5, 5]
    train(world, range(5, 8))
    world.survive(1)
    assert world.begin(seed=4) == [8, 8]
    assert [own for _, _, own in world.contents()] == [(0, 7), (1, 7)]


def test_a_light_commit_is_restored_with_what_a_survivor_of_another_node_has_added(world):
    """Both ranks of the node have died, of a world of four, and the node has fetched the part of rank 3."""
    world.begin(seed=1)
    train(world, range(5))
    before = world.contents()
    world.survive(0)
    for _, file in world.memory.files:
        held, header = file.held(), file.header()
        if held is not None and held.commit == Commit(1, 5):
            changes = {} if held.light else {"rank": 3, "first_sharer": 3}
            (tensors, pickled), shared = header.sizes(), header.shared_bytes
            header.seal(replace(held, world_size=4, **changes), tensors=tensors, pickled=pickled, shared=shared)
    assert world.begin(seed=2, chosen=CompleteCommit(Commit(1, 5), 4)) == [5, 5]
    assert same(world.contents(), before)


def test_without_a_survivor_the_last_whole_commit_is_restored(world):
    world.begin(seed=1)
    train(world, range(5))
    assert world.begin(seed=2) == [1, 1]


@pytest.mark.parametrize("dead", [(), (1,)], ids=["elsewhere", "here"])
@pytest.mark.parametrize("has_committed", [False, True])
def test_if_one_rank_has_not_made_the_last_commit_the_last_whole_one_is_restored(world, has_committed, dead):
    """It died between its optimizer's step and its commit: the survivor has begun that step, too."""
    world.begin(seed=1)
    train(world, range(5))
    world.step(5, ranks=(0,), is_committed=has_committed)
    world.survive(0, dead)
    assert world.begin(seed=2) == [1, 1]


def test_light_commits_are_made_with_auto_only(world):
    world.begin(seed=1, every=3)
    for step in range(5):
        world.step(step)
    assert world.light.made == []


def test_light_commits_follow_when_all_ranks_have_a_whole_commit(world):
    """Rank 1 lags behind: until its first commit is there, rank 0 has nothing else to go back to."""
    world.begin(seed=1)
    asked, all_have = [], [False]
    for state in world.states:
        agreement = state._rank.agreement  # noqa: SLF001
        agreement.has_all = lambda: asked.append(1) or all_have[0]
    train(world, range(3))
    assert (world.light.made, bool(asked)) == ([], True)
    all_have[0] = True
    train(world, range(3, 6))
    assert sorted(world.light.made) == [(rank, steps) for rank in (0, 1) for steps in (5, 6)]


def test_without_survivors_there_are_no_light_commits(world, monkeypatch):
    """Outside a function that is decorated with `elastic`."""
    monkeypatch.setattr(rank_commits, "survivors", [])
    world.begin(seed=1)
    train(world, range(4))
    assert {one.light for one in world.memory.held()} == {False}


def test_ranks_whose_tensors_differ_make_no_light_commits(world):
    """Whole ones are as frequent as ever then."""
    world.begin(seed=1)
    with torch.no_grad():
        world.models[1].module.weight[0, 0] += 1
    train(world, range(4))
    assert world.light.made == []


def test_without_memory_for_light_commits_training_goes_on(world):
    """It needs none of them. Whole commits had their memory from the first one on."""
    reserve = world.memory.files.reserve

    def refuse(key: tuple[int, int], size: int, *, node_bytes: int = 0) -> str:
        return "there is no more" if key[1] in LIGHT_BUFFERS else reserve(key, size, node_bytes=node_bytes)

    world.memory.files.reserve = refuse
    world.begin(seed=1)
    train(world, range(4))
    assert (world.errors, bool(world.light.made)) == ([], True)


def test_whole_commits_are_not_made_less_often_where_no_light_ones_are_made(world, monkeypatch):
    """As without an optimizer of torch: then a script would lose more, not less."""
    monkeypatch.setattr(shared_tensors, "LEAST_SHARED_BYTES", 1)  # there are no moments
    world.begin(seed=1)
    for optimizer in world.optimizers:
        optimizer.step = lambda: None
    train(world, range(4))
    assert world.light.made
    assert {one.light for one in world.memory.held()} == {False}
    assert [state._schedule.light_seconds for state in world.states] == [0.0, 0.0]  # noqa: SLF001

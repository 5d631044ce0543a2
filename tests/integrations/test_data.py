"""Each sample of an epoch once and none left out, whenever ranks are killed and however many there are afterwards."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.integrations.data import ElasticDataLoader, ElasticSampler

ATTEMPTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30), st.integers(0, 5)), max_size=6)
"""Of each: how many ranks there are, how many steps they do, and how many of these are lost when they are killed."""


def world(size: int, batch_size: int, ranks: int, state: dict[str, int]) -> list[ElasticSampler]:
    """Return the samplers of all ranks of an attempt that goes on from this state."""
    samplers = [ElasticSampler(size, batch_size, num_replicas=ranks, rank=rank, seed=3) for rank in range(ranks)]
    for sampler in samplers:
        sampler.load_state_dict(state)
    return samplers


def do_steps(samplers: list[ElasticSampler], most: int) -> list[tuple[list[int], dict[str, int]]]:
    """Do steps through epochs. Return the samples of all ranks in each, and the state after it."""
    done = []
    while len(done) < most:
        for batches in zip(*samplers, strict=True):
            assert all(batches), "a rank without a sample"
            for sampler in samplers:
                sampler.advance()
            states = [sampler.state_dict() for sampler in samplers]
            assert all(state == states[0] for state in states)
            done.append(([sample for batch in batches for sample in batch], states[0]))
            if len(done) == most:
                break
    return done


@given(size=st.integers(6, 60), batch_size=st.integers(1, 5), attempts=ATTEMPTS, last=st.integers(1, 6))
def test_each_sample_of_an_epoch_comes_once(size, batch_size, attempts, last) -> None:
    state = {"position": 0, "steps": 0}
    taken: list[int] = []
    for ranks, steps, lost in attempts:
        done = do_steps(world(size, batch_size, ranks, state), steps)
        kept = done[: max(0, len(done) - lost)]
        taken += [sample for samples, _ in kept for sample in samples]
        state = kept[-1][1] if kept else state
        assert state["position"] == len(taken)
    samplers = world(size, batch_size, last, state)
    while samplers[0].epoch < state["position"] // size + 2:
        taken += do_steps(samplers, 1)[0][0]
    for epoch in range(len(taken) // size):
        assert Counter(taken[epoch * size : (epoch + 1) * size]) == Counter(range(size))


@given(size=st.integers(6, 100), batch_size=st.integers(2, 5), ranks=st.integers(1, 6))
def test_epochs_of_a_world_that_stays_are_equally_long_and_end_with_their_samples(size, batch_size, ranks) -> None:
    """Where a rank takes two samples or more, as long as there are so many."""
    if size < 2 * ranks:
        return
    (first, *_) = samplers = world(size, batch_size, ranks, {"position": 0, "steps": 0})
    assert len(first) == -(-size // (batch_size * ranks))
    assert max(len(batch) for batch in first) <= batch_size
    do_steps(samplers, len(first))
    assert first.state_dict() == {"position": size, "steps": 0}


@given(size=st.integers(6, 60), batch_size=st.integers(1, 5), ranks=st.integers(1, 6), steps=st.integers(0, 20))
def test_the_length_is_that_of_the_whole_epoch(size, batch_size, ranks, steps) -> None:
    (first, *_) = samplers = world(size, batch_size, ranks, {"position": 0, "steps": 0})
    do_steps(samplers, steps)
    left = sum(1 for _ in first)
    assert len(first) == first.state_dict()["steps"] + left


def test_the_order_differs_between_epochs_and_seeds_and_may_be_that_of_the_data_set() -> None:
    def order(**more: object) -> list[list[int]]:
        sampler = ElasticSampler(50, 50, num_replicas=1, rank=0, **more)
        return [do_steps([sampler], 1)[0][0] for _ in range(2)]

    first, second = order()
    assert first != second
    assert order() == [first, second]
    assert order(seed=9)[0] != first
    assert order(shuffle=False) == [list(range(50))] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_after_the_batch_that_its_loop_has_got(workers: int) -> None:
    """Workers read ahead; that does not count. Torch's default generator is not touched."""
    torch.manual_seed(0)
    before = torch.get_rng_state()

    def loader() -> ElasticDataLoader:
        return ElasticDataLoader(torch.arange(23), batch_size=3, num_replicas=1, rank=0, num_workers=workers)

    whole = [batch.tolist() for batch in loader()]
    killed = loader()
    got = [batch.tolist() for batch, _ in zip(killed, range(3), strict=False)]
    # `zip` has taken a fourth batch from the loader, which the loop has got, too.
    assert got == whole[:3]
    again = loader()
    again.load_state_dict(killed.state_dict())
    assert [batch.tolist() for batch in again] == whole[4:]
    assert again.epoch == 1
    assert len(again) == len(whole) == 8
    assert torch.equal(before, torch.get_rng_state())


def test_ranks_are_those_of_the_environment(monkeypatch) -> None:
    sampler = ElasticSampler(8, 1, shuffle=False)
    assert [*sampler] == [[0], [1], [2], [3], [4], [5], [6], [7]]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert [*sampler] == [[1], [5]]


@pytest.mark.parametrize(("size", "batch_size"), [(0, 1), (1, 0)])
def test_what_is_no_size_is_refused(size: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        ElasticSampler(size, batch_size)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples for 4 ranks"):
        next(iter(ElasticSampler(3, 1, num_replicas=4, rank=0)))

"""Random states of a rank, and of one that did not exist before."""

from __future__ import annotations

import random

import pytest

from raylaunch.worker.state import random_states

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
pytest.importorskip("numpy.random")


def drawn() -> tuple[float, ...]:
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


@pytest.fixture(autouse=True)
def own_states():
    """Leave the generators of this process as they were."""
    before = random_states.collect()
    yield
    random_states.restore(before)


def test_states_come_back():
    states = random_states.collect()
    before = drawn()
    random_states.restore(states)
    assert drawn() == before


def test_a_new_rank_is_seeded_by_the_states_of_another_one():
    """Alike in each run, but not as any other rank; and each library by its own state."""
    states = random_states.collect()
    found = []
    for rank in (4, 5, 4):
        random.seed()  # what the process has before is of no account
        random_states.seed_from(states, rank)
        found.append(drawn())
    random_states.restore(states)
    assert found[0] == found[2]
    assert not set(found[0]) & {*found[1], *drawn()}

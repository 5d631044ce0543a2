"""Random states of a rank, and of one that did not exist before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from raylaunch.worker.state.snapshots import random_states

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


def numbers() -> Iterator[Callable[[], object]]:
    """Yield what changes the state of a generator, some without a change of the numbers that it is made of."""
    for one in (random, numpy.random):
        yield one.random
        for _ in range(2):
            yield lambda one=one: one.normalvariate(0, 1) if one is random else one.normal()
            yield lambda one=one: one.gauss(0, 1) if one is random else one.standard_normal()
        yield lambda one=one: one.seed(3)
        before = one.getstate() if one is random else one.get_state()
        yield one.random
        yield lambda one=one, before=before: one.setstate(before) if one is random else one.set_state(before)
    for _ in range(2 * 624):  # the numbers are renewed all at once, when all are drawn
        yield lambda: (random.random(), numpy.random.random())


def test_each_change_is_noticed():
    """What `collect` returns is what the generators say, though it seldom asks them."""
    for change in numbers():
        change()
        for _ in range(2):
            states = random_states.collect()
            version, found, gauss = states["python"]
            assert (version, tuple(array("I", found)), gauss) == random.getstate()
            name, found, *more = states["numpy"]
            asked = numpy.random.get_state()
            assert (name, found, *more) == (asked[0], asked[1].tobytes(), *asked[2:])
            assert states["torch"] == torch.get_rng_state().numpy().tobytes()


def test_another_generator_of_numpy_is_known_too():
    """It is not one whose memory `collect` knows."""
    own = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        for _ in range(3):
            states = random_states.collect()
            before = drawn()
            random_states.restore(states)
            assert drawn() == before
    finally:
        numpy.random.set_bit_generator(own)


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


class Device:
    """A device that torch itself does not know, as Ascend's: its extension puts a module into torch."""

    def __init__(self, *, initialized=True):
        self.state, self.initialized = torch.arange(16, dtype=torch.uint8), initialized

    def module(self):
        found = ModuleType("torch.device")
        names = ("is_available", "is_initialized", "synchronize", "get_rng_state", "set_rng_state", "manual_seed")
        vars(found).update({name: getattr(self, name) for name in names})
        return found

    def is_available(self):
        return True

    def is_initialized(self):
        return self.initialized

    def synchronize(self):
        pass

    def get_rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state

    def manual_seed(self, seed):
        self.state = torch.tensor([seed % 251], dtype=torch.uint8)


def test_devices_other_than_cuda(monkeypatch):
    """The generator of the current device, if the script uses it."""
    device = Device()
    monkeypatch.setattr(torch, "brain", device.module(), raising=False)
    monkeypatch.setattr(torch, "hpu", Device(initialized=False).module(), raising=False)
    states = random_states.collect()
    assert (states["brain"], states.keys() & {"hpu", "cuda"}) == (bytes(range(16)), set())
    device.state = None
    random_states.restore(states)
    assert device.state.tolist() == [*range(16)]
    seeded = []
    for rank in (4, 5, 4):
        random_states.seed_from(states, rank)
        seeded.append(device.state.item())
    random_states.restore(states)
    assert seeded[0] == seeded[2] != seeded[1]


def test_cuda_is_not_initialized_by_a_commit(monkeypatch):
    """To ask whether there is any does that: a worker on the CPU would get a context, or find out that it has none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("it was asked"))
    random_states.collect()

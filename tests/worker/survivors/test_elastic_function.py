"""`elastic` outside a launch. tests/cluster/test_survivors.py has what it does in one."""

from __future__ import annotations

import pytest

from raylaunch.worker import WorldChanged, elastic


@pytest.mark.parametrize("decorator", [elastic, elastic(backend="gloo"), elastic()])
def test_outside_a_launch_the_function_is_just_called(decorator):
    """As under plain Python and torchrun."""
    calls = []

    @decorator
    def train(state: list[int], *, rate: float) -> float:
        """Train."""
        calls.append(state)
        if rate > 1:
            raise ValueError(rate)
        return 2 * rate

    state = [1]
    assert train(state, rate=0.5) == 1.0
    assert calls[0] is state
    assert (train.__name__, train.__doc__) == ("train", "Train.")
    with pytest.raises(ValueError, match="3"):
        train(state, rate=3.0)


def test_handlers_of_exceptions_let_the_interruption_pass():
    assert not issubclass(WorldChanged, Exception)

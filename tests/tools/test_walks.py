"""Walks through the code, as docs/architecture.md counts them."""

from __future__ import annotations

import pytest

from tools import walks

STEPS = """
# The state machine
core.machine.machine:Machine.handle | decides
core.machine.saving:save_world
"""


def test_a_module_on_the_way_is_counted():
    """Though no step names it: what the walk says of it is what the module says of itself."""
    first, way, last = walks.walk(STEPS)
    assert (first.module, first.what) == ("core.machine.machine", "decides")
    assert way.module not in (first.module, last.module)
    assert way.what == walks.about(way.module)
    assert last.module == "core.machine.saving"


def test_a_method_of_a_protocol_may_be_each_class_that_has_all_its_methods():
    """Which fleet there is, is known only when it runs."""
    chain = walks.way([("cluster.driver.executor", "Executor.perform")], ("cluster.fleet.ray_fleet", "RayFleet.send"))
    assert chain[-2][0] == "cluster.driver.executor"


def test_a_step_that_was_removed_is_named():
    with pytest.raises(ValueError, match=r"core\.machine\.machine:Machine\.guess is not in the code any more"):
        walks.walk("# The state machine\ncore.machine.machine:Machine.guess")


def test_a_step_that_nothing_calls_is_named():
    with pytest.raises(
        ValueError, match=r"Driver\.run is not called from what the walk in `The state machine` has reached"
    ):
        walks.walk("# The state machine\ncore.machine.machine:Machine.handle\ncluster.driver.driver:Driver.run")

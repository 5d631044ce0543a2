"""What faults may cost a job: with `State`, the death of a store is no longer for nothing."""

from __future__ import annotations

from tools.chaos.faults import FAULTS, with_state


def test_only_with_state_a_killed_store_may_use_up_a_restart():
    """Its ranks use the store of their attempt at each commit."""
    by_name = {fault.name: fault for _, fault in FAULTS}
    changed = {name for name, fault in by_name.items() if with_state(fault) != fault}
    assert changed == {"kill -9 of a store"}
    store = by_name["kill -9 of a store"]
    assert (store.harmless, store.spends) == (True, 0)
    assert (with_state(store).harmless, with_state(store).spends) == (True, 1)

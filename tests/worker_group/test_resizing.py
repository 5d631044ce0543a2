"""A resize for which the cluster does not provide the nodes in time."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.cluster.control.control_messages import Accepted, RefusedError
from raylaunch.core.machine.state import Phase
from raylaunch.errors import ClusterError
from raylaunch.worker_group.calls import PendingResize
from raylaunch.worker_group.dispatcher import _DrivenRun, _Resizing
from raylaunch.worker_group.lines import GroupWorld


def refuse(_: Any) -> None:
    raise RefusedError("the run has ended")


def test_it_is_not_given_up_while_ranks_make_their_objects() -> None:
    """They may be those that were asked for. Also when it is given up just as the run ends, its caller is told."""
    run, resizing, world = _DrivenRun(), _Resizing(), GroupWorld(attempt=2, size=1)
    run.control = SimpleNamespace(answer=lambda _: Accepted(attempt=1, phase=Phase.RUNNING, status=""))  # type: ignore[assignment]
    done: Future[None] = Future()
    resizing.begin(PendingResize(done=done, min_nodes=2, max_nodes=2, seconds=5.0), world, run)
    due = resizing.give_up_at
    world.lines[0] = SimpleNamespace()  # type: ignore[assignment]
    resizing.give_up_waiting(due, world, run)
    assert not done.done()
    assert due < resizing.give_up_at <= due + 1.0
    world.make_ready(0, None)
    run.control.answer = refuse  # type: ignore[method-assign, union-attr]
    resizing.give_up_waiting(due + 1.0, world, run)
    with pytest.raises(ClusterError, match="did not provide 2 nodes within 5 s"):
        done.result()

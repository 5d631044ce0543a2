"""The call that is carried out, when a rank dies whose result is on its way to Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.worker_group.calls import CallFailedError, GroupCall, PackedArguments, PendingCall
from raylaunch.worker_group.dispatcher import _Carrying
from raylaunch.worker_group.lines import GroupWorld


@pytest.mark.parametrize(("error", "is_kept"), [(FileNotFoundError("/proc/7/fd/9"), True), (MemoryError(), False)])
def test_a_result_that_is_gone_with_its_rank(error: Exception, is_kept: bool) -> None:
    """A restart follows, which interrupts the call: it is made again with `retry`. Otherwise it fails."""
    nothing: Any = lambda *_: None  # noqa: E731
    calls, future = _Carrying(SimpleNamespace(release=nothing, send=nothing)), GroupCall()  # type: ignore[arg-type]
    call = PendingCall(future=future, method="get", arguments=PackedArguments((), {}), rank=None, retry=True)
    calls.carry_out(call, GroupWorld(attempt=1, size=1))
    calls.stored(call.number, 0, None, error, 1)
    assert future.done() is not is_kept
    calls.give_up_waiting(calls.give_up_at)
    with pytest.raises(CallFailedError, match="not in Ray"):
        future.result(0)

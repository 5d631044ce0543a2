"""`elastic`: a function that is called again in the same process, for as many attempts as it takes. After Horovod's."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.state import rank_commits
from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.light_commits import LightCommits
from raylaunch.worker.survivors.made_groups import MadeGroups
from raylaunch.worker.survivors.survivor import Survivor, WorldChanged

P = ParamSpec("P")
Result = TypeVar("Result")

_made = MadeGroups()


def watch() -> None:
    """Note what the script makes of torch from now on, where it can have survivors. Only the first call counts."""
    if survivor_link.is_known() and not _made.is_watching:
        _made.watch()


@overload
def elastic(function: Callable[P, Result], /) -> Callable[P, Result]: ...
@overload
def elastic(*, backend: str | None = None) -> Callable[[Callable[P, Result]], Callable[P, Result]]: ...
def elastic(
    function: Callable[P, Result] | None = None, /, *, backend: str | None = None
) -> Callable[P, Result] | Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Let a worker stay when others of its world die: it leaves the function, and calls it again in the new world.

        @elastic(backend="gloo")
        def train(state):
            for step in range(state.restore(), 1000):
                ...
                state.commit(step)

        train(State(model=model, optimizer=optimizer))

    What was made before the call stays. Only the default process group is a new one, made as the script made it; if the
    script has made none, by `init_process_group(backend)` before the first call. Models in DistributedDataParallel that
    were made before the call use the new group. The function must call `State.restore`, and make what depends on other
    groups or the size of the world. An exception ends it: the error of the collective whose peer is gone, else
    `WorldChanged`, which is no `Exception`. `finally` blocks run. A worker that has not left it within a second, or ten
    with NCCL, is killed, and started again like the workers that died.

    Outside a launch, and in threads other than the main one, the function is just called.
    """
    if function is None:
        return lambda given: _decorated(given, backend)
    return _decorated(function, backend)


def explains(error: BaseException) -> bool:
    """Return whether the elastic function that is running should let this exception pass: another attempt begins."""
    return any(survivor.explains(error) for survivor in rank_commits.survivors)


def _decorated(function: Callable[P, Result], backend: str | None) -> Callable[P, Result]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        writer = heartbeat_writer.current_writer()
        is_main = threading.current_thread() is threading.main_thread()
        if rank_commits.survivors or writer is None or not is_main or not survivor_link.is_known():
            return function(*args, **kwargs)
        return _run(lambda: function(*args, **kwargs), backend, writer)

    return call


def _run(function: Callable[[], Result], backend: str | None, writer: HeartbeatWriter) -> Result:
    why = _made.end_preparation()
    if not _made.has_group:
        _made.make_group(backend)
    if why := why or _made.why_not_nccl():
        print(f"raylaunch: this worker cannot stay when others die: {why}", file=sys.stderr, flush=True)
        return function()
    light = LightCommits()
    survivor = Survivor(_made, writer, light)
    rank_commits.survivors.append(survivor)
    try:
        while True:
            done, value = _attempt(function, survivor)
            if done:
                return value  # type: ignore[return-value]
            survivor.rejoin(backend)
    finally:
        rank_commits.survivors.remove(survivor)
        light.close()
        survivor.close()


def _attempt(function: Callable[[], Result], survivor: Survivor) -> tuple[bool, Result | None]:
    """Call the function once. Return (True, result), or (False, None) where it was left for another attempt.

    No reference to the exception stays: its frames hold the process group, whose sockets would stay open.
    """
    try:
        try:
            survivor.is_inside = True
            value = function()
            survivor.leave_if_ordered()  # what it returns may be garbage
        finally:
            survivor.is_inside = False
    except WorldChanged:
        return False, None
    except Exception as error:
        if not survivor.explains(error):
            raise
        return False, None
    return True, value

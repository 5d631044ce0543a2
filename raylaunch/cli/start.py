"""`raylaunch.start` begins a run and returns a handle of it; `raylaunch.attach` returns one of a run of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from raylaunch.cli.api import checked_launch
from raylaunch.cli.detached import detached_handle
from raylaunch.cli.handle import Handle
from raylaunch.core.record.result import RunResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raylaunch.cli.config.job_settings import JobSettings

Returned = TypeVar("Returned")


@overload
def start(
    function: Callable[..., Returned],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    **settings: Unpack[JobSettings],
) -> Handle[list[Returned]]: ...
@overload
def start(
    *, script: str | os.PathLike[str], args: Sequence[object] = ..., **settings: Unpack[JobSettings]
) -> Handle[RunResult]: ...
@overload
def start(*, module: str, args: Sequence[object] = ..., **settings: Unpack[JobSettings]) -> Handle[RunResult]: ...
@overload
def start(*, command: str, args: Sequence[object] = ..., **settings: Unpack[JobSettings]) -> Handle[RunResult]: ...
def start(
    function: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    script: str | os.PathLike[str] | None = None,
    module: str | None = None,
    command: str | None = None,
    **settings: Any,
) -> Handle[Any]:
    """Begin a run as `launch` does, and return a `Handle` of it at once.

    A thread of this process drives the run, which ends with the process. Several runs may go on at once. Signals to the
    process do not reach the run; `Handle.stop` ends it.

    With `detach=True` the run goes on without this process, as with `raylaunch -d`, and this function returns when its
    workers have started.

    Takes the arguments of `launch`.

    :raises TypeError: an argument has the wrong type. Nothing was started.
    :raises ConfigError: a setting is wrong, or there is no such script.
    """
    programs = {"script": script, "module": module, "command": command}
    checked = checked_launch("start", function, args, kwargs, programs, settings)
    if not checked.job.detach:
        return Handle(checked)
    if checked.payload:
        msg = "what a function returns is lost when its caller is gone: with `detach=True`, `start` runs a program"
        raise TypeError(msg)
    return detached_handle.started(checked.job)


def attach(run: str | None = None) -> Handle[RunResult]:
    """Return a handle of a run that another process has started, such as one with `detach=True`.

    :param run: an id, the beginning of one, a name (for its newest run), or a run folder; None: the newest run of this
        user.
    :raises ConfigError: there is no such run, or there are several.
    """
    return detached_handle.attached(run)

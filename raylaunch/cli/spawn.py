"""`raylaunch.spawn`: `torch.multiprocessing.spawn` over a cluster."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, overload

from raylaunch.cli.api import check_call, checked_function, error_of, exception_of
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.failures.failure import Failure
from raylaunch.worker.runtime.entry import NO_PROCESS_GROUP, call_with_rank

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raylaunch.cli.config.job_settings import SpawnSettings


@overload
def spawn(
    fn: Callable[Concatenate[int, ...], object],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: str = ...,
    **settings: Unpack[SpawnSettings],
) -> None: ...
@overload
def spawn(
    fn: Callable[Concatenate[int, ...], object],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: str = ...,
    **settings: Unpack[SpawnSettings],
) -> SpawnContext: ...
@overload
def spawn(
    fn: Callable[Concatenate[int, ...], object],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    join: bool = ...,
    daemon: bool = ...,
    start_method: str = ...,
    **settings: Unpack[SpawnSettings],
) -> SpawnContext | None: ...
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **settings: Any,
) -> SpawnContext | None:
    """Call `fn(i, *args)` in `nprocs` processes of the cluster, with `i` from 0 to `nprocs - 1`.

    Has the signature and the exceptions of `torch.multiprocessing.spawn` (torch 2.13). `i` is RANK. No process
    group is initialized; `fn` may call `init_process_group()` without arguments, since torchrun's environment is set,
    or with an address and port of its own if all processes are on one node.

    :param fn: anything that cloudpickle can pickle. Its return value is ignored.
    :param nprocs: the total number of processes. They run on as few nodes as have room, or evenly on `nnodes=`.
    :param join: whether to wait for the end. If False, return a `SpawnContext` at once.
    :param daemon: ignored; the processes never outlive the caller.
    :param start_method: ignored.
    :param settings: the settings of a job file, such as `max_restarts=3`.
    :raises TypeError: `fn` is no function, or `args` no tuple or list. Nothing was started.
    :raises torch.multiprocessing.ProcessRaisedException: `fn` raised. The message is the traceback of the process that
        failed first; `__cause__` is its exception, if that could be pickled.
    :raises torch.multiprocessing.ProcessExitedException: a process was killed, or its exit code was not 0.
    :raises ClusterError: the cluster cannot be reached, or did not provide the requested nodes in time.
    :raises ConfigError: a setting is wrong.
    :raises InterruptedByUserError: a signal stopped the run. It is a KeyboardInterrupt.
    """
    del daemon, start_method
    check_call("spawn", fn, args)
    job_settings = {"show": "raw", "backend": NO_PROCESS_GROUP, "nprocs": nprocs} | settings
    checked = checked_function((call_with_rank, (fn, tuple(args)), {}), fn, args, {}, job_settings)
    context = SpawnContext(checked.run)
    if not join:
        context.start()
        return context
    context.run()
    context.join()
    return None


class SpawnContext:
    """The processes that one `spawn(join=False)` started."""

    def __init__(self, work: Callable[[], RunOutcome]) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._outcome: RunOutcome | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Run in a daemon thread. It ends with the program, and the processes end with it."""
        self._thread = threading.Thread(target=self._keep_error, daemon=True, name="raylaunch-spawn")
        self._thread.start()

    def run(self) -> None:
        """Run in this thread; in the main thread, signals are handled as on the command line."""
        self._outcome = self._work()

    def _keep_error(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for at most `timeout` seconds and return whether all processes have ended. Raises as `spawn` does.

        :param grace_period: ignored; `shutdown_timeout=` of `spawn` sets the time between SIGTERM and SIGKILL.
        """
        del grace_period
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        if not self._outcome.result.ok:
            raise _torch_exception(self._outcome) from exception_of(self._outcome)
        return True


def _torch_exception(outcome: RunOutcome) -> BaseException:
    """Return the exception that `torch.multiprocessing.spawn` would raise."""
    cause = outcome.result.cause
    if cause is None:
        return error_of(outcome)
    # Not imported at the top: only this needs torch, which takes seconds to load.
    torch: Any = importlib.import_module("torch.multiprocessing")
    if cause.error is not None and cause.error.traceback:
        text = f"\n\n-- Process {cause.rank} terminated with the following error:\n{cause.error.traceback}"
        return _make_exception(torch.ProcessRaisedException, text, cause)
    if cause.signal:
        text = f"process {cause.rank} terminated with signal {cause.signal}"
        return _make_exception(
            torch.ProcessExitedException, text, cause, exit_code=cause.exit_code, signal_name=cause.signal
        )
    text = f"process {cause.rank} terminated with exit code {cause.exit_code}"
    return _make_exception(torch.ProcessExitedException, text, cause, exit_code=cause.exit_code)


def _make_exception(kind: Callable[..., BaseException], text: str, cause: Failure, **more: Any) -> BaseException:
    return kind(text, error_index=cause.rank, error_pid=cause.pid, **more)

"""`raylaunch.spawn`: what `torch.multiprocessing.spawn` does, over a cluster."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from raylaunch.cli.api import error_of, exception_of, run_function
from raylaunch.cluster.run import Outcome
from raylaunch.core.failure import Failure
from raylaunch.worker.entry import NO_GROUP, call_with_rank


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **settings: Any,
) -> SpawnContext | None:
    """Call `fn(i, *args)` in `nprocs` processes, `i` from 0 to `nprocs - 1`, wherever the cluster has room for them.

    The signature and the exceptions are those of `torch.multiprocessing.spawn` (torch 2.13). `i` is RANK. Nobody
    makes a process group for `fn`; `init_process_group()` without arguments works, since torchrun's environment is
    set, and so does one at an address and port of `fn`'s own where all processes are on one node.

    :param fn: anything that cloudpickle can pickle; what it returns is dropped.
    :param nprocs: processes in all. They are put on as few nodes as have room, or on `nnodes=` evenly.
    :param join: wait for the end; False: return at once, and have `SpawnContext.join` wait.
    :param daemon: for the signature's sake; the processes never outlive the caller.
    :param start_method: for the signature's sake.
    :param settings: the settings of a job file, such as `max_restarts=3`.
    :raises torch.multiprocessing.ProcessRaisedException: `fn` raised; the text is the traceback of the process that
        was the root cause, the `__cause__` its exception, if that could be pickled.
    :raises torch.multiprocessing.ProcessExitedException: a process exited with another code than 0 or by a signal.
    :raises ClusterError: the cluster cannot be reached, or did not give what was asked in time.
    :raises ConfigError: a setting is wrong.
    :raises InterruptedByUserError: a signal ended the run.
    """
    del daemon, start_method
    chosen = {"show": "raw", "backend": NO_GROUP, "nprocs": nprocs} | settings
    context = SpawnContext(lambda: run_function(fn, call_with_rank, (fn, tuple(args)), {}, chosen))
    if not join:
        context.start()
        return context
    context.run()
    context.join()
    return None


class SpawnContext:
    """The processes of one `spawn(join=False)`."""

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin in a thread. It ends with the program, and the processes with it."""
        self._thread = threading.Thread(target=self._keep_error, daemon=True, name="raylaunch-spawn")
        self._thread.start()

    def run(self) -> None:
        """Do it here, where signals come."""
        self._outcome = self._work()

    def _keep_error(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait, for `timeout` seconds at most; whether all processes have ended. Raises as `spawn` does.

        :param grace_period: for the signature's sake; `shutdown_timeout=` of `spawn` says how long processes have.
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
            raise _as_torch_says(self._outcome) from exception_of(self._outcome)
        return True


def _as_torch_says(outcome: Outcome) -> BaseException:
    """The exception that `torch.multiprocessing.spawn` would have raised."""
    cause = outcome.result.cause
    if cause is None:
        return error_of(outcome)
    # Not imported at the top: who only launches need not load torch.
    torch: Any = importlib.import_module("torch.multiprocessing")
    if cause.error is not None and cause.error.traceback:
        text = f"\n\n-- Process {cause.rank} terminated with the following error:\n{cause.error.traceback}"
        return _made(torch.ProcessRaisedException, text, cause)
    if cause.signal:
        text = f"process {cause.rank} terminated with signal {cause.signal}"
        return _made(torch.ProcessExitedException, text, cause, exit_code=cause.exit_code, signal_name=cause.signal)
    text = f"process {cause.rank} terminated with exit code {cause.exit_code}"
    return _made(torch.ProcessExitedException, text, cause, exit_code=cause.exit_code)


def _made(kind: Callable[..., BaseException], text: str, cause: Failure, **more: Any) -> BaseException:
    return kind(text, error_index=cause.rank, error_pid=cause.pid, **more)

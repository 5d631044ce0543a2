"""`raylaunch.launch`: call a function on every worker and return the results by rank."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from raylaunch.cli.config import job_file, python_settings
from raylaunch.cli.output.console import Console, run_observer
from raylaunch.cli.output.report import report
from raylaunch.cluster.run import RunOutcome, run_job
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import shown
from raylaunch.core.record.result import JobFailedError
from raylaunch.errors import ClusterError, ExitCode, InterruptedByUserError

_MOST_SHOWN = 60
"""Characters of a wrong argument that an error shows."""


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on every worker and return the results in the order of the ranks.

    The workers have torchrun's environment. Their process group is initialized before the call (with `backend=`; by
    default nccl where workers have GPUs, else gloo) and destroyed after it.

    :param function: anything that cloudpickle can pickle, including lambdas and functions of `__main__`.
    :param settings: the settings of a job file, such as `nnodes=2, nproc_per_node=4, max_restarts=3`.
    :returns: one result for each rank.
    :raises TypeError: an argument is of another kind, such as a script's name in the place of the function. Nothing
        was started.
    :raises JobFailedError: workers failed and no restart followed. The message contains the traceback of the rank
        that failed first; `__cause__` is its exception, if that could be pickled. It also has `rank`, `node`, `run_dir`
        and `result`.
    :raises ClusterError: the cluster cannot be reached, or did not provide the requested nodes in time.
    :raises ConfigError: a setting is wrong.
    :raises InterruptedByUserError: SIGINT or SIGTERM stopped the run. It is a KeyboardInterrupt.
    """
    check_call("launch", function, args, kwargs)
    outcome = run_function(function, function, args, kwargs or {}, settings)
    if not outcome.result.ok:
        raise error_of(outcome) from exception_of(outcome)
    return [pickle.loads(outcome.values[rank]) for rank in sorted(outcome.values)]  # noqa: S301


def check_call(caller: str, function: object, args: object, kwargs: object = None) -> None:
    """Raise TypeError unless `function(*args, **kwargs)` could be a call."""
    if not callable(function):
        hint = f"; `raylaunch {function}` in a shell runs a script" if isinstance(function, str) else ""
        msg = f"`{caller}` takes a function, not {_described(function)}{hint}"
        raise TypeError(msg)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray):
        kind = "`kwargs`" if isinstance(args, Mapping) and caller == "launch" else f"`args=({_described(args)},)`"
        msg = f"`args` is a tuple or a list of the function's arguments, not {_described(args)}: did you mean {kind}?"
        raise TypeError(msg)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        msg = f"`kwargs` is a dict of the function's keyword arguments, not {_described(kwargs)}"
        raise TypeError(msg)


def _described(value: object) -> str:
    """Return a short value as it is written, and else what kind of object it is."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return text if 0 < len(text) <= _MOST_SHOWN else f"an object of type {type(value).__qualname__}"


def run_function(
    function: Callable[..., Any],
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> RunOutcome:
    """Call `target(*args, **kwargs)` on every worker. The run is named after `function`."""
    job = _job(function, settings)
    payload = cloudpickle.dumps((target, tuple(args), dict(kwargs)))
    console = Console()
    try:
        return run_job(job, job_file.dump(shown(job, os.environ)), run_observer(job, console), payload=payload)
    finally:
        console.close()


def _job(function: Callable[..., Any], settings: Mapping[str, Any]) -> Job:
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", type(function).__name__)
    entrypoint = {"function": f"{module}:{name}"}
    return python_settings.job_of({"name": name.strip("<>"), **settings, "entrypoint": entrypoint})


def error_of(outcome: RunOutcome) -> BaseException:
    """Return the exception that stands for a run that did not succeed, with the report as its message."""
    result = outcome.result
    text = report(result).removeprefix("error: ").rstrip()
    if result.exit_code == ExitCode.JOB_FAILED:
        return JobFailedError(text, result=result)
    if result.exit_code == ExitCode.UNAVAILABLE:
        return ClusterError(text)
    error = InterruptedByUserError(text)
    error.exit_code = result.exit_code
    return error


def exception_of(outcome: RunOutcome) -> BaseException | None:
    """Return the exception of the root cause's rank; None if there is none or it could not be pickled."""
    cause = outcome.result.cause
    data = outcome.values.get(cause.rank) if cause is not None else None
    if not data:
        return None
    try:
        found = pickle.loads(data)  # noqa: S301
    except Exception:  # noqa: BLE001
        return None  # the class of the exception cannot be imported here
    return found if isinstance(found, BaseException) else None

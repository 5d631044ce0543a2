"""`raylaunch.launch`: a function on every worker, its results back by rank."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from raylaunch.cli import config, dialect
from raylaunch.cli.console import Console
from raylaunch.cli.event_log import watching
from raylaunch.cli.report import report
from raylaunch.cluster.run import Outcome, run_job
from raylaunch.core.job import Job
from raylaunch.core.redaction import shown
from raylaunch.errors import ClusterError, ExitCode, InterruptedByUserError, JobFailedError


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on every worker of the cluster; the results, by rank.

    The workers have torchrun's environment. Their process group is initialized before the call (nccl where they
    have GPUs, else gloo, or `backend=`) and destroyed after it.

    :param function: anything that cloudpickle can pickle, also a lambda or a function of `__main__`.
    :param settings: the settings of a job file, such as `nnodes=2, nproc_per_node=4, max_restarts=3`.
    :returns: one result for each rank.
    :raises JobFailedError: workers failed for good. Its `__cause__` is the exception of the rank that was the root
        cause (if it could be pickled), its message holds that rank's traceback.
    :raises ClusterError: the cluster cannot be reached, or did not give what was asked in time.
    :raises ConfigError: a setting is wrong.
    :raises InterruptedByUserError: SIGINT or SIGTERM ended the run.
    """
    outcome = run_function(function, function, args, kwargs or {}, settings)
    if not outcome.result.ok:
        raise error_of(outcome) from exception_of(outcome)
    return [pickle.loads(outcome.values[rank]) for rank in sorted(outcome.values)]  # noqa: S301


def run_function(
    named: Callable[..., Any],
    called: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Outcome:
    """Run `called(*args, **kwargs)` on every worker; `named` gives the run its name."""
    job = _job(named, settings)
    payload = cloudpickle.dumps((called, tuple(args), dict(kwargs)))
    console = Console()
    try:
        return run_job(job, dialect.dump(shown(job, os.environ)), watching(job, console), payload=payload)
    finally:
        console.close()


def _job(function: Callable[..., Any], settings: Mapping[str, Any]) -> Job:
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", type(function).__name__)
    entrypoint = {"function": f"{module}:{name}"}
    return config.from_python({"name": name.strip("<>"), **settings, "entrypoint": entrypoint})


def error_of(outcome: Outcome) -> Exception:
    """What a run that did not end well is in Python."""
    result = outcome.result
    text = report(result).removeprefix("error: ").rstrip()
    if result.exit_code == ExitCode.JOB_FAILED:
        return JobFailedError(text)
    if result.exit_code == ExitCode.UNAVAILABLE:
        return ClusterError(text)
    return InterruptedByUserError(text)


def exception_of(outcome: Outcome) -> BaseException | None:
    """What the rank that was the root cause raised, if it came across."""
    cause = outcome.result.cause
    data = outcome.values.get(cause.rank) if cause is not None else None
    if not data:
        return None
    try:
        found = pickle.loads(data)  # noqa: S301
    except Exception:  # noqa: BLE001
        return None  # an exception whose class only the workers know
    return found if isinstance(found, BaseException) else None

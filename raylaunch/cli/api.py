"""`raylaunch.launch`: call a function on every worker and return the results by rank, or run a script, and wait."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from raylaunch.cli import payload, run_once
from raylaunch.cli.args.diagnostics import SourceSpan
from raylaunch.cli.config import job_file, load
from raylaunch.cli.html_report.run_report import write_at_the_end
from raylaunch.cli.output.console import Console, run_observer
from raylaunch.cli.output.report import report
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.cluster.run import CAPABILITIES, RunOutcome, run_job
from raylaunch.core.job.job import ENTRYPOINT_KINDS, Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.record.result import JobFailedError, RunResult
from raylaunch.core.text import named_ranks
from raylaunch.errors import JOB_FAILURES, ClusterError, ConfigError, ExitCode, InterruptedByUserError, RunStoppedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raylaunch.cli.config.job_settings import JobSettings
    from raylaunch.cluster.capability import Capability
    from raylaunch.cluster.ray_api.placement_groups import GivenGroup

Returned = TypeVar("Returned")

_MOST_SHOWN = 60
"""Characters of a wrong argument that an error shows."""


@overload
def launch(
    function: Callable[..., Returned],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    **settings: Unpack[JobSettings],
) -> list[Returned]: ...
@overload
def launch(
    *, script: str | os.PathLike[str], args: Sequence[object] = ..., **settings: Unpack[JobSettings]
) -> RunResult: ...
@overload
def launch(*, module: str, args: Sequence[object] = ..., **settings: Unpack[JobSettings]) -> RunResult: ...
@overload
def launch(*, command: str, args: Sequence[object] = ..., **settings: Unpack[JobSettings]) -> RunResult: ...
def launch(
    function: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    script: str | os.PathLike[str] | None = None,
    module: str | None = None,
    command: str | None = None,
    **settings: Any,
) -> list[Any] | RunResult:
    """Call `function(*args, **kwargs)` on every worker and return the results in the order of the ranks.

    The workers have torchrun's environment. Their process group is initialized before the call (with `backend=`; by
    default nccl if each worker has a GPU of its own, else gloo) and destroyed after it.

    Instead of a function, `script=`, `module=` or `command=` names what every worker runs, as on the command line;
    `args` are its arguments, and the result is a `RunResult`.

    :param function: anything that cloudpickle can pickle, including lambdas and functions of `__main__`.
    :param settings: the settings of a job file, such as `nnodes=2, nproc_per_node=4, max_restarts=3`.
    :returns: one result for each rank; without a function, the result of the run.
    :raises TypeError: an argument has the wrong type, such as the name of a script instead of a function. Nothing was
        started.
    :raises JobFailedError: workers failed and no restart followed. The message contains the traceback of the rank
        that failed first; `__cause__` is its exception, if that could be pickled. It also has `rank`, `node`, `run_dir`
        and `result`. It is also raised after a successful run if the process of a rank exited with 0 before its
        function returned, or if its result cannot be unpickled here; the message names the rank.
    :raises ClusterError: the cluster cannot be reached, or did not provide the requested nodes in time.
    :raises ConfigError: a setting is wrong, or there is no such script.
    :raises InterruptedByUserError: SIGINT or SIGTERM stopped the run. It is a KeyboardInterrupt.
    """
    programs = {"script": script, "module": module, "command": command}
    checked = checked_launch("launch", function, args, kwargs, programs, settings)
    if checked.job.detach:
        raise ConfigError("`launch` waits for the end of the run", hint="use `raylaunch.start(..., detach=True)`")
    return checked.value(checked.run())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLaunch:
    """A run whose arguments were checked, and of which nothing was started."""

    job: Job
    payload: bytes = b""
    """(function, args, kwargs), pickled with cloudpickle; empty if the workers run a program."""

    def run(
        self,
        on_control: Callable[[RunControl], None] = lambda _: None,
        given: GivenGroup | None = None,
        more: Sequence[Capability] = (),
    ) -> RunOutcome:
        """Run it and print what happens. Raises as `run_job` does, which calls `on_control`, and takes `given`.

        `more`: capabilities besides those that all runs have.
        """
        console = Console()
        observer = run_observer(self.job, console)

        def conclude(result: RunResult) -> None:
            write_at_the_end(self.job, result, os.environ, console.say, run_once.version())

        try:
            text = job_file.dump(Redactor.of(self.job, os.environ).shown(self.job))
            return run_job(
                self.job,
                text,
                observer,
                payload=self.payload,
                on_control=on_control,
                conclude=conclude,
                capabilities=(*CAPABILITIES, *more),
                given=given,
            )
        finally:
            console.close()

    def value(self, outcome: RunOutcome) -> list[Any] | RunResult:
        """Return what the functions returned, by rank, or the result of a program. Raises as `launch` does.

        Each of the outcome's values is removed as it is unpickled: it may be as large as the memory.
        """
        if not outcome.result.ok:
            raise error_of(outcome) from exception_of(outcome)
        if not self.payload:
            return outcome.result
        if silent := [rank for rank, data in outcome.values.items() if not data]:
            msg = f"the function did not return on {named_ranks(silent)}: the process exited with 0 before"
            raise JobFailedError(msg, hint="`return` in place of `sys.exit(0)` or `os._exit(0)`", result=outcome.result)
        return [_returned(rank, outcome) for rank in sorted(outcome.values)]


def _returned(rank: int, outcome: RunOutcome) -> Any:
    data = outcome.values.pop(rank)
    try:
        return pickle.loads(data)  # noqa: S301
    except Exception as error:
        msg = f"what rank {rank} returned cannot be unpickled here: {type(error).__name__}: {error}"
        hint = "return objects whose classes can be imported here, and tensors on the CPU"
        raise JobFailedError(msg, hint=hint, result=outcome.result) from error


def checked_launch(
    caller: str,
    function: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    programs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> CheckedLaunch:
    """Return the run of a function or a program. `programs`: by kind; None: not given.

    Raises TypeError for arguments that are of another kind, and ConfigError for settings that are wrong.
    """
    given = {kind: program for kind, program in programs.items() if program is not None}
    if not given:
        check_call(caller, function, args, kwargs)
        assert function is not None
        return checked_function((function, tuple(args), dict(kwargs or {})), function, args, kwargs or {}, settings)
    if len(given) > 1 or function is not None:
        names = " and ".join([*(["a function"] if function is not None else []), *(f"`{kind}=`" for kind in given)])
        msg = f"`{caller}` runs one thing, not {names}"
        raise TypeError(msg)
    ((kind, program),) = given.items()
    return _checked_program(kind, program, args, kwargs, settings)


def _checked_program(
    kind: str, program: object, args: object, kwargs: object, settings: Mapping[str, Any]
) -> CheckedLaunch:
    if not isinstance(program, str | os.PathLike):
        msg = f"`{kind}` is text, not {_described(program)}"
        raise TypeError(msg)
    check_args(args)
    if kwargs is not None:
        msg = f"`kwargs` is for a function; the arguments of a {kind} are `args`"
        raise TypeError(msg)
    assert isinstance(args, Sequence)
    entrypoint = {kind: os.fspath(program), "args": [str(argument) for argument in args]}
    job = _job(settings, entrypoint)
    span = SourceSpan(source="Python")
    for finding in (*job_file.script_findings(job, span, os.environ), *job_file.command_findings(job, span)):
        hint = finding.hint if kind == "script" else "its arguments are `args=[...]`"
        raise ConfigError(finding.message, hint=hint)
    return CheckedLaunch(job=job)


def checked_function(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> CheckedLaunch:
    """Return the run of a call on every worker: a function, its arguments and its keyword arguments.

    `function`, `args` and `kwargs` are what the user has given, after which the run is named and which errors name.
    Raises TypeError if one of them cannot be pickled, or is of no use outside the processes of Ray.
    """
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", type(function).__name__)
    plain = name.replace("<", "").replace(">", "")  # as of `main.<locals>.<lambda>`: a shell takes them for its own
    job = _job({"name": plain, **settings}, {"function": f"{module}:{name}"})
    return CheckedLaunch(job=job, payload=payload.dumps(call, function, args, kwargs))


def _job(settings: Mapping[str, Any], entrypoint: Mapping[str, Any]) -> Job:
    if "entrypoint" in settings:
        kinds = ", ".join(f"`{kind}`" for kind in ENTRYPOINT_KINDS)
        msg = f"`entrypoint` is given by the arguments {kinds} and `args`"
        raise TypeError(msg)
    return load.job_of({**settings, "entrypoint": entrypoint})


def check_call(caller: str, function: object, args: object, kwargs: object = None) -> None:
    """Raise TypeError unless `function(*args, **kwargs)` could be a call."""
    if not callable(function):
        named = f"; `raylaunch {function}` in a shell runs a script" if isinstance(function, str) else ""
        if named and caller != "spawn":
            named += f", and `{caller}(script={function!r})` does so here"
        if function is None and caller != "spawn":
            named = "; or else `script=`, `module=` or `command=`"
        msg = f"`{caller}` takes a function, not {_described(function)}{named}"
        raise TypeError(msg)
    check_args(args, has_kwargs=caller != "spawn")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        msg = f"`kwargs` is a dict of the function's keyword arguments, not {_described(kwargs)}"
        raise TypeError(msg)
    assert callable(function)
    assert isinstance(args, Sequence)
    try:
        # For a decorated function, check the decorator's signature: the decorator may add arguments.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError, NameError):  # a function of C without a signature; annotations of Python 3.14
        return
    own = (0, *args) if caller == "spawn" else args
    try:
        signature.bind(*own, **(kwargs or {}))
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        rank = ", after the rank," if caller == "spawn" else ""
        msg = f"`{name}({', '.join(signature.parameters)})` cannot be called with these arguments{rank}: {error}"
        raise TypeError(msg) from None


def check_args(args: object, *, has_kwargs: bool = False) -> None:
    """Raise TypeError unless these can be arguments. `has_kwargs`: whether a dict was perhaps meant as `kwargs`."""
    if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray):
        meant = "`kwargs`" if isinstance(args, Mapping) and has_kwargs else f"`args=({_described(args)},)`"
        msg = f"`args` is a tuple or a list of arguments, not {_described(args)}: did you mean {meant}?"
        raise TypeError(msg)


def _described(value: object) -> str:
    """Return a short value as it is written, and else what kind of object it is."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return text if 0 < len(text) <= _MOST_SHOWN else f"an object of type {type(value).__qualname__}"


def error_of(outcome: RunOutcome) -> BaseException:
    """Return the exception that stands for a run that did not succeed, with the report as its message."""
    result = outcome.result
    text = report(result).removeprefix("error: ").rstrip()
    if result.exit_code in JOB_FAILURES:
        return JobFailedError(text, result=result)
    if result.exit_code == ExitCode.UNAVAILABLE:
        return ClusterError(text)
    if result.exit_code == ExitCode.RESUMABLE:
        return RunStoppedError(text, exit_code=result.exit_code)
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

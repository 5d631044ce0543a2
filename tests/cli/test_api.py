"""The names that `import raylaunch` offers, and the exceptions of its functions."""

from __future__ import annotations

import functools
import pickle
import pydoc
from importlib import metadata

import pytest

import raylaunch
from raylaunch.cli import api
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.record.result import RunResult


@pytest.mark.parametrize("name", raylaunch.__all__)
def test_every_public_name_is_found(name):
    """The package finds each in a module that it names by a string, and imports only when it is used."""
    assert getattr(raylaunch, name).__name__ == name


def test_other_names_are_refused():
    """As by any module."""
    with pytest.raises(AttributeError, match="module 'raylaunch' has no attribute 'lunch'"):
        raylaunch.lunch  # noqa: B018


def test_the_package_shows_what_it_offers():
    """To `dir`, to completion in a notebook, and to `help`, though names are imported only when they are used."""
    assert {*raylaunch.__all__, "__version__", "__doc__"} <= {*dir(raylaunch)}
    assert raylaunch.__version__ == metadata.version("raylaunch")
    text = pydoc.plain(pydoc.render_doc(raylaunch))
    for name in (*raylaunch.__all__, "nnodes=2", raylaunch.__version__):
        assert name in text


CALLS = {
    "script": (("train.py",), {}, "`launch` takes a function, not 'train.py'; `raylaunch train.py` in a shell runs"),
    "nothing": ((None,), {}, "`launch` takes a function, not None"),
    "a result": (([1, 2],), {}, "`launch` takes a function, not an object of type list"),
    "number": ((print, 3), {}, "arguments, not 3: did you mean `args=(3,)`?"),
    "text": ((print, "data"), {}, "arguments, not 'data': did you mean `args=('data',)`?"),
    "keywords": ((print, {"lr": 1}), {}, "arguments, not an object of type dict: did you mean `kwargs`?"),
    "list": (
        (print, (), [1]),
        {},
        "`kwargs` is a dict of the function's keyword arguments, not an object of type list",
    ),
    "too few": (
        ((lambda lr, steps: None), (0.1,)),
        {},
        "(lr, steps)` cannot be called with these arguments: missing a",
    ),
    "unknown": (((lambda lr: None), (1,), {"lr": 1}), {}, "multiple values for argument 'lr'"),
    "keys": ((print,), {"kwargs": {1: 2}}, "`kwargs` is a dict of the function's keyword arguments, not an object"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_before_anything_is_started(monkeypatch, name):
    """The message says what was given, and what to write."""
    monkeypatch.setattr(api, "run_job", lambda *_, **__: pytest.fail("it was started"))
    args, kwargs, message = CALLS[name]
    with pytest.raises(TypeError) as found:
        raylaunch.launch(*args, **kwargs)
    assert message in str(found.value)


OK = RunResult(exit_code=0, why="all finished", seconds=1.0, restarts=0, attempts=(), cause=None)


def test_ranks_that_returned_nothing_are_named():
    """The list has one entry for each rank, or there is none."""
    checked = api.CheckedLaunch(job=raylaunch.Job(), payload=b"a function")
    five = bytearray(pickle.dumps(5))
    assert checked.value(RunOutcome(result=OK, values={1: five, 0: bytearray(pickle.dumps(None))})) == [None, 5]
    with pytest.raises(
        raylaunch.JobFailedError, match="did not return on ranks 0, 2-3: the process exited with 0"
    ) as found:
        checked.value(RunOutcome(result=OK, values={0: bytearray(), 1: five, 2: bytearray(), 3: bytearray()}))
    assert found.value.result is OK


def test_a_result_that_cannot_be_unpickled_here_names_its_rank():
    """As that of a class that only the nodes have, or a tensor on a GPU. The reason is its cause."""
    checked = api.CheckedLaunch(job=raylaunch.Job(), payload=b"a function")
    with pytest.raises(raylaunch.JobFailedError) as found:
        checked.value(RunOutcome(result=OK, values={0: bytearray(b"cnowhere\nThing\n.")}))
    assert str(found.value) == (
        "what rank 0 returned cannot be unpickled here: ModuleNotFoundError: No module named 'nowhere'\n"
        "hint: return objects whose classes can be imported here, and tensors on the CPU"
    )
    assert isinstance(found.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("args", [("train.py",), (print, 3), (print, "data"), (print, {"lr": 1}), ((lambda: None),)])
def test_spawn_refuses_the_same(monkeypatch, args):
    """Also before anything is started. Its functions take the rank, too."""
    monkeypatch.setattr(api, "run_job", lambda *_, **__: pytest.fail("it was started"))
    wanted = r"`spawn` takes a function, not|`args` is a tuple or a list|cannot be called with .* after the rank,"
    with pytest.raises(TypeError, match=wanted):
        raylaunch.spawn(*args)


def test_a_call_is_judged_by_the_function_that_is_called():
    """A decorator may add arguments, as that of Hydra does, and functions of C may not say what they take."""

    def trains(function):
        return functools.wraps(function)(lambda: function("config"))

    api.check_call("launch", trains(lambda config: None), ())
    api.check_call("launch", functools.partial(lambda lr, steps: None, 0.1), (), {"steps": 2})
    api.check_call("launch", dict, ([(1, 2)],))
    api.check_call("spawn", lambda rank, lr: None, (0.1,))


def test_the_run_of_a_local_function_has_a_name_that_shells_take_as_it_is():
    title = api.checked_launch("launch", lambda: None, (), None, {}, {}).job.title
    assert title.endswith(".locals.lambda")
    assert not set(title) & set("<>")


@pytest.mark.parametrize("name", [name for name in raylaunch.__all__ if name.endswith("Error")])
def test_exceptions_show_the_name_by_which_programs_catch_them(name):
    """In tracebacks, as `raylaunch.JobFailedError: ...`. They can be pickled by it."""
    kind = getattr(raylaunch, name)
    assert f"{kind.__module__}.{kind.__qualname__}" == f"raylaunch.{name}"
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_run_whose_time_is_over():
    """A program goes on after it, and sees that it can be resumed."""
    cut = RunResult(exit_code=75, why="its time is over", seconds=1.0, restarts=0, attempts=(), cause=None)
    error = api.error_of(RunOutcome(result=cut))
    assert isinstance(error, raylaunch.RunStoppedError)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (str(one), one.exit_code) == ("its time is over", 75)


def test_ctrl_c_is_a_keyboard_interrupt():
    """A program's `except Exception` does not swallow it and go on with the next run."""
    cut = RunResult(exit_code=143, why="stopped by SIGTERM", seconds=1.0, restarts=0, attempts=(), cause=None)
    error = api.error_of(RunOutcome(result=cut))
    assert isinstance(error, KeyboardInterrupt)
    assert not isinstance(error, Exception)
    assert (str(error), error.exit_code) == ("stopped by SIGTERM", 143)

"""A function and its arguments as bytes: its source goes with it, and what workers cannot use is refused by name."""

from __future__ import annotations

import linecache
import pickle
import sys
import threading
import traceback
from types import SimpleNamespace

import pytest

from raylaunch.cli import payload

SOURCE = "def fail(config):\n    return config['lr']\n"


def in_file(name: str) -> object:
    """Return a function of the main program, which was in a file of this name."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(SOURCE, name, "exec"), names)
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), name)
    return names["fail"]


def sent(function, *args):
    """Return the function as a worker has it: in another process, where the file does not exist."""
    data = payload.dumps((function, args, {}), function, args, {})
    linecache.clearcache()
    return pickle.loads(data)[0]


def traceback_of(function) -> str:
    with pytest.raises(KeyError) as found:
        function({})
    return "".join(traceback.format_exception(found.value))


def test_a_traceback_in_a_worker_names_the_callers_file_and_shows_its_source():
    """Whatever cloudpickle makes of the name of the file, and though the worker's host does not have it."""
    text = traceback_of(sent(in_file("/no/such/train.py")))
    assert "File \"/no/such/train.py\", line 2, in fail\n    return config['lr']\n" in text


def test_a_traceback_names_the_cell_of_a_notebook(monkeypatch):
    """As IPython does. The file of a cell has a name that nobody knows, and may have none where it is run."""
    compiler = SimpleNamespace(format_code_name=lambda name: ("Cell", "In[3]") if "ipykernel" in name else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    text = traceback_of(sent(in_file("/tmp/ipykernel_12/345.py")))
    assert "File \"Cell In[3]\", line 2, in fail\n    return config['lr']\n" in text
    assert 'File "/no/such/train.py"' in traceback_of(sent(in_file("/no/such/train.py")))


class Ref:
    """In the place of an ObjectRef."""


class Handle:
    """In the place of an actor handle."""


class Actor(Handle):
    """Handles of this Ray are of a subclass."""


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        (
            (1, [Ref()]),
            {},
            "`args[1]`, an object of type list, cannot be sent to the workers: it is or has an ObjectRef",
        ),
        (
            (),
            {"h": Actor()},
            "`kwargs['h']`, an object of type Actor, cannot be sent to the workers: it is or has an actor",
        ),
        ((threading.Lock(),), {}, "`args[0]`, an object of type lock, cannot be sent to the workers: cannot pickle"),
    ],
)
def test_an_argument_that_workers_cannot_use_is_named(monkeypatch, args, kwargs, why):
    """It would fail minutes later, when workers unpickle it, with errors that do not say which one it is."""
    ray = SimpleNamespace(ObjectRef=Ref, actor=SimpleNamespace(ActorHandle=Handle))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(TypeError) as found:
        payload.dumps((print, args, kwargs), print, args, kwargs)
    assert str(found.value).startswith(why)


def test_a_function_that_refers_to_what_workers_cannot_use_is_named():
    """In its closure, or among its globals."""
    lock = threading.Lock()

    def train():
        return lock

    train.__module__ = "__main__"
    with pytest.raises(TypeError, match=r"^the function `.*train` cannot be sent to the workers: cannot pickle"):
        payload.dumps((train, (), {}), train, (), {})

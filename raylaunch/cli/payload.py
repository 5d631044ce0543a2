"""A function and its arguments as bytes, which name source files, and in which nothing is that workers cannot use."""

from __future__ import annotations

import io
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import cloudpickle

from raylaunch.worker.runtime import entry

_NO_RAY_PROCESS = (
    "it is or has {what} of Ray, and workers are no processes of Ray. Pass `ray.cloudpickle.dumps(...)` of it; in the "
    "function, call `ray.init()` and then `pickle.loads(...)`. A named actor needs only `ray.init()` and "
    "`ray.get_actor(name)`"
)


def dumps(call: tuple[Any, ...], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the call of a function with these arguments. Raises TypeError, which names what cannot be pickled."""
    try:
        return _dumps(call)
    except Exception as error:
        whole = Exception.__str__(error)
        for name, value in _parts(function, args, kwargs):
            try:
                _dumps(value)
            except Exception as found:
                msg = f"{name} cannot be sent to the workers: {found}"
                raise TypeError(msg) from found
        msg = f"the call cannot be sent to the workers: {whole}"
        raise TypeError(msg) from error


def _parts(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    for index, value in enumerate(args):
        yield f"`args[{index}]`, an object of type {type(value).__qualname__},", value
    for key, value in kwargs.items():
        yield f"`kwargs[{key!r}]`, an object of type {type(value).__qualname__},", value
    yield f"the function `{getattr(function, '__qualname__', type(function).__qualname__)}`", function


def _dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        _CallPickler(file).dump(value)
        return file.getvalue()


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        #: Names and sources by the name that code has here. Each is pickled once, since it is one object.
        self._sources: dict[str, tuple[str, str]] = {}
        self._ray_kinds = _ray_kinds()

    def reducer_override(self, obj: Any) -> Any:
        """Pickle code with its source, and refuse what needs a process of Ray. It is called before all else."""
        if type(obj) is CodeType:
            make, parts = self.dispatch_table[CodeType](obj)
            return entry.restored_code, (make, parts, *self._source(obj.co_filename))
        for kind, what in self._ray_kinds.items():
            if issubclass(type(obj), kind):
                raise TypeError(_NO_RAY_PROCESS.format(what=what))
        return super().reducer_override(obj)

    def _source(self, filename: str) -> tuple[str, str]:
        if filename not in self._sources:
            self._sources[filename] = _cell(filename) or filename, "".join(linecache.getlines(filename))
        return self._sources[filename]


def _ray_kinds() -> dict[type, str]:
    """Return the classes whose objects only processes of Ray can use. Without Ray there are none."""
    ray: Any = sys.modules.get("ray")
    if ray is None:
        return {}
    return {ray.ObjectRef: "an ObjectRef", ray.actor.ActorHandle: "an actor handle"}


def _cell(filename: str) -> str:
    """Return how Jupyter and IPython name the cell that has this code, such as `Cell In[3]`; `""`: it is in no cell."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    return " ".join(name_of(filename) or ()) if name_of is not None else ""

"""Importing ahead of the script what it imported before, such that the script cannot tell."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

from raylaunch.node.clean import State
from raylaunch.node.lesson import Lesson, Part

_REST = 2.0
"""How long to pause for each second of work, so that the workers keep the CPUs."""


class UnfitError(Exception):
    """A module cannot be imported ahead: this process has got something by it that it must not have."""

    def __init__(self, name: str, why: str) -> None:
        """`why` follows the name: `starts a process`. Empty: it cannot be imported at all, which is no news."""
        super().__init__(name, why)
        self.name = name
        self.why = why


def rehearse(lesson: Lesson, begins: Callable[[str], None], *, in_a_hurry: bool) -> float:
    """Import all of it; the seconds of work. Raises UnfitError at the first module that leaves a trace."""
    state, began = State.take(), time.process_time()
    watcher = _Watcher(lesson, rest=0.0 if in_a_hurry else _REST)
    with watcher.watching():
        for part in lesson.parts:
            if part.name in sys.modules:
                continue
            begins(part.name)
            with _environment(part, lesson.apart):
                failed = _import(part.name)
            why = watcher.why or state.spoiled() or _misplaced(lesson.places)
            if why or (failed and _left_behind(part.name)):
                raise UnfitError(part.name, why)
            watcher.rest()
    return time.process_time() - began


def _import(name: str) -> bool:
    """Whether that failed."""
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001
        return True
    return False


def _left_behind(name: str) -> bool:
    """Whether parts of a module are there that itself is not: to import it again would not be as for the first time."""
    return any(other.startswith(name + ".") for other in sys.modules)


def _misplaced(places: Mapping[str, tuple[str, ...]]) -> str:
    """Whether something was found elsewhere than the script finds it."""
    for name, where in places.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None:
            continue
        found = (spec.origin,) if spec.origin else tuple(spec.submodule_search_locations or ())
        if found != where:
            return f"imports another `{name}` than the script"
    return ""


@contextlib.contextmanager
def _environment(part: Part, apart: frozenset[str]) -> Iterator[None]:
    """The script's environment, for the time of an import. What the import itself sets stays."""
    before = dict(os.environ)
    for name, value in part.env.items():
        if name not in apart:
            _set(name, value)
    given = dict(os.environ)
    try:
        yield
    finally:
        now = dict(os.environ)
        for name in given.keys() | now.keys():
            if given.get(name) == now.get(name):
                _set(name, before.get(name))


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value


class _Watcher:
    """Sees what imports look for and what they read. A finder of `sys.meta_path` that never finds anything."""

    def __init__(self, lesson: Lesson, rest: float) -> None:
        self.why = ""
        self._own = lesson.own
        self._apart = lesson.apart
        self._rest = rest
        self._rested = time.process_time()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Until the end of the block."""
        environ = type(os.environ)
        original = environ.__getitem__

        def getitem(self_: os._Environ[str], name: str) -> str:
            if name in self._apart and not self.why:
                self.why = f"reads {name}, of which each worker has its own"
            return original(self_, name)

        environ.__getitem__ = getitem  # type: ignore[method-assign]
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            environ.__getitem__ = original  # type: ignore[method-assign]

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """A module is looked for."""
        if fullname in self._own and not self.why:
            self.why = f"imports `{fullname}`, which is the script's own"
        self.rest()

    def rest(self) -> None:
        """Pause for what was done since the last time."""
        if self._rest:
            time.sleep((time.process_time() - self._rested) * self._rest)
            self._rested = time.process_time()

"""Everything of CPython that its documentation does not promise. No other module uses any of it.

Each is looked for where it is, and never by Python's version. Each function says what it is for, which shapes there are
(in CPython 3.10 to 3.13), and what happens without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

RUNPY_FILE = runpy.run_module.__code__.co_filename
"""The file of runpy's frames: `<frozen runpy>`, and in Python 3.10 a path."""

_MAX_FRAMES = 2
"""How many frames above a finder `importlib._bootstrap._find_and_load_unlocked` may be, where a module is imported."""

IS_SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))
"""Whether Python keeps the script's folder off sys.path (`-P`, from Python 3.11 on)."""


def safe_module(name: str) -> tuple[str, ...]:
    """Return arguments for an interpreter that runs a module and keeps its working folder off sys.path.

    The option `-P` is public, and missing in Python 3.10: there the program does it itself.
    """
    if hasattr(sys.flags, "safe_path"):
        return "-P", "-m", name
    code = f"import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_module({name!r}, run_name='__main__')"
    return "-c", code


def is_importing(depth: int) -> bool:
    """Return whether a finder of `sys.meta_path` is asked because a module is imported.

    `depth`: 2 if the finder's `find_spec` calls this function itself. Otherwise somebody only asks where the module is
    (`importlib.util.find_spec`). Frames are CPython's, and the name of importlib's function has been the same since
    3.4. Without it no import is recorded, so none is made ahead.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False


def frame_of(thread: int | None) -> FrameType | None:
    """Return where a thread is right now, by its `ident`. For messages, which say less without it."""
    frames: Mapping[int, FrameType] = getattr(sys, "_current_frames", dict)()
    return frames.get(thread or 0)


def encoded_environment() -> Mapping[bytes, bytes]:
    """Return the environment as the bytes that `os.environ` keeps: comparing them often costs no decoding.

    The attribute `_data` has been there since 3.2. Raises AttributeError without it, as where a script has replaced
    `os.environ`: then no more imports are recorded, so none is made ahead.
    """
    found: Mapping[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001
    return found


def random_memory() -> tuple[bytes, float | None] | None:
    """Return what the generator of `random` is made of, to see whether its state has changed; None: that is not known.

    It is an object of a class that is written in C, `_random.Random`. Its identity is its address, and what it has of
    its own follows on `object.__basicsize__` bytes; `gauss_next` is a second number of the normal distribution that
    waits to be drawn. Without them, commits take a little longer.
    """
    generator = getattr(random.getstate, "__self__", None)
    kind = random.Random.__base__
    if sys.implementation.name != "cpython" or kind is None or not isinstance(generator, kind):
        return None
    head = object.__basicsize__
    memory = ctypes.string_at(id(generator) + head, kind.__basicsize__ - head)
    return memory, getattr(generator, "gauss_next", None)


@contextlib.contextmanager
def environment_reads(on_read: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the name of each variable that is looked up in `os.environ` in this block.

    All look-ups go through `__getitem__` of its class, which is replaced; `os.environ` itself cannot be, since others
    hold it. A look-up that goes another way is not noticed.
    """
    environ = type(os.environ)
    original = environ.__getitem__

    def getitem(self: os._Environ[str], name: str) -> str:
        on_read(name)
        return original(self, name)

    environ.__getitem__ = getitem  # type: ignore[method-assign]
    try:
        yield
    finally:
        environ.__getitem__ = original  # type: ignore[method-assign]


class NoModuleToRunError(Exception):
    """There is no such module, or it is a package without `__main__`."""


def run_as_main(name: str, *, alter_argv: bool) -> None:
    """Run a module as `python -m` does (`alter_argv`), or the `__main__` of a folder or zip file that is on sys.path.

    The interpreter itself calls this function of runpy, in all versions. The public `runpy.run_module` restores the old
    `__main__` afterwards, which breaks pickling and exit handlers. Raises NoModuleToRunError.
    """
    try:
        runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001
    except SystemExit as stop:
        if isinstance(stop.__context__, runpy._Error):  # type: ignore[attr-defined]  # noqa: SLF001
            raise NoModuleToRunError(str(stop.__context__)) from None
        raise


def interpreter_options() -> tuple[str, ...]:
    """Return the options that this interpreter was started with, for another one that is to be like it.

    The function has been in subprocess since 3.2, and multiprocessing uses it. Without it there are none.
    """
    return tuple(getattr(subprocess, "_args_from_interpreter_flags", list)())

"""Code of functions that were pickled by value: where it is from, for tracebacks and stacks.

The process of the caller, which pickles the code, has the source: in a file that may not exist where workers run, or in
a cell of a notebook. cloudpickle sends no source and, from 3.1.3 on, calls every file `<dynamic-code>`.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any


def restored(make: Callable[..., CodeType], parts: tuple[Any, ...], filename: str, source: str) -> CodeType:
    """Return the code that `make(*parts)` makes, as code of this file, and let tracebacks show the source."""
    if source and filename not in linecache.cache:
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)  # None: is not looked for in a file
    return make(*parts).replace(co_filename=filename)

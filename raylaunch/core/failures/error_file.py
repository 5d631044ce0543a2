"""Read and write the error files of workers, as `@record` of `torch.distributed.elastic` writes them.

Two forms are in use. `@record`'s own (torch 2.13, `elastic/multiprocessing/errors`)::

    {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1767225600"}}}

and a flat one, which other programs write and torchrun accepts: `{"message": "some text", "timestamp": 1767225600}`.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from typing import Any

from raylaunch.core.failures.failure import MOST_MESSAGE, MOST_TYPE, UNKNOWN_TYPE, WorkerError, capped_traceback
from raylaunch.core.text import capped

_NAMED = re.compile(rf"([A-Za-z_][\w.]{{0,{MOST_TYPE - 1}}}): (.*)", re.DOTALL)
_MOST_WRITTEN = 16_000
"""Characters of an error file that are kept as they were written."""


class MalformedError(ValueError):
    """An error file cannot be read. The message says what is wrong with it."""


def parse(text: str) -> WorkerError:
    """Return the error that the text of an error file tells of. Raise MalformedError if it tells of none."""
    data, written = _object(text)
    message = data.get("message")
    if isinstance(message, str):
        error = _error(message, traceback="", timestamp=data.get("timestamp"))
    elif isinstance(message, dict) and isinstance(message.get("message"), str):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        trace = extra.get("py_callstack")
        error = _error(
            message["message"], traceback=trace if isinstance(trace, str) else "", timestamp=extra.get("timestamp")
        )
    else:
        msg = "it has no `message` that is a text, or an object with one"
        raise MalformedError(msg)
    is_kept = _data(error) != data and len(written) <= _MOST_WRITTEN
    return replace(error, written=written) if is_kept else error


def _object(text: str) -> tuple[dict[str, Any], str]:
    """Return the object, and its text as `json.dumps` writes it. Raise MalformedError if there is none."""
    if not text.strip():
        msg = "it is empty"
        raise MalformedError(msg)
    try:
        data = json.loads(text)
        written = json.dumps(data)
    except (ValueError, RecursionError) as error:
        msg = f"it is not JSON: {error}"
        raise MalformedError(msg) from None
    if not isinstance(data, dict):
        msg = "it is not a JSON object"
        raise MalformedError(msg)
    return data, written


def _error(message: str, *, traceback: str, timestamp: object) -> WorkerError:
    named = _NAMED.fullmatch(message)
    return WorkerError(
        type=named[1] if named else UNKNOWN_TYPE,
        message=capped(named[2] if named else message, MOST_MESSAGE),
        traceback=capped_traceback(traceback),
        from_file=True,
        timestamp=_seconds(timestamp),
    )


def _seconds(timestamp: object) -> int:
    """Return the whole seconds of 10, 10.5 or "10"; 0 if it is not a number."""
    try:
        return int(float(str(timestamp)))
    except (ValueError, OverflowError):
        return 0


def compose(error: WorkerError, *, exit_code: int = 0) -> str:
    """Return the text of an error file: as the worker wrote it, else in the form of `@record`.

    An exit code other than 0 is written to `message.errorCode`, as torchrun does. The flat form has no such field.
    """
    data = _data(error)
    # Nothing may have been written, and redaction of secrets may have left no JSON or another object.
    with contextlib.suppress(MalformedError):
        written, _ = _object(error.written)
        data = written if "message" in written else data
    if exit_code and isinstance(data["message"], dict):
        data["message"]["errorCode"] = exit_code
    return json.dumps(data)


def _data(error: WorkerError) -> dict[str, Any]:
    extra = {"py_callstack": error.traceback, "timestamp": str(error.timestamp)}
    return {"message": {"message": error.text, "extraInfo": extra}}

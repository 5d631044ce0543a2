"""The error files of workers: what `torch.distributed.elastic`'s `@record` writes, read and written.

Two forms are in use. `@record`'s own (torch 2.13, `elastic/multiprocessing/errors`)::

    {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1767225600"}}}

and a flat one, which other writers leave and torchrun accepts: `{"message": "some text", "timestamp": 1767225600}`.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from typing import Any

from raylaunch.core.failure import UNKNOWN_TYPE, WorkerError

_NAMED = re.compile(r"([A-Za-z_][\w.]*): (.*)", re.DOTALL)


class MalformedError(ValueError):
    """The text says what is wrong with an error file."""


def parse(text: str) -> WorkerError:
    """What a worker left. Raises MalformedError."""
    data = _object(text)
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
    return error if _data(error) == data else replace(error, written=json.dumps(data))


def _object(text: str) -> dict[str, Any]:
    if not text.strip():
        msg = "it is empty"
        raise MalformedError(msg)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"it is not JSON: {error}"
        raise MalformedError(msg) from None
    if not isinstance(data, dict):
        msg = "it is not a JSON object"
        raise MalformedError(msg)
    return data


def _error(message: str, *, traceback: str, timestamp: object) -> WorkerError:
    named = _NAMED.fullmatch(message)
    return WorkerError(
        type=named[1] if named else UNKNOWN_TYPE,
        message=named[2] if named else message,
        traceback=traceback,
        from_file=True,
        timestamp=_seconds(timestamp),
    )


def _seconds(timestamp: object) -> int:
    """Of 10, 10.5 or "10"; 0 where it is no time."""
    try:
        return int(float(str(timestamp)))
    except (ValueError, OverflowError):
        return 0


def compose(error: WorkerError, *, exit_code: int = 0) -> str:
    """The error as a file: as the worker wrote it, else in `@record`'s own form.

    An exit code other than 0 goes into `message.errorCode`, where a launcher tells it; the flat form has no place for
    it.
    """
    data = _data(error)
    with contextlib.suppress(MalformedError):  # there is none, or it is none any more without what was secret in it
        data = _object(error.written)
    if exit_code and isinstance(data["message"], dict):
        data["message"]["errorCode"] = exit_code
    return json.dumps(data)


def _data(error: WorkerError) -> dict[str, Any]:
    extra = {"py_callstack": error.traceback, "timestamp": str(error.timestamp)}
    return {"message": {"message": error.text, "extraInfo": extra}}

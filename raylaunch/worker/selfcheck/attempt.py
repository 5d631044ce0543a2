"""One check on one rank: bounded in time, and whatever comes of it becomes an outcome."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from raylaunch.core.checkup import Outcome, Status

_LONGEST = 300

_TIMEOUT = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)

_UNSUPPORTED = (
    re.compile(r"^Backend \S+ does not (yet )?(support|implement) "),  # torch's base class of all backends
    re.compile(r"^Could not run 'c10d::"),  # no kernel of this operation for the device
    re.compile(r"^No backend type associated with device type "),
    re.compile(r"^ProcessGroup\w+ does not support "),
)
"""How torch says that a backend lacks an operation: always before anything is sent."""


class WrongError(Exception):
    """A value is not what it must be."""


class SkippedError(Exception):
    """The check makes no sense here; the text says why."""


def attempt(check: Callable[[], str], *, timeout: float, limit: float) -> Outcome:
    """Run it in a thread, and leave it there if it does not come back within `limit`."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(_outcome(check, timeout)), daemon=True)
    thread.start()
    thread.join(limit)
    if outcomes:
        return outcomes[0]
    place = _place(sys._current_frames().get(thread.ident or 0))  # noqa: SLF001
    text = f"has not come back after {limit:.0f} s{place}"
    return Outcome(status=Status.WRONG, text=text, seconds=limit, late=True, stuck=True)


def _outcome(check: Callable[[], str], timeout: float) -> Outcome:
    start = time.monotonic()
    try:
        return Outcome(status=Status.OK, text=check(), seconds=time.monotonic() - start)
    except SkippedError as skipped:
        return Outcome(status=Status.SKIPPED, text=str(skipped))
    except WrongError as wrong:
        return Outcome(status=Status.WRONG, text=str(wrong), seconds=time.monotonic() - start)
    except BaseException as error:  # noqa: BLE001
        seconds = time.monotonic() - start
        text = _text(error)
        if is_unsupported(error):
            return Outcome(status=Status.UNSUPPORTED, text=text)
        late = seconds >= timeout or _TIMEOUT.search(text) is not None
        return Outcome(status=Status.WRONG, text=f"{type(error).__name__}: {text}", seconds=seconds, late=late)


def is_unsupported(error: BaseException) -> bool:
    """Whether the backend says that it lacks the operation. Any other error is a failure."""
    return isinstance(error, RuntimeError) and any(words.search(str(error)) for words in _UNSUPPORTED)


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _place(frame: FrameType | None) -> str:
    """The innermost Python function that it is in."""
    return f", in `{frame.f_code.co_name}` ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""

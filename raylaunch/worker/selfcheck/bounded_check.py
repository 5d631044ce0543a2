"""Runs one check on one rank with a time limit, and turns whatever happens into an outcome."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import FrameType

from raylaunch.worker import cpython_internals
from raylaunch.worker.selfcheck.findings import CheckOutcome, CheckStatus

_MAX_TEXT = 300
"""Characters of an error's text that a row shows."""
_TIMEOUT = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)
_UNSUPPORTED = (
    re.compile(r"^Backend \S+ does not (yet )?(support|implement) "),  # torch/csrc/distributed/c10d/Backend.hpp
    re.compile(r"^Could not run 'c10d::"),  # the dispatcher: no kernel of this operation for the device
    re.compile(r"^No backend type associated with device type "),
    re.compile(r"^ProcessGroup\w+ does not support "),
)
"""How torch says that a backend lacks an operation. It says so before anything is sent."""


class WrongResultError(Exception):
    """An operation returned another value than expected."""


class CheckSkippedError(Exception):
    """The check does not apply here; the text says why."""


def run_bounded(check: Callable[[], str], *, timeout: float, limit: float) -> CheckOutcome:
    """Run a check in a thread, and abandon the thread if it does not return within `limit` seconds.

    An error that comes after `timeout` seconds counts as late.
    """
    outcomes: list[CheckOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(_outcome(check, timeout)), daemon=True)
    thread.start()
    thread.join(limit)
    if outcomes:
        return outcomes[0]
    place = _place(cpython_internals.frame_of(thread.ident))
    text = f"has not come back after {limit:.0f} s{place}"
    return CheckOutcome(status=CheckStatus.WRONG, text=text, seconds=limit, late=True, stuck=True)


def _outcome(check: Callable[[], str], timeout: float) -> CheckOutcome:
    start = time.monotonic()
    try:
        return CheckOutcome(status=CheckStatus.OK, text=check(), seconds=time.monotonic() - start)
    except CheckSkippedError as skipped:
        return CheckOutcome(status=CheckStatus.SKIPPED, text=str(skipped))
    except WrongResultError as wrong:
        return CheckOutcome(status=CheckStatus.WRONG, text=str(wrong), seconds=time.monotonic() - start)
    except BaseException as error:  # noqa: BLE001
        seconds = time.monotonic() - start
        text = _first_line(error)
        if is_unsupported(error):
            return CheckOutcome(status=CheckStatus.UNSUPPORTED, text=text)
        late = seconds >= timeout or _TIMEOUT.search(text) is not None
        return CheckOutcome(
            status=CheckStatus.WRONG, text=f"{type(error).__name__}: {text}", seconds=seconds, late=late
        )


def is_unsupported(error: BaseException) -> bool:
    """Return whether the error says that the backend lacks the operation. Any other error is a failure."""
    return isinstance(error, RuntimeError) and any(words.search(str(error)) for words in _UNSUPPORTED)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _place(frame: FrameType | None) -> str:
    """Return the innermost Python function of a frame, as the end of a sentence."""
    return f", in `{frame.f_code.co_name}` ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""

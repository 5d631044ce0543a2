"""Lets code in the driver's own process query and control a run, as commands do over the control connection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from raylaunch.cluster.control.control_client import ControlError, DriverClient, RefusedError
from raylaunch.cluster.control.control_messages import ControlAnswer, ControlRequest, Refused, RunChange
from raylaunch.cluster.control.run_control import RunControl


class RunPort(DriverClient):
    """Asks one run. Any thread may use it: the calling thread computes the answers, and no secret is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: RunControl | None = None
        #: What was requested before the run could take it.
        self._early: list[RunChange] = []

    @contextlib.contextmanager
    def opened(self, control: RunControl) -> Iterator[None]:
        """Ask this run from now on, until the end of the block."""
        with self._lock:
            self._control = control
            for change in self._early:
                control.change(change)
        try:
            yield
        finally:
            with self._lock:
                self._control = None

    @property
    def is_open(self) -> bool:
        """Whether there is a run to ask now: it has begun, and its workers have not ended."""
        control = self._control
        return control is not None and not control.is_over

    def change(self, change: RunChange) -> None:
        """Change the run as soon as possible, without waiting. Leave a run that has ended as it is."""
        with self._lock:
            if self._control is None:
                self._early.append(change)
            else:
                self._control.change(change)

    def ask(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        """Yield the answers. Raises ControlError unless it is open, and RefusedError."""
        control = self._control
        if control is None or control.is_over:
            msg = "the run has not begun, or has ended"
            raise ControlError(msg)
        try:
            for answer in control.answers(request):
                if isinstance(answer, Refused):
                    raise RefusedError(answer)
                yield answer
        except (OSError, RuntimeError) as error:  # its agents are gone
            raise ControlError(str(error)) from None

    def close(self) -> None:
        """Do nothing: the port is open as long as its run lasts."""

"""Reads a run by asking its driver, for commands on machines that have no access to its run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.control.control_client import ControlClient, ControlError
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlRequest,
    GetState,
    ListLogs,
    LogsListed,
    LogsRead,
    ReadLogs,
    RefusedError,
    RunChange,
    RunState,
)
from raylaunch.cluster.driver.run_registry import RegisteredRun
from raylaunch.cluster.succession.agent_session import SUCCESSION_SECONDS
from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.machine.state import Phase
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan
from raylaunch.node.protocol.acceptor import SecretAddress

RETRY_SECONDS = 5.0
"""When a driver that could not be asked, and may not be gone, is asked again."""
_UNKNOWN_SECONDS = 30.0
"""How long a command that needs a detached run waits for a cluster that does not know the run, or does not answer."""
_TAKEOVER_SECONDS = SUCCESSION_SECONDS
"""How long it waits for another driver, if the cluster knows the run."""
_FIND_SECONDS = 0.3
GOING_ON = (Phase.GATHERING, Phase.STARTING, Phase.RUNNING)
"""The phases of a run of which nobody has requested a change, or in which that has been made."""


class DriverClient(Protocol):
    """Asks the driver of a run."""

    def ask(self, request: ControlRequest) -> Any:
        """Return the answer. Raises ControlError and RefusedError."""

    def close(self) -> None:
        """End the connection, if there is one."""


class LiveReader(RunReader):
    """Asks the driver. When it cannot be asked any more, the run folder is read, if it can be seen from here."""

    def __init__(self, connect: Callable[[], DriverClient], folder: str, *, is_stale: bool = False) -> None:
        """`connect` returns what asks the driver, or raises ControlError.

        `is_stale`: a driver that does not answer is gone.
        """
        super().__init__(folder)
        self._is_stale = is_stale
        self._connect = connect
        self._state: RunState | None = None
        self._client: DriverClient | None = None
        #: Why the driver cannot be asked now; "": it can, or was not asked yet.
        self._lost = ""
        self._retry_at = 0.0
        #: Whether `wait` has asked, and nobody has looked since.
        self._is_fresh = False
        self._no_files, self.problem = self.problem, ""
        #: Whether the driver was lost when logs were asked for the last time: there may be more of them.
        self.has_missed_logs = False
        #: How often another driver has answered in the place of the last one.
        self.takeovers = 0
        #: For logs that the driver cannot pass on any more.
        self._files: RunReader | None = None

    @classmethod
    def at(cls, address: SecretAddress, folder: str, *, is_stale: bool = False) -> LiveReader:
        """Return a reader that asks the driver at this address."""
        return cls(lambda: ControlClient(address), folder, is_stale=is_stale)

    def refresh(self) -> None:
        """Ask for the state of the run, unless `wait` has just done so."""
        if not self._is_fresh:
            self.wait(0.0)
        self._is_fresh = False

    def wait(self, seconds: float) -> None:
        """Wait until the run has ended, or for these seconds at most, and then ask for its state."""
        self._is_fresh = True
        if self._state is not None and self._state.ended:
            return
        if self._lost and not self.is_gone and time.monotonic() >= self._retry_at:
            self._lost = self.problem = ""
        if self._lost:
            time.sleep(seconds)
        else:
            try:
                self._state = self.client.ask(GetState(wait=seconds))
            except (ControlError, RefusedError) as error:
                self._lost = str(error)
                self._retry_at = time.monotonic() + RETRY_SECONDS
                self.is_gone = isinstance(error, ControlError) and (error.is_gone or self._is_stale)
                self.close()
        if self._lost:
            self.problem = self._no_files
            super().refresh()
            if super().status() is None:
                self.problem = f"its driver cannot be asked: {self._lost}"

    @property
    def is_asked(self) -> bool:
        """Whether the driver has answered, the last time it was asked."""
        return self._state is not None and not self._lost

    @property
    def client(self) -> DriverClient:
        """What asks the driver. Raises ControlError."""
        if self._client is None:
            self._client = self._connect()
        return self._client

    def ask(self, request: ControlRequest) -> Any:
        """Return what the driver answers. Raises ControlError and RefusedError."""
        return self.client.ask(request)

    def status(self) -> RunStatus | None:
        """Return the status as it was told last; None if nothing was."""
        known = None if self.is_asked else super().status()
        return self._state.status if known is None and self._state is not None else known

    def result(self) -> dict[str, Any]:
        """Return exit code and reason; empty if the run has not ended."""
        if self._state is not None and self._state.ended:
            return {"exit_code": self._state.exit_code, "why": self._state.why}
        return super().result()

    def log_spans(self, query: LogQuery, node: str = "") -> LogsListed:
        """Ask all nodes; without the driver, read the run folder."""
        self.has_missed_logs = False
        if self.is_asked:
            with contextlib.suppress(ControlError, RefusedError):
                answer: LogsListed = self.client.ask(ListLogs(query=query, node=node))
                if answer.spans or not answer.missing or self._of_folder() is None:
                    return answer  # else the agents have just ended
        files = self._of_folder()
        self.has_missed_logs = files is None
        return files.log_spans(query, node) if files is not None else LogsListed(spans=())

    def log_blocks(self, attempt: int, spans: Sequence[LogSpan], *, times: bool = False) -> Iterator[LogBlock]:
        """Ask the nodes that have them; without the driver, read the run folder."""
        is_read = False
        if self.is_asked:
            try:
                left = tuple(spans)
                while left:
                    answer: LogsRead = self.client.ask(ReadLogs(attempt=attempt, spans=left, times=times))
                    is_read, left = is_read or bool(answer.blocks), answer.rest
                    yield from answer.blocks
            except (ControlError, RefusedError) as error:
                self.has_missed_logs = isinstance(error, ControlError)
        files = self._of_folder() if not is_read else None
        if files is not None:
            self.has_missed_logs = False
            yield from files.log_blocks(attempt, spans, times=times)

    def _of_folder(self) -> RunReader | None:
        """Return what reads the run folder; None: it cannot be seen from here."""
        if self._files is None and not self._no_files:
            found = RunReader(str(self.folder))
            found.refresh()
            found.close()
            self._files = found if found.header is not None else None
        return self._files

    @property
    def log_layout(self) -> str:
        """The name of the layout of its log files."""
        return self._state.log_layout if self._state is not None else super().log_layout

    @property
    def has_logs(self) -> bool:
        """Whether there may be log files."""
        return super().has_logs or (self._state is not None and self._state.keeps_logs)

    def close(self) -> None:
        """Close the connection; what was told stays known."""
        super().close()
        if self._client is not None:
            self._client.close()
            self._client = None


class DetachedReader(LiveReader):
    """Reads a detached run, of which another driver may take over: then that one is asked."""

    def __init__(self, address: SecretAddress, folder: str, find: Callable[[], RegisteredRun | None]) -> None:
        """`find` returns what the cluster knows of the run; None: it does not know the run any more."""
        super().__init__(lambda: ControlClient(self._address), folder)
        self._address = address
        self._find = find
        #: Whether this command is of no use without the driver.
        self._needs_driver = False
        #: Since when the cluster does not know the run; None: it does.
        self._unknown_since: float | None = None

    def wait(self, seconds: float) -> None:
        """As in `LiveReader`; then ask another driver, if one has taken over."""
        super().wait(seconds)
        self.no_driver = ""
        if not self._lost or super().result():
            return
        found, now = self._find(), time.monotonic()
        self._unknown_since = (self._unknown_since or now) if found is None else None
        patience = _UNKNOWN_SECONDS if self._state is not None or self._needs_driver else 0.0
        self.is_gone = self._unknown_since is not None and now >= self._unknown_since + patience
        if found is not None and found.control not in (self._address, None):
            self._address, self._lost, self.problem, self.takeovers = found.control, "", "", self.takeovers + 1
            super().wait(0.0)
            self.is_gone = False
        elif found is not None and found.no_driver:
            self.no_driver = f"no driver is in command: {found.no_driver}"

    @property
    def awaits_logs(self) -> bool:
        """Whether logs may not be read to their end, and another driver will answer.

        The journal of a driver that has died may have an attempt that the next driver knows nothing of.
        """
        return (self.has_missed_logs or not self.is_asked) and not self.is_gone and not self.result()

    def ask(self, request: ControlRequest) -> Any:
        """As in `LiveReader`. If the driver dies before it has answered, the next one is asked.

        Unless it does already what the last one was asked for: then the answer is what follows from that.
        """
        before = self.status()
        try:
            return super().ask(request)
        except ControlError:
            self.close()
            self.await_driver()
            status = self.status()
            if status is None or not self.is_asked:
                raise
            has_begun = before is not None and (status.attempt > before.attempt or status.phase not in GOING_ON)
            if before is None or not has_begun or not isinstance(request, RunChange):
                return super().ask(request)
            return Accepted(attempt=before.attempt, phase=status.phase, status=status.why)

    def await_driver(self, say: Callable[[], None] = lambda: None) -> None:
        """Wait until a driver answers, or the run is over; or, for a minute or two, in vain.

        `say` is called if there is none right now.
        """
        self._needs_driver = True
        deadline = time.monotonic() + _TAKEOVER_SECONDS
        self.refresh()
        if not self._is_settled:
            say()
        while not self._is_settled and time.monotonic() < deadline:
            self.wait(_FIND_SECONDS)

    @property
    def _is_settled(self) -> bool:
        return self.is_asked or self.is_gone or bool(self.result())

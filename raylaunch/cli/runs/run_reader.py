"""Reads a run while it goes on and afterwards: its driver is asked as long as that answers, else its folder is read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from raylaunch.cluster.agent.agent_session import SUCCESSION_SECONDS
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
from raylaunch.core.history.run_status import RunStatus, StatusBuilder
from raylaunch.core.machine.state import Phase
from raylaunch.core.record import journal, run_layout
from raylaunch.core.record.journal import JournalHeader
from raylaunch.errors import ConfigError
from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan

RETRY_SECONDS = 5.0
"""When a driver that could not be asked, and may not be gone, is asked again."""
_UNKNOWN_SECONDS = 30.0
"""How long a command that needs a detached run waits for a cluster that does not know the run, or does not answer."""
_FIND_SECONDS = 0.3
_RESULT_SECONDS = 10.0
"""How long a driver may take to write its result, at most, where others wait for it."""
_LOOK_SECONDS = 0.1
GOING_ON = (Phase.GATHERING, Phase.STARTING, Phase.RUNNING)
"""The phases of a run of which nobody has requested a change, or in which that has been made."""


class DriverClient(Protocol):
    """Asks the driver of a run."""

    def ask(self, request: ControlRequest) -> Any:
        """Return the answer. Raises ControlError and RefusedError."""

    def close(self) -> None:
        """End the connection, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """Why the driver cannot be asked, and the time.monotonic() to try it again."""

    why: str
    retry_at: float


class RunReader:
    """Asks the driver of a run, if there is one to ask; else reads its folder, if that can be seen from here."""

    def __init__(
        self,
        entry: RegisteredRun,
        find: Callable[[], RegisteredRun | None] | None = None,
        client: DriverClient | None = None,
        *,
        is_registered: bool = False,
        is_gone: bool = False,
    ) -> None:
        """`entry`: what is known of the run. `client`: asks a driver that needs no address.

        `find` returns what is known of the run when its driver does not answer; None: nothing, so that its driver must
        be gone. Without it, a driver that does not answer may be there. `is_registered`: in the registry of this user.
        `is_gone`: its driver is known to be gone, and is not asked.
        """
        self.entry = entry
        self.is_registered = is_registered
        self.files = FolderReader(entry.folder)
        self._find = find
        self._client = client
        self._state: RunState | None = None
        #: None: the driver can be asked, or was not asked yet.
        self._loss: _Loss | None = None
        #: Whether it is known that the driver is gone.
        self.is_gone = is_gone
        #: Whether the driver was lost when logs were asked for the last time: there may be more of them.
        self.has_missed_logs = False
        #: How often another driver has answered in the place of the last one.
        self.takeovers = 0
        #: Whether this command is of no use without the driver.
        self._needs_driver = False
        #: Since when nothing is known of the run.
        self._unknown_since: float | None = None

    @property
    def has_driver(self) -> bool:
        """Whether there is a driver to ask, or there was one when this began."""
        was_gone = self.is_gone and self._loss is None
        return self._client is not None or (self.entry.control is not None and not was_gone)

    @property
    def is_asked(self) -> bool:
        """Whether the driver has answered, the last time it was asked."""
        return self._state is not None and self._loss is None

    @property
    def problem(self) -> str:
        """Why nothing is known of the run, or not all; "": all is."""
        if self._loss is None:
            return "" if self.has_driver else self.files.problem
        return self.files.problem if self.files.status() else f"its driver cannot be asked: {self._loss.why}"

    @property
    def no_driver(self) -> str:
        """Why no driver is in command of a detached run, as the driver says that looks for the ledger; "": one is."""
        why = "" if self.is_asked or self.files.result() else self.entry.no_driver
        return f"no driver is in command: {why}" if why else ""

    def refresh(self) -> None:
        """Ask for the state of the run."""
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Wait until the run has ended, or for these seconds at most, and then ask for its state."""
        if self._state is not None and self._state.ended:
            return
        if self._loss is not None and not self.is_gone and time.monotonic() >= self._loss.retry_at:
            self._loss = None
        if not self.has_driver or self._loss is not None:
            if seconds:
                time.sleep(seconds)
            self.files.refresh()
        else:
            self._look(seconds)
        if self._loss is not None and self._find is not None and not self.files.result():
            self._look_for_another(self._find)

    def _look(self, seconds: float) -> None:
        try:
            self._state = self.client.ask(GetState(wait=seconds))
            self.is_gone, self._unknown_since = False, None
        except (ControlError, RefusedError) as error:
            self._loss = _Loss(why=str(error), retry_at=time.monotonic() + RETRY_SECONDS)
            self.is_gone = isinstance(error, ControlError) and error.is_gone
            self.close()
            self.files.refresh()

    def _look_for_another(self, find: Callable[[], RegisteredRun | None]) -> None:
        """Ask another driver, if one has taken over."""
        found, now = find(), time.monotonic()
        self._unknown_since = (self._unknown_since or now) if found is None else None
        patience = _UNKNOWN_SECONDS if self._state is not None or self._needs_driver else 0.0
        self.is_gone = self._unknown_since is not None and now >= self._unknown_since + patience
        if found is None:
            return
        before = self.entry
        self.entry = replace(found, folder=before.folder, control=found.control or before.control)
        if self.entry.control != before.control:
            self._loss, self.takeovers = None, self.takeovers + 1
            self._look(0.0)
            self.is_gone = False

    @property
    def client(self) -> DriverClient:
        """What asks the driver. Raises ControlError."""
        if self._client is None:
            if self.entry.control is None or not self.has_driver:
                msg = "it does not listen"
                raise ControlError(msg)
            self._client = ControlClient(self.entry.control)
        return self._client

    def ask(self, request: ControlRequest) -> Any:
        """Return what the driver answers. Raises ControlError and RefusedError.

        If the driver of a detached run dies before it has answered, the next one is asked; unless it does already what
        the last one was asked for: then the answer is what follows from that.
        """
        before = self.status()
        try:
            return self.client.ask(request)
        except ControlError:
            self.close()
            if self._find is None:
                raise
            self.await_driver()
            status = self.status()
            if status is None or not self.is_asked:
                raise
            has_begun = before is not None and (status.attempt > before.attempt or status.phase not in GOING_ON)
            if before is None or not has_begun or not isinstance(request, RunChange):
                return self.client.ask(request)
            return Accepted(attempt=before.attempt, phase=status.phase, status=status.why)

    def await_driver(self, say: Callable[[], None] = lambda: None) -> None:
        """Look for the driver; in a detached run wait until another one answers, for a minute or two at most.

        `say` is called if there is none right now.
        """
        self._needs_driver = True
        deadline = time.monotonic() + (SUCCESSION_SECONDS if self._find is not None else 0.0)
        self.refresh()
        if not self._is_settled and self._find is not None:
            say()
        while not self._is_settled and time.monotonic() < deadline:
            self.wait(_FIND_SECONDS)

    @property
    def _is_settled(self) -> bool:
        return self.is_asked or self.is_gone or bool(self.result())

    def status(self) -> RunStatus | None:
        """Return the status as it was told or read last; None if nothing was."""
        known = None if self.is_asked else self.files.status()
        return self._state.status if known is None and self._state is not None else known

    def result(self) -> dict[str, Any]:
        """Return exit code and reason; empty if the run has not ended."""
        if self._state is not None and self._state.ended:
            return {"exit_code": self._state.exit_code, "why": self._state.why}
        return self.files.result()

    def await_result(self, seconds: float = _RESULT_SECONDS) -> None:
        """Wait for the result of a run whose workers have ended, unless its driver is gone, which writes it last."""
        deadline = time.monotonic() + seconds
        while self.entry.exit_code is None and not self.result() and time.monotonic() < deadline:
            if not (self.entry.is_alive or (self.has_driver and not self.is_gone)):
                break
            self.wait(_LOOK_SECONDS)

    # Logs.

    def log_spans(self, query: LogQuery, node: str = "") -> LogsListed:
        """Ask all nodes; without the driver, read the run folder. Raises ConfigError."""
        self.has_missed_logs = False
        if self.is_asked:
            with contextlib.suppress(ControlError, RefusedError):
                answer: LogsListed = self.client.ask(ListLogs(query=query, node=node))
                if answer.spans or not answer.missing or not self._has_folder():
                    return answer  # else the agents have just ended
        self.has_missed_logs = self.has_driver and not self._has_folder()
        return LogsListed(spans=()) if self.has_missed_logs else self.files.log_spans(query, node)

    def log_blocks(self, attempt: int, spans: Sequence[LogSpan], *, times: bool = False) -> Iterator[LogBlock]:
        """Ask the nodes that have them; without the driver, read the run folder."""
        left, is_read = tuple(spans), False
        if self.is_asked:
            try:
                while left:
                    answer: LogsRead = self.client.ask(ReadLogs(attempt=attempt, spans=left, times=times))
                    is_read, left = is_read or bool(answer.blocks), answer.rest
                    yield from answer.blocks
            except (ControlError, RefusedError) as error:
                self.has_missed_logs = isinstance(error, ControlError)
        if not is_read and (not self.has_driver or self._has_folder()):
            self.has_missed_logs = False
            yield from self.files.log_blocks(attempt, spans, times=times)

    def _has_folder(self) -> bool:
        """Return whether the run folder can be seen from here."""
        if self.files.header is None:
            self.files.refresh()
        return self.files.header is not None

    @property
    def awaits_logs(self) -> bool:
        """Whether logs may not be read to their end, and another driver will answer.

        The journal of a driver that has died may have an attempt that the next driver knows nothing of.
        """
        is_unsure = self.has_missed_logs or not self.is_asked
        return self._find is not None and is_unsure and not self.is_gone and not self.result()

    @property
    def log_layout(self) -> str:
        """The name of the layout of its log files."""
        return self._state.log_layout if self._state is not None else self.files.log_layout

    @property
    def has_logs(self) -> bool:
        """Whether there may be log files."""
        return self.files.header is not None or (self._state is not None and self._state.keeps_logs)

    def close(self) -> None:
        """Close the connection and the journal; what was told or read stays known."""
        self.files.close()
        if self._client is not None:
            self._client.close()
            self._client = None if self.entry.control is not None else self._client


class FolderReader:
    """Follows the journal of one run folder. An incomplete last line is read when it has its end."""

    def __init__(self, folder: str) -> None:
        """`folder`: "" if the run keeps nothing, and there is nothing to read."""
        self.folder = Path(folder)
        self.header: JournalHeader | None = None
        #: Why the journal cannot be read, or not to its end; "": it can.
        self.problem = "" if folder else "the run keeps no files"
        self._file: BinaryIO | None = None
        self._line_number = 0
        self._builder: StatusBuilder | None = None

    def refresh(self) -> None:
        """Read the lines that the journal has got since the last call. What is wrong with it is in `problem`."""
        if self.problem:
            return
        try:
            if self._is_replaced():
                self.close()
            self._read()
        except FileNotFoundError:
            return  # the driver has not made it yet
        except OSError as error:
            if error.errno == errno.ESTALE:  # as NFS says of a file that was replaced
                self.close()
                return
            self.problem = f"{run_layout.EVENTS} cannot be read: {error.strerror}"
        except (ValueError, RecursionError) as error:
            self.problem = (
                f"{run_layout.EVENTS} is damaged, or of another version, at line {self._line_number}: {error}"
            )

    def _read(self) -> None:
        if self._file is None:
            self._file = (self.folder / run_layout.EVENTS).open("rb")
            self._line_number, self._builder = 0, None
        while (line := self._file.readline()).endswith(b"\n"):
            self._line_number += 1
            self._add(line.decode(errors="replace"))
        self._file.seek(-len(line), 1)

    def _is_replaced(self) -> bool:
        """Return whether another driver of a detached run has made the journal anew: what is read may not be in it."""
        return self._file is not None and not os.path.samestat(
            os.fstat(self._file.fileno()), os.stat(self.folder / run_layout.EVENTS)
        )

    def _add(self, line: str) -> None:
        if self._builder is None:
            self.header = journal.read_header(line)
            self._builder = StatusBuilder(self.header.job)
        else:
            self._builder.add(journal.read_entry(line))

    def status(self) -> RunStatus | None:
        """Return the status as of what was read; None if the journal has not even a first line."""
        if self._builder is None or self.header is None:
            return None
        return self._builder.status(run_dir=str(self.folder), began=self.header.began)

    def result(self) -> dict[str, Any]:
        """Return the content of `result.json`; empty if there is none yet, or it cannot be read."""
        try:
            found = json.loads((self.folder / run_layout.RESULT).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) and isinstance(found.get("exit_code"), int) else {}

    def log_spans(self, query: LogQuery, node: str = "") -> LogsListed:
        """Return the log files that there are. Raises ConfigError for a node: files do not tell whose they are."""
        if node:
            msg = f"the folder does not tell which files {node} has written"
            raise ConfigError(msg, hint="`--node` is for runs that go on; `--rank` works for all")
        return LogsListed(spans=tuple(log_files.spans(str(self.folder), self.log_layout, query)))

    def log_blocks(self, attempt: int, spans: Sequence[LogSpan], *, times: bool = False) -> Iterator[LogBlock]:
        """Yield what log files have in these spans, in their order. `times`: also when it was written."""
        return log_files.blocks(str(self.folder), self.log_layout, attempt, spans, times=times)

    @property
    def log_layout(self) -> str:
        """The name of the layout of its log files."""
        return self.header.job.log_layout if self.header is not None else "raylaunch"

    def close(self) -> None:
        """Close the journal; what was read of it stays known."""
        if self._file is not None:
            self._file.close()
            self._file = None

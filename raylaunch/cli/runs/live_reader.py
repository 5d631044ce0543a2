"""Reads a run by asking its driver, for commands on machines that have no access to its run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.agent.acceptor import SecretAddress
from raylaunch.cluster.control.control_client import ControlClient, ControlError, RefusedError
from raylaunch.cluster.control.control_messages import ListLogs, LogsListed, ReadLogs, RunState
from raylaunch.core.history.run_status import RunStatus
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan


class LiveReader(RunReader):
    """Asks the driver. When it cannot be asked any more, the run folder is read, if it can be seen from here."""

    def __init__(self, address: SecretAddress, folder: str) -> None:
        super().__init__(folder)
        self._address = address
        self._state: RunState | None = None
        self._client: ControlClient | None = None
        #: Why the driver cannot be asked; "": it can, or was not asked yet.
        self._lost = ""
        #: Whether `wait` has asked, and nobody has looked since.
        self._is_fresh = False
        self._no_files, self.problem = self.problem, ""

    def refresh(self) -> None:
        """Ask for the state of the run, unless `wait` has just done so."""
        if not self._is_fresh:
            self.wait(0.0)
        self._is_fresh = False

    def wait(self, seconds: float) -> None:
        """Ask for the state of the run when it has ended, or otherwise after so many seconds."""
        self._is_fresh = True
        if self._state is not None and self._state.ended:
            return
        if not self._lost:
            try:
                self._state = self.client.state(seconds)
            except (ControlError, RefusedError) as error:
                self._lost = str(error)
                self.is_gone = isinstance(error, ControlError) and error.is_gone
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
    def client(self) -> ControlClient:
        """The connection to the driver. Raises ControlError."""
        if self._client is None:
            self._client = ControlClient(self._address)
        return self._client

    def status(self) -> RunStatus | None:
        """Return the status as it was told last; None if nothing was."""
        known = super().status()
        if known is not None or self._state is None:
            return known
        return self._state.status

    def result(self) -> dict[str, Any]:
        """Return exit code and reason; empty if the run has not ended."""
        if self._state is not None and self._state.ended:
            return {"exit_code": self._state.exit_code, "why": self._state.why}
        return super().result()

    def log_spans(self, query: LogQuery, node: str = "") -> LogsListed:
        """Ask all nodes; without the driver, read the run folder."""
        if self.is_asked:
            with contextlib.suppress(ControlError, RefusedError):
                (answer,) = self.client.ask(ListLogs(query=query, node=node))
                if isinstance(answer, LogsListed):
                    return answer
        return super().log_spans(query, node) if self.header is not None else LogsListed(spans=())

    def log_blocks(self, attempt: int, spans: Sequence[LogSpan]) -> Iterator[LogBlock]:
        """Ask the nodes that have them; without the driver, read the run folder."""
        if not self.is_asked:
            yield from super().log_blocks(attempt, spans) if self.header is not None else ()
            return
        with contextlib.suppress(ControlError, RefusedError):
            for answer in self.client.ask(ReadLogs(attempt=attempt, spans=tuple(spans))):
                if isinstance(answer, LogBlock):
                    yield answer

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

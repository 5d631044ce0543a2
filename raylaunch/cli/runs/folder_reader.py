"""Reads what the driver of a run writes to its folder, also while the run goes on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from raylaunch.cluster.control.control_messages import LogsListed
from raylaunch.core.history.run_status import RunStatus, StatusBuilder
from raylaunch.core.record import journal, run_layout
from raylaunch.core.record.journal import JournalHeader
from raylaunch.errors import ConfigError
from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan


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

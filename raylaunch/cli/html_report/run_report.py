"""Reads a run folder and writes the report of its run: for `raylaunch report`, and at the end of a run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from raylaunch.cli.html_report.outcome_text import RunEnd, outcome
from raylaunch.cli.html_report.report_facts import ReportFacts
from raylaunch.cluster.driver.observer import described
from raylaunch.cluster.local.file_writer import STALL_SECONDS, replacing
from raylaunch.core.history.run_history import HistoryBuilder
from raylaunch.core.history.run_status import StatusBuilder
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.record import journal, run_layout
from raylaunch.core.record.result import RunResult
from raylaunch.errors import JOB_FAILURES, ConfigError, end_state
from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogQuery

_OUTPUT_LINES = 12
_MOST_OUTPUT = 8_000
"""Bytes."""
MOST_AT_THE_END = 8_000_000
"""Bytes of a journal of which a run writes the report at its end: of a longer one that takes seconds."""


def _facts(folder: Path, run_id: str, end: RunEnd, until: float) -> ReportFacts:
    """Return what the journal of a run folder tells. Lines that cannot be read are counted and omitted."""
    path = folder / run_layout.EVENTS
    try:
        with path.open("rb") as file:
            first = file.readline().decode(errors="replace")
            header = journal.read_header(first)
            status, history, unreadable = StatusBuilder(header.job), HistoryBuilder(), 0
            for line in file:
                try:
                    entry = journal.read_entry(line.decode(errors="replace"))
                    status.add(entry)
                    history.add(entry)
                except (ValueError, RecursionError):
                    unreadable += 1
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="a report is made of it") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no journal of a run: {error}", hint="a report is made of it") from None
    shown = status.status(run_dir=str(folder), began=header.began)
    result = _ended(shown.result, end)
    return ReportFacts(
        id=run_id,
        name=header.job.title,
        folder=str(folder),
        began=header.began,
        end=end,
        outcome=outcome(run_id, end, shown, result),
        result=result,
        history=history.history(until),
        status=shown,
        job=header.job,
        versions=dict(header.versions),
        unreadable=unreadable,
    )


def collect(folder: Path, run_id: str, end: RunEnd, environ: Mapping[str, str], until: float = 0.0) -> ReportFacts:
    """Return what the report of a run says, without secrets. Raises ConfigError if there is no journal.

    `until`: for a run that goes on, the seconds since it began.
    """
    found = _facts(folder, run_id, end, until)
    if found.result.cause is None and found.status.attempt:
        found = replace(found, output=_last_output(folder, found.job.log_layout, found.status.attempt))
    return Redactor.of(found.job, environ).shown(found)


def _ended(result: RunResult, end: RunEnd) -> RunResult:
    """Return what a journal says of the result of a run that has ended so."""
    if end.exit_code is None:
        return result
    cause = result.cause if end.exit_code in JOB_FAILURES else None
    return replace(result, exit_code=end.exit_code, why=end.why or result.why, cause=cause)


def _last_output(folder: Path, layout: str, attempt: int) -> str:
    query = LogQuery(attempt=attempt, streams=("stdout",), ranks=((0, 0),), lines=_OUTPUT_LINES)
    spans = [
        replace(span, start=max(span.start, span.end - _MOST_OUTPUT))
        for span in log_files.spans(str(folder), layout, query)
    ]
    text = b"".join(block.data for block in log_files.blocks(str(folder), layout, attempt, spans))
    lines = text.decode(errors="replace").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines).rstrip()


def write(path: Path, text: str) -> None:
    """Write the report to a file that only the user may read. It appears whole. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_at_the_end(
    job: Job, result: RunResult, environ: Mapping[str, str], say: Callable[[str], None], made_by: str
) -> None:
    """Write the report into the folder of a run that has ended, and say where it is, if the job wants one.

    Whatever goes wrong is only said. Gives up if the file system does not answer for seconds.
    """
    if not (job.report and result.run_dir):
        return
    done: list[str] = []
    thread = threading.Thread(
        target=lambda: done.append(_written(Path(result.run_dir), result, environ, made_by)), daemon=True
    )
    with contextlib.suppress(KeyboardInterrupt):  # the run is over, and Ctrl-C does not change how it ended
        thread.start()
        thread.join(STALL_SECONDS)
    say(done[0] if done else f"no report was written within {STALL_SECONDS:.0f} s: `raylaunch report` writes it")


def _written(folder: Path, result: RunResult, environ: Mapping[str, str], made_by: str) -> str:
    """Write the report, and return a line for a person."""
    from raylaunch.cli.html_report import page  # noqa: PLC0415

    try:
        size = (folder / run_layout.EVENTS).stat().st_size
        if size > MOST_AT_THE_END:
            return f"no report was written, since the run was long: `raylaunch report {folder}` writes it"
        end = RunEnd(state=end_state(result.exit_code), exit_code=result.exit_code, why=result.why, is_alive=False)
        write(folder / run_layout.REPORT, page.html(collect(folder, folder.name, end, environ), made_by))
    except OSError as error:
        return f"cannot write {folder / run_layout.REPORT}: {error.strerror or error}"
    except ConfigError as error:
        return f"no report was written: {error.message}"
    except Exception as error:  # noqa: BLE001
        return f"no report was written: {described(error)} (this is a bug in raylaunch)"
    return f"report: {folder / run_layout.REPORT}"

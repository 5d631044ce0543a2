"""The command `raylaunch report`: writes the report of a run as HTML, or prints it as JSON."""

from __future__ import annotations

import json
import webbrowser
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from raylaunch.cli.html_report import page, run_report
from raylaunch.cli.html_report.outcome_text import RunEnd
from raylaunch.cli.html_report.report_facts import ReportFacts, as_json
from raylaunch.cli.run_once import say, version
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.run_summary import summary
from raylaunch.core.record.run_layout import REPORT
from raylaunch.core.text import printable
from raylaunch.errors import ConfigError, ExitCode
from raylaunch.worker.path_owners import refuse_strangers

_STDOUT = "/dev/stdout"


def show(run: RunReader, arguments: Namespace, environ: Mapping[str, str]) -> int:
    """Write the report and print its path, or print JSON. Raises ConfigError."""
    if arguments.json and (arguments.output or arguments.open):
        raise ConfigError("`--json` excludes `--output` and `--open`", hint="JSON goes to stdout: `--json > FILE`")
    found = _facts(run, environ)
    if arguments.json:
        print(json.dumps(as_json(found), indent=2))
        return ExitCode.OK
    path = Path(arguments.output or Path(run.entry.folder) / REPORT)
    if _write(path, page.html(found, version()), is_named=bool(arguments.output)):
        print(printable(str(path)))
    if arguments.open and not webbrowser.open(path.absolute().as_uri()):
        say(f"no browser could be started here: open {path} in one")
    return ExitCode.OK


def _facts(run: RunReader, environ: Mapping[str, str]) -> ReportFacts:
    shown = summary(run)
    run.close()
    if not run.entry.folder:
        raise ConfigError(
            f"there is no report of {run.entry.title}: the run keeps no files", hint="`log_dir` says where"
        )
    if run.entry.driver is not None and run.entry.driver.is_alive is None and not Path(run.entry.folder).is_dir():
        msg = f"there is no report of {run.entry.title} here: the run folder {run.entry.folder} is not on this machine"
        raise ConfigError(msg, hint=f"make it on {run.entry.driver.host}, or copy the folder")
    alive = True if run.is_asked else run.entry.driver.is_alive if run.entry.driver is not None else None
    end = RunEnd(state=shown.state, exit_code=shown.exit_code, why=shown.why, is_alive=alive)
    return run_report.collect(Path(run.entry.folder), run.entry.id, end, environ, shown.seconds if alive else 0.0)


def _write(path: Path, text: str, *, is_named: bool) -> bool:
    """Write the report, and return whether to a file.

    Follows a link that the person named, such as /dev/stdout, which must stay. Does not follow another user's link in a
    folder where everybody may write, nor a link in a run folder, which may be another user's.
    """
    try:
        is_device = path.exists() and not path.is_file()
        if is_device or (path.is_symlink() and is_named):
            refuse_strangers(str(path), (), links_only=True)
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        else:
            run_report.write(path, text)
        return not is_device and str(path) != _STDOUT
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no path has a NUL
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write {path}: {why}", hint="`-o FILE` writes the report elsewhere") from None

"""The command `raylaunch doctor`: collects the facts, lets each check look at them, and prints what was found."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from raylaunch.cli.args import parser
from raylaunch.cli.config import load
from raylaunch.cli.doctor import job_checks, node_checks, node_report
from raylaunch.cli.doctor.diagnosis import Diagnosis, Severity, Surroundings
from raylaunch.cli.doctor.node_report import Questions
from raylaunch.cluster import inspection
from raylaunch.cluster.local import local_machine
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.validation import warnings
from raylaunch.core.record.run_layout import future_losses
from raylaunch.core.text import count, printable
from raylaunch.errors import ClusterError, ConfigError, ExitCode

SECONDS = 15.0
"""How long the nodes may take to answer: each starts a process of Ray first."""


def doctor(arguments: Namespace, environ: Mapping[str, str]) -> int:
    """Print a line for each thing that was looked at, and return 1 if there is an error among them, else 0."""
    facts = _of_job([arguments.job, *arguments.settings] if arguments.job else [], environ)
    hide = Redactor.of(facts.job or Job(), environ).hide
    found = [_shown(each, hide) for each in diagnoses(surroundings(facts))]
    if arguments.json:
        print(json.dumps({"findings": [asdict(each) for each in found]}, indent=2))
    else:
        print(text(found), end="")
    return ExitCode.JOB_FAILED if any(each.severity is Severity.ERROR for each in found) else ExitCode.OK


def diagnoses(facts: Surroundings) -> Iterator[Diagnosis]:
    """Yield what all checks say."""
    for check in (*node_checks.CHECKS, *job_checks.CHECKS):
        yield from check(facts)


def _shown(found: Diagnosis, hide: Callable[[str], str]) -> Diagnosis:
    return replace(found, text=hide(found.text), fix=hide(found.fix))


def text(found: Sequence[Diagnosis]) -> str:
    """Return the findings as lines of text, and how many there are."""
    width = max(map(len, Severity))
    lines = []
    for each in found:
        first, *rest = each.text.splitlines() or [""]
        lines.append(f"{each.severity:{width}}  {each.check}: {first}")
        lines += [f"{'':{width}}  {line}" for line in rest]
        lines += [f"{'':{width}}  fix: {each.fix}"] * bool(each.fix)
    bad = [each.severity for each in found]
    errors, others = bad.count(Severity.ERROR), bad.count(Severity.WARNING)
    lines += ["", f"{count(errors, 'error')}, {count(others, 'warning')}"]
    if not errors:
        lines[-1] += "; `raylaunch check` tries torch.distributed between all ranks"
    return "".join(f"{printable(line)}\n" for line in lines)


def _of_job(words: Sequence[str], environ: Mapping[str, str]) -> Surroundings:
    """Return what is known of the job of a command line, if there is one."""
    if not words:
        return Surroundings()
    try:
        job = load.load(parser.parse(words, environ), environ)
    except ConfigError as error:
        return Surroundings(job_problem=str(error).removeprefix("error: "))
    unpacked = bool(job.ray.working_dir)
    log_dir = str(Path(job.log_dir).absolute())
    losses = future_losses(log_dir, os.getcwd(), job.entrypoint.args, unpacked=unpacked)
    return Surroundings(job=job, job_warnings=(*warnings(job), *losses))


def surroundings(facts: Surroundings) -> Surroundings:
    """Ask the cluster and its nodes, and return the facts with their answers."""
    with _marker(facts.job.log_dir if facts.job is not None else "") as marker, _door() as port:
        questions = _questions(facts.job, marker)

        def look(address: str) -> inspection.Look[node_report.NodeReport]:
            return functools.partial(node_report.report, replace(questions, door=(address, port if address else 0)))

        try:
            found = inspection.inspect(facts.job or Job(), look, SECONDS, with_plan=facts.job is not None)
        except ClusterError as error:
            here, fix = local_machine.LOOPBACK, error.hint.replace("\n", "; ")
            seen = inspection.Inspection(here=here, answers={here: look("")()})
            return replace(facts, cluster_problem=error.message, cluster_fix=fix, seen=seen)
    return replace(facts, seen=found)


def _questions(job: Job | None, marker: str) -> Questions:
    if job is None:
        return Questions()
    cwd = "" if job.ray.working_dir else os.getcwd()
    entry = job.entrypoint
    return Questions(
        script=os.path.join(cwd, entry.script) if entry.script and cwd else "",
        module=entry.module or "" if cwd else "",
        command=entry.command or "" if cwd else "",
        cwd=cwd,
        marker=marker,
        log_dir=str(Path(job.log_dir).absolute()),
    )


@contextlib.contextmanager
def _marker(log_dir: str) -> Iterator[str]:
    """Make a file in the folder of runs, or where it would be made, by which other nodes know it; "": it cannot be."""
    folder = Path(log_dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with contextlib.ExitStack() as files:
        name = ""
        if log_dir and log_dir != os.devnull:
            with contextlib.suppress(OSError):
                prefix = ".raylaunch-doctor-"
                name = files.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=prefix)).name
        yield name


@contextlib.contextmanager
def _door() -> Iterator[int]:
    """Listen on all addresses of this machine; accept and close what connects. Yields the port."""
    with socket.create_server(("", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=serve, daemon=True, name="raylaunch-door").start()
        yield listening.getsockname()[1]
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread

"""Checks of the job: its file, whether it has room, and what it needs on every node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raylaunch.cli.doctor.diagnosis import Diagnosis, Surroundings, error, ok, warning
from raylaunch.core.text import count, host_list


def job_file(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the job can be read, and nothing in it is odd."""
    if facts.job_problem:
        yield error("job", facts.job_problem, "mend what is marked")
    elif facts.job is not None:
        yield ok("job", f"{facts.job.title}: {facts.job.entrypoint.kind} {facts.job.entrypoint.target}")
    for text in facts.job_warnings:
        what, _, fix = text.partition(": ")
        yield warning("job", what, fix or "leave it out")


def room(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the cluster could start the job."""
    plan = facts.seen.plan
    if facts.seen.plan_problem:
        yield error("room", facts.seen.plan_problem, "ask for what the nodes have; `raylaunch --plan` shows it")
    elif plan is not None and plan.feasible:
        yield ok("room", f"would start {count(plan.workers, 'worker')} on {count(len(plan.seats), 'node')}")
    elif plan is not None:
        lines = [f"{node.address}: {node.why}" for node in plan.skipped]
        why = f"room for {len(plan.seats)} of {plan.min_nodes} nodes ({'; '.join([*lines, *plan.obstacles])})"
        fix = plan.advice[-1] if plan.remedies else "ask for less, or add nodes"
        yield (warning if plan.possible else error)("room", why, fix)


def folder(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether the nodes have the folder in which workers run, and the program."""
    entry = facts.job.entrypoint if facts.job is not None else None
    answers = facts.seen.answers
    if entry is None or not answers:
        return
    lacking = [address for address, report in answers.items() if not report.has_folder]
    if lacking:
        fix = "let all nodes share it, or have Ray copy it: `ray.working_dir: .`"
        yield error("folder", f"this folder is not on {host_list(lacking)}", fix)
    if entry.kind in ("", "function"):
        return
    without = [address for address, report in answers.items() if report.has_folder and not report.program]
    if without:
        fix = "install it there, or let Ray copy it with `ray.working_dir`; see also `env` for PATH and PYTHONPATH"
        yield error(entry.kind, f"`{entry.target}` is not found on {host_list(without)}", fix)
    digests = {report.program for report in answers.values() if report.program}
    if entry.kind == "script" and len(digests) > 1:
        mine = (answers.get(facts.seen.here) or next(iter(answers.values()))).program
        differ = host_list(address for address, report in answers.items() if report.program not in ("", mine))
        yield error("script", f"`{entry.target}` has other contents on {differ}", "copy the same file to all nodes")
    elif not lacking and not without:
        yield ok(entry.kind, f"`{entry.target}` is on all nodes")


def run_folder(facts: Surroundings) -> Iterator[Diagnosis]:
    """Whether run folders can be made, and all nodes write into the same one."""
    if facts.job is None:
        return
    here = facts.seen.answers.get(facts.seen.here)
    if here is not None and here.log_dir_problem:
        yield error("run folder", here.log_dir_problem, "set `log_dir` to a folder that can be written")
        return
    others = {address: report for address, report in facts.seen.answers.items() if address != facts.seen.here}
    apart = [address for address, report in others.items() if not report.sees_marker or report.log_dir_problem]
    if apart:
        fix = "set `log_dir` to a folder that all nodes share; until then each node keeps the files of its own ranks"
        yield warning("run folder", f"`{facts.job.log_dir}` is another folder on {host_list(apart)}", fix)
    elif others:
        yield ok("run folder", f"all nodes share `{facts.job.log_dir}`")


CHECKS: tuple[Callable[[Surroundings], Iterator[Diagnosis]], ...] = (job_file, room, folder, run_folder)

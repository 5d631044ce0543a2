"""Each check of the job: what it says, and when it says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylaunch.cli.doctor import job_checks
from raylaunch.cli.doctor.diagnosis import Surroundings
from raylaunch.cli.doctor.node_report import NodeReport
from raylaunch.cluster.inspection import Inspection
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.placement.plan import NodeFacts, make_plan

JOB = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2)
HERE, THERE = "10.0.0.1", "10.0.0.2"


def nodes(job: Job = JOB, **more) -> Surroundings:
    """Return a job on two nodes, of which the second one, not this machine, has these facts."""
    reports = {HERE: NodeReport(program="1f"), THERE: NodeReport(**{"program": "1f", **more})}
    return Surroundings(job=job, seen=Inspection(cluster="c:1", here=HERE, answers=reports))


def planned(*free_cpus: float, cpus: float = 2) -> Surroundings:
    facts = [
        NodeFacts(node_id=f"{n}", address=f"10.0.0.{n}", cpus=cpus, gpus=0, free_cpus=free, free_gpus=0)
        for n, free in enumerate(free_cpus, start=1)
    ]
    return Surroundings(job=JOB, seen=Inspection(plan=make_plan(JOB, facts, local=False)))


HERE_FAILS = nodes()
HERE_FAILS = replace(
    HERE_FAILS, seen=Inspection(here=HERE, answers={HERE: NodeReport(log_dir_problem="runs is a file")})
)
MODULE = replace(JOB, entrypoint=Entrypoint(module="pack.train"))
FUNCTION = replace(JOB, entrypoint=Entrypoint(function="pack:main"))

CASES = [
    ("job_file", Surroundings(job_problem="`nnode` is not a setting"), "error", "job", "`nnode` is not"),
    ("job_file", Surroundings(job=JOB), "ok", "job", "train: script train.py"),
    ("job_file", Surroundings(job_warnings=("Ray will delete it: move it",)), "warning", "job", "Ray will delete it"),
    ("room", Surroundings(seen=Inspection(plan_problem="no node has a GPU")), "error", "room", "no node has a GPU"),
    ("room", planned(2, 2), "ok", "room", "would start 2 workers on 2 nodes"),
    ("room", planned(2, 0), "warning", "room", "room for 1 of 2 nodes (10.0.0.2: 0 of 2 CPUs free, 1 needed)"),
    ("room", planned(2), "error", "room", "room for 1 of 2 nodes (2 different Ray nodes are needed, and there is 1)"),
    ("folder", nodes(), "ok", "script", "`train.py` is on all nodes"),
    ("folder", nodes(has_folder=False, program=""), "error", "folder", f"this folder is not on {THERE}"),
    ("folder", nodes(program=""), "error", "script", f"`train.py` is not found on {THERE}"),
    ("folder", nodes(program="2e"), "error", "script", f"`train.py` has other contents on {THERE}"),
    ("folder", nodes(MODULE, program="/elsewhere/pack.py"), "ok", "module", "`pack.train` is on all nodes"),
    ("run_folder", nodes(), "ok", "run folder", "all nodes share `runs`"),
    ("run_folder", nodes(sees_marker=False), "warning", "run folder", f"`runs` is another folder on {THERE}"),
    ("run_folder", HERE_FAILS, "error", "run folder", "runs is a file"),
]


@pytest.mark.parametrize(("check", "facts", "severity", "name", "text"), CASES)
def test_what_a_check_says(check, facts, severity, name, text):
    """One line, with what to do if it is not ok."""
    (found,) = getattr(job_checks, check)(facts)
    assert (found.severity, found.check) == (severity, name)
    assert text in found.text
    assert (found.fix == "") == (severity == "ok")


def test_every_check_has_a_case():
    """Also one that is added."""
    assert {check.__name__ for check in job_checks.CHECKS} == {name for name, *_ in CASES}


def test_what_would_help_is_the_fix():
    """As `--plan` says it."""
    (found,) = job_checks.room(planned(2, 0))
    assert found.fix == "it could start now with `placement=pack`, `cpus_per_worker=0` or `nnodes=1:2`"


def test_without_a_job_nothing_is_said():
    """And a function is pickled: nothing of it need be on the nodes."""
    assert [each for check in job_checks.CHECKS for each in check(Surroundings())] == []
    assert list(job_checks.folder(nodes(FUNCTION, program=""))) == []

"""What may come next on a command line."""

from __future__ import annotations

import pytest

from raylaunch.cli import completion
from raylaunch.cli.args import subcommands
from raylaunch.cli.args.flags import FLAGS
from raylaunch.cli.completion import FILES, Candidate, Names
from raylaunch.core.job.job import Job

RUNS = (Candidate("2026-01-01T10", "charlm"), Candidate("charlm"), Candidate("it's mine"))
NODES = (Candidate("node-1", "10.0.0.1"), Candidate("node-2", "10.0.0.2"))
NAMES = Names(runs=lambda: RUNS, nodes=lambda: NODES)


def words(*given: str) -> list[str]:
    """Return the words that may come next, without their help."""
    return [line.partition("\t")[0] for line in completion.lines(given, NAMES)]


OPTIONS = {"--nnodes", "--max-restarts", "--plan", "--help"}
CASES = [
    (("",), {*subcommands.BY_NAME, "check", FILES}),
    (("st",), {"stacks", "status", "stop", FILES}),
    (("check", "n"), {"nnodes=", "nproc_per_node=", FILES}),
    (("job.yaml", "entrypoint.s"), {"entrypoint.script=", FILES}),
    (("job.yaml", "ray.a"), {"ray.address=", FILES}),
    (("--nnodes", "2", "--ru", "f", ""), {FILES}),
    (("--nnodes", ""), {FILES}),
    (("--nnodes", "2", "ch"), {"check", FILES}),
    (("--nnodes", "=", ""), {FILES}),
    (("--nnodes", "=", "2", "ch"), {"check", FILES}),
    (("--nnodes=2", "ch"), {"check", FILES}),
    (("--nproc_per_node", ""), {FILES}),
    (("--standalone", "ch"), {"check", FILES}),
    (("job.yaml", "nnodes", "="), {FILES}),
    (("train.py", "--n"), {FILES}),
    (("train.py", "job.yaml", "nn"), {FILES}),
    (("status", ""), {"2026-01-01T10", "charlm", FILES}),
    (("stop", "2026"), {"2026-01-01T10", FILES}),
    (("logs", "--tail", ""), {FILES}),
    (("logs", "--fa"), {"--failed"}),
    (("logs", "--failed", "ch"), {"charlm", FILES}),
    (("logs", "--node", ""), {"node-1", "node-2"}),
    (("logs", "--node", "node-1", "ch"), {"charlm", FILES}),
    (("drain", ""), {"node-1", "node-2"}),
    (("drain", "node-1", ""), {"2026-01-01T10", "charlm", FILES}),
    (("resize", ""), set()),
    (("resize", "2:4", "ch"), {"charlm", FILES}),
    (("ps", ""), set()),
    (("doctor", ""), {FILES}),
    (("doctor", "job.yaml", "nn"), {"nnodes=", FILES}),
    (("doctor", "train.py", "nn"), {FILES}),
    (("slurm", ""), {FILES}),
    (("slurm", "job.yaml", "nn"), {"nnodes=", FILES}),
    (("completion", ""), {"bash", "zsh", "fish", "tcsh"}),
    ((), {*subcommands.BY_NAME, "check", FILES}),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=[" ".join(given) for given, _ in CASES])
def test_what_may_come_next(given, expected):
    """Subcommands, flags, settings, runs, files; what follows a script is the script's."""
    found = words(*given)
    assert len(found) == len({*found})
    assert expected <= {*found}
    assert {word for word in found if not word.startswith("n")} <= expected


def test_flags():
    """All of them, with their help; those of a subcommand are its own."""
    found = words("-")
    assert {flag.option for flag in FLAGS} <= {*found}
    assert "--follow" not in found
    assert "--follow" in words("logs", "-")
    help_of = {flag.option: flag.help for flag in FLAGS}
    assert f"--plan\t{help_of['--plan']}" in [*completion.lines(["--pl"], NAMES)]


def test_settings():
    """Each setting can be given after a job file."""
    found = words("job.yaml", "")
    names = {word.partition("=")[0].partition(".")[0] for word in found} - {FILES}
    assert names == set(Job.__dataclass_fields__)

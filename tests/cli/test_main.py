"""The command line itself: exit codes, help, and what never gets as far as a cluster."""

from __future__ import annotations

import pytest

from raylaunch.cli import main as command
from raylaunch.errors import ExitCode


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text("entrypoint: {script: train.py}\nnnodes: 2\nray: {address: local}\n")
    return "job.yaml"


def test_help(capsys, golden):
    """`--help` says what it does, what the exit codes mean, and exits 0."""
    assert command.main(["--help"]) == ExitCode.OK
    golden("help", capsys.readouterr().out)


def test_version(capsys):
    """`--version` names the program and a version."""
    assert command.main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("raylaunch 0.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'JOB'"),
        (["job.yaml", "--plann"], "No such option '--plann'"),
        (["job.yaml", "nproc_per_nod=4"], "did you mean `nproc_per_node`?"),
        (["train.py"], "`train.py` is not a job file"),
        (["nojob.yaml"], "nojob.yaml"),
    ],
)
def test_wrong_words(job, capsys, words, said):
    """What is wrong on the command line is said on stderr, with exit code 2, and no Ray is imported for it."""
    assert command.main(words) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_plan_of_a_local_ray(job, capsys, golden, monkeypatch):
    """`--plan` with no cluster lays the job out on this machine, and does not start Ray for it."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert command.main([job, "--plan", "nproc_per_node=2", "gpus_per_worker=0"]) == ExitCode.OK
    golden("plan_local", capsys.readouterr().out)
    assert command.main([job, "--plan", "nproc_per_node=auto", "gpus_per_worker=0", "placement=spread"]) == ExitCode.OK
    golden("plan_local_spread", capsys.readouterr().out)


def test_our_own_mistake(job, capsys, monkeypatch):
    """What we did not foresee ends with exit code 4, its traceback, and a word on whose mistake it is."""

    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("raylaunch.cluster.run.run_job", broken)
    assert command.main([job]) == ExitCode.INTERNAL
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oh" in err
    assert "this is a mistake of raylaunch" in err


def test_interrupted_before_the_start(job, capsys, monkeypatch):
    """Ctrl-C while connecting is exit code 130, without a traceback."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("raylaunch.cluster.run.run_job", interrupted)
    assert command.main([job]) == ExitCode.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_run_folder_cannot_be_made(job, capsys, tmp_path):
    """A `log_dir` that is a file: said before anything runs."""
    from raylaunch.cluster.run_folder import RunFolder
    from raylaunch.core.job import Entrypoint, Job
    from raylaunch.errors import ConfigError

    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        RunFolder.create(Job(entrypoint=Entrypoint(script="train.py")), "1", print)

"""The command line itself: exit codes, help, and what never gets as far as a cluster."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from raylaunch.cli import main as command
from raylaunch.errors import ClusterError, ExitCode


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.yaml"
    path.write_text("entrypoint: {script: train.py}\nnnodes: 2\nray: {address: local}\n")
    return "job.yaml"


def test_help(capsys, golden):
    """`--help` says what it does, what the exit codes mean, and exits 0."""
    assert command.main(["--help"]) == ExitCode.OK
    golden("help", capsys.readouterr().out)


def test_nothing_at_all(capsys, golden):
    """The three ways to start, and exit code 2."""
    assert command.main([]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    golden("usage", err)


def test_the_words_of_the_process_are_the_default(capsys, monkeypatch):
    """As the installed command and `python -m raylaunch` call it."""
    monkeypatch.setattr("sys.argv", ["raylaunch", "--version"])
    assert command.main() == ExitCode.OK
    assert capsys.readouterr().out.startswith("raylaunch ")


def test_help_loads_little():
    """`--help` needs no parser of job files: it is there at once."""
    code = "from raylaunch.cli.main import main; main(['--help']); import sys; sys.exit(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert "raylaunch.cli.help" in done.stderr.split()
    assert set(done.stderr.split()).isdisjoint({"ray", "torch", "omegaconf", "yaml", "click", "raylaunch.core.job"})


def test_version(capsys):
    """`--version` names the program and a version."""
    assert command.main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("raylaunch 0.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job.yaml", "--plann"], "did you mean `--plan`?"),
        (["job.yaml", "nproc_per_nod=4"], "did you mean `nproc_per_node`?"),
        (["tran.py"], "did you mean `train.py`?"),
        (["nojob.yaml"], "did you mean `job.yaml`?"),
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
    assert command.main([job, "--plan", "nproc_per_node=2", "gpus_per_worker=0", "spares=1"]) == ExitCode.OK
    golden("plan_local_spare", capsys.readouterr().out)
    words = ["--plan", "--standalone", "--nnodes", "2", "--nproc-per-node=2", "--set", "gpus_per_worker=0", "train.py"]
    assert command.main(words) == ExitCode.OK
    golden("plan_local", capsys.readouterr().out)


def test_our_own_mistake(job, capsys, monkeypatch):
    """What we did not foresee ends with exit code 4, its traceback, and a word on whose mistake it is."""

    def broken(*_):
        raise ZeroDivisionError("oh, hunter44-of-ana")

    monkeypatch.setattr("raylaunch.cluster.run.run_job", broken)
    monkeypatch.setenv("A_TOKEN", "hunter44-of-ana")
    assert command.main([job]) == ExitCode.INTERNAL
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oh, ***" in err
    assert "this is a mistake of raylaunch" in err


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "`ulimit -n`"),
        (OSError(errno.ENOSPC, "No space left on device"), "`df -h`"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "`ulimit -u`"),
        (RuntimeError("can't start new thread"), "`ulimit -u`"),
        (MemoryError(), "more memory"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/self/smaps"), "/proc must be mounted"),
        (ClusterError("the agent of node-1 cannot start"), "`ulimit -n`"),
    ],
)
def test_what_the_machine_does_not_give(job, capsys, monkeypatch, error, hint):
    """It is no mistake of ours: no traceback, and what to do about it."""

    def short(*_):
        raise error from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("raylaunch.cluster.run.run_job", short)
    assert command.main([job]) == ExitCode.UNAVAILABLE
    err = capsys.readouterr().err
    assert hint in err.partition("hint: ")[2]
    assert "Traceback" not in err


def test_a_working_folder_that_is_gone(job, capsys, tmp_path, monkeypatch):
    """It was removed under the feet of the shell."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert command.main([str(tmp_path / job), f"entrypoint.script={tmp_path}/train.py"]) == ExitCode.USAGE
    assert "the working folder cannot be used" in capsys.readouterr().err


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
    with pytest.raises(ConfigError, match=r"cannot make the run folder .* is a file"):
        RunFolder.create(Job(entrypoint=Entrypoint(script="train.py")), "1", print)


SECRET = ["entrypoint.args=[--api-key=hunter22-of-ana]", "env.DB_PASSWORD=hunter33-of-ana"]


def test_plan_shows_no_secret(job, capsys):
    """Its title has the script's arguments."""
    assert command.main([job, "--plan", "gpus_per_worker=0", *SECRET]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "train.py --api-key=***" in out
    assert "hunter" not in out


def test_job_as_it_ran_has_no_secret(job, monkeypatch):
    """The text that becomes `job.yaml`; the job itself is whole."""
    seen = []

    def run(whole, text, _watcher):
        seen.append((whole.env, text))
        raise KeyboardInterrupt

    monkeypatch.setattr("raylaunch.cluster.run.run_job", run)
    assert command.main([job, *SECRET]) == ExitCode.INTERRUPTED
    ((env, text),) = seen
    assert env == {"DB_PASSWORD": "hunter33-of-ana"}
    assert "--api-key=***" in text
    assert "DB_PASSWORD: '***'" in text
    assert "hunter" not in text


def test_job_of_a_function_has_no_secret(monkeypatch):
    """`raylaunch.launch`, too."""
    import raylaunch

    texts = []

    def run(_job, text, _watcher, *, payload):
        texts.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("raylaunch.cli.api.run_job", run)
    with pytest.raises(KeyboardInterrupt):
        raylaunch.launch(print, env={"API_KEY": "hunter22-of-ana"})
    assert "API_KEY: '***'" in texts[0]


def test_nothing_to_run_shows_no_secret(capsys):
    """The word that took the place of a script is quoted, but for its value."""
    assert command.main(["--set", "env.API_KEY=hunter22"]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "`env.API_KEY=***` is the value of `--set`" in err
    assert "hunter" not in err


def test_the_head_of_a_run_shows_no_secret(capsys):
    """The first line on the terminal."""
    from raylaunch.cli.console import Console
    from raylaunch.core.job import Entrypoint, Job
    from raylaunch.core.plan import make_plan

    of = Job(entrypoint=Entrypoint(script="train.py", args=["--token", "hunter22"]))
    console = Console()
    console.planned(of, make_plan(of, (), local=True), "")
    console.close()
    err = capsys.readouterr().err
    assert "train: train.py --token ***" in err
    assert "hunter" not in err

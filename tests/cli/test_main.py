"""The command itself: exit codes, help, and errors before a cluster is needed."""

from __future__ import annotations

import contextlib
import errno
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given

from raylaunch import __main__ as program
from raylaunch.cli import main as command
from raylaunch.cluster.local.local_machine import Gpus
from raylaunch.errors import ClusterError, ExitCode
from tests.cli.any_input import SCRIPT, arguments
from tests.profiles import examples


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.yaml"
    path.write_text("entrypoint: {script: train.py}\nnnodes: 2\nray: {address: local}\n")
    return "job.yaml"


def test_help(capsys, golden):
    """`--help` prints the help and exits with 0."""
    assert command.main(["--help"]) == ExitCode.OK
    golden("help", capsys.readouterr().out)


def test_nothing_at_all(capsys, golden):
    """Without arguments, the usage is printed and the exit code is 2."""
    assert command.main([]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    golden("usage", err)


def test_sys_argv_is_the_default(capsys, monkeypatch):
    """The installed command and `python -m raylaunch` call `main` without arguments."""
    monkeypatch.setattr("sys.argv", ["raylaunch", "--version"])
    assert command.main() == ExitCode.OK
    assert capsys.readouterr().out.startswith("raylaunch ")


def test_help_loads_little():
    """`--help` imports neither Ray nor the parser of job files, so that it is fast."""
    code = "from raylaunch.cli.main import main; main(['--help']); import sys; sys.exit(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert "raylaunch.cli.args.usage" in done.stderr.split()
    assert set(done.stderr.split()).isdisjoint({"ray", "torch", "omegaconf", "yaml", "click"})


def test_version(capsys):
    """`--version` prints the name and the version first, for programs that read them."""
    assert command.main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("raylaunch 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["job.yaml", "--plann"], "did you mean `--plan`?"),
        (["job.yaml", "nproc_per_nod=4"], "did you mean `nproc_per_node`?"),
        (["tran.py"], "did you mean `train.py`?"),
        (["nojob.yaml"], "did you mean `job.yaml`?"),
    ],
)
def test_wrong_arguments(job, capsys, arguments, said):
    """A wrong command line is reported on stderr, with exit code 2."""
    assert command.main(arguments) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@examples(15)
@given(more=arguments)
def test_any_command_line_has_an_exit_code(more):
    """Whatever is given, `--plan` succeeds, or says in a sentence what is wrong; it never is an internal error."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("a.py").touch()
        Path("job.yaml").write_text(SCRIPT)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            # Without a cluster: one may run on this machine, or be started by another test.
            code = command.main(["job.yaml", "--standalone", "--plan", *(word for word in more if "ray" not in word)])
        assert code in (ExitCode.OK, ExitCode.USAGE, ExitCode.UNAVAILABLE)
        assert "Traceback" not in err.getvalue()
        assert code == ExitCode.OK or "error: " in err.getvalue() or "cannot start" in out.getvalue()


def test_plan_of_a_local_ray(job, capsys, golden, monkeypatch):
    """`--plan` without a cluster plans for this machine, and does not start Ray."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert command.main([job, "--plan", "nproc_per_node=2", "gpus_per_worker=0"]) == ExitCode.OK
    golden("plan_local", capsys.readouterr().out)
    assert (
        command.main([job, "--plan", "nproc_per_node=auto", "gpus_per_worker=0", "placement=spread"])
        == ExitCode.UNAVAILABLE
    )
    golden("plan_local_spread", capsys.readouterr().out)
    assert command.main([job, "--plan", "nproc_per_node=2", "gpus_per_worker=0", "spares=1"]) == ExitCode.OK
    golden("plan_local_spare", capsys.readouterr().out)
    arguments = [
        "--plan",
        "--standalone",
        "--nnodes",
        "2",
        "--nproc-per-node=2",
        "--set",
        "gpus_per_worker=0",
        "train.py",
    ]
    assert command.main(arguments) == ExitCode.OK
    golden("plan_local", capsys.readouterr().out)


def test_a_worker_for_each_gpu_where_there_is_none(job, capsys, monkeypatch):
    """The error has the word that was typed."""
    monkeypatch.setattr("raylaunch.cluster.local.local_machine.visible_gpus", lambda: Gpus("CUDA_VISIBLE_DEVICES", ()))
    assert command.main(["--standalone", "--plan", "--nproc-per-node", "xpu", "train.py"]) == ExitCode.UNAVAILABLE
    assert capsys.readouterr().err == (
        "error: `nproc_per_node: xpu`, but there is no GPU on any node\n\n"
        "hint: `nproc_per_node: auto` starts a worker for each CPU where no node has a GPU\n"
    )


def test_an_internal_error(job, capsys, monkeypatch):
    """An unexpected exception gives exit code 4, a traceback without secrets, and a request to report it."""

    def broken(*_, **_more):
        raise ZeroDivisionError("oh, hunter44-of-ana")

    monkeypatch.setattr("raylaunch.cluster.run.run_job", broken)
    monkeypatch.setenv("A_TOKEN", "hunter44-of-ana")
    assert command.main([job]) == ExitCode.INTERNAL
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oh, ***" in err
    assert "this is a bug in raylaunch" in err


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
def test_limits_of_the_operating_system(job, capsys, monkeypatch, error, hint):
    """There is no traceback but a hint."""

    def short(*_, **_more):
        raise error from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("raylaunch.cluster.run.run_job", short)
    assert command.main([job]) == ExitCode.UNAVAILABLE
    err = capsys.readouterr().err
    assert hint in err.partition("hint: ")[2]
    assert "Traceback" not in err


def test_a_working_folder_that_is_gone(job, capsys, tmp_path, monkeypatch):
    """The working folder of the shell was removed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert command.main([str(tmp_path / job), f"entrypoint.script={tmp_path}/train.py"]) == ExitCode.USAGE
    assert "the working folder cannot be used" in capsys.readouterr().err


def test_interrupted_before_the_start(job, capsys, monkeypatch):
    """Ctrl-C while connecting gives exit code 130 without a traceback."""

    def interrupted(*_, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr("raylaunch.cluster.run.run_job", interrupted)
    assert command.main([job]) == ExitCode.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_interrupted_while_modules_are_imported(capsys, monkeypatch):
    """Ctrl-C in the first half second gives exit code 130 and one line."""

    class Interrupts:
        def find_spec(self, name, *_):
            if name == "raylaunch.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "raylaunch.cli.main")
    monkeypatch.delattr(sys.modules["raylaunch.cli"], "main")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    assert program.main() == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "raylaunch: stopped before anything was started\n"


def test_run_folder_cannot_be_made(job, capsys, tmp_path):
    """A `log_dir` that is a file is reported before anything runs."""
    from raylaunch.cluster.driver.run_folder import RunFolder
    from raylaunch.core.job.job import Entrypoint, Job
    from raylaunch.errors import ConfigError

    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the run folder .* is a file"):
        RunFolder.create(Job(entrypoint=Entrypoint(script="train.py")), "1", print)


SECRET = ["entrypoint.args=[--api-key=hunter22-of-ana]", "env.DB_PASSWORD=hunter33-of-ana"]


def test_plan_shows_no_secret(job, capsys):
    """The script's arguments in the title are redacted."""
    assert command.main([job, "--plan", "gpus_per_worker=0", *SECRET]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "train.py --api-key=***" in out
    assert "hunter" not in out


def test_job_as_it_ran_has_no_secret(job, monkeypatch):
    """The text that becomes `job.yaml` is redacted; the job itself is not."""
    seen = []

    def run(whole, text, _watcher, **_more):
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
    """`raylaunch.launch` redacts its text as well."""
    import raylaunch

    texts = []

    def run(_job, text, _watcher, **_more):
        texts.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("raylaunch.cli.api.run_job", run)
    with pytest.raises(KeyboardInterrupt):
        raylaunch.launch(print, env={"API_KEY": "hunter22-of-ana"})
    assert "API_KEY: '***'" in texts[0]


def test_nothing_to_run_shows_no_secret(capsys):
    """The argument that took the place of the script is quoted without its value."""
    assert command.main(["--set", "env.API_KEY=hunter22"]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "`env.API_KEY=***` is the value of `--set`" in err
    assert "hunter" not in err


def test_the_head_of_a_run_shows_no_secret(capsys):
    """The first line of the run is redacted."""
    from raylaunch.cli.output.console import Console
    from raylaunch.core.job.job import Entrypoint, Job
    from raylaunch.core.placement.plan import make_plan

    of = Job(entrypoint=Entrypoint(script="train.py", args=["--token", "hunter22"]))
    console = Console()
    console.on_plan(of, make_plan(of, (), local=True), "")
    console.close()
    err = capsys.readouterr().err
    assert "train: train.py --token ***" in err
    assert "hunter" not in err


class Moved(io.TextIOWrapper):
    """A stream whose descriptor has another file than at the start: Python cannot tell where it is in a pipe."""

    def reconfigure(self, **_: object) -> None:
        raise OSError(29, "Illegal seek")


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Moved])
def test_stdout_that_cannot_be_reconfigured(monkeypatch, capsys, kind):
    """It is used as it is; what is wrong elsewhere is still said."""
    stdout = kind(io.BytesIO())
    if kind is io.TextIOWrapper:
        stdout.close()
    monkeypatch.setattr(sys, "stdout", stdout)
    assert command.main(["--no-such-flag"]) == ExitCode.USAGE
    assert "--no-such-flag" in capsys.readouterr().err


def test_what_stdout_cannot_encode(monkeypatch):
    """It is escaped, as on stderr."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert command.main(["--version"]) == ExitCode.OK
    assert stdout.errors == "backslashreplace"

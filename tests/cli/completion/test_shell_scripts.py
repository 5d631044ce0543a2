"""The scripts of the shells, in the shells that are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raylaunch.cli import completion
from raylaunch.cli import main as command
from raylaunch.cli.args.flags import FLAGS
from raylaunch.errors import ExitCode

SECONDS = 200.0
COMMAND = Path(sys.executable).with_name("raylaunch")


@pytest.fixture
def environ(tmp_path):
    """An environment whose `raylaunch` is this one, and a folder with two files."""
    if not COMMAND.exists():
        pytest.skip(f"{COMMAND} is not installed")
    (tmp_path / "job.yaml").touch()
    (tmp_path / "my train.py").touch()
    more = {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb", "PS1": "> "}
    return {"XDG_STATE_HOME": str(tmp_path), **os.environ, **more}


def shell(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def typed(line: list[str], keys: str, expected: str, folder: Path, environ: dict[str, str]) -> str:
    """Type keys in a shell on a terminal, and return what it shows, as soon as the expected text is there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(line[0], line, environ)
    try:
        os.write(terminal, keys.encode())
        shown, deadline = "", time.monotonic() + SECONDS
        while expected not in _visible(shown) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 4096).decode(errors="replace")
        return _visible(shown)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def _visible(shown: str) -> str:
    """Return what is left of an output without bells, where a backspace takes back the character before it."""
    found: list[str] = []
    for character in shown.replace("\a", ""):
        if character == "\b":
            del found[-1:]
        else:
            found.append(character)
    return "".join(found)


def test_bash_on_a_terminal(tmp_path, environ):
    """A subcommand gets a space, a setting none, and a file's name is quoted."""
    script = tmp_path / "completion"
    script.write_text(completion.SCRIPTS["bash"] + "PS1=READY\n")
    line = [shell("bash"), "--noprofile", "--rcfile", str(script), "-i"]
    for keys, expected in [
        ("echo raylaunch; raylaunch completi\tba\t", "raylaunch completion bash"),
        ("raylaunch job.yaml nprocs\tx", "raylaunch job.yaml nprocs=x"),
        ("raylaunch my\t", "raylaunch my\\ train.py"),
        ("raylaunch logs --failed --no-\tx", "--no-prefix x"),
    ]:
        assert expected in typed(line, keys, expected, tmp_path, environ)


def test_zsh_on_a_terminal(tmp_path, environ):
    """The same."""
    path = shell("zsh")
    (tmp_path / ".zshrc").write_text(f"autoload -U compinit; compinit -u\n{completion.SCRIPTS['zsh']}PS1=READY\n")
    environ |= {"ZDOTDIR": str(tmp_path)}
    for keys, expected in [
        ("raylaunch completi\tba\t", "raylaunch completion bash"),
        ("raylaunch job.yaml nprocs\tx", "raylaunch job.yaml nprocs=x"),
        ("raylaunch logs --failed --no-\tx", "--no-prefix x"),
    ]:
        assert expected in typed([path, "-i"], keys, expected, tmp_path, environ)


def test_fish(tmp_path, environ):
    """It lists words with their help."""
    (tmp_path / "completion.fish").write_text(completion.SCRIPTS["fish"])
    for line, expected in [
        ("raylaunch completi", "completion\tprint a script"),
        ("raylaunch job.yaml nprocs", "nprocs="),
        ("raylaunch my", "my train.py"),
        ("raylaunch logs --no-", "--no-prefix\twithout the rank"),
    ]:
        program = f"source completion.fish; complete -C '{line}'"
        arguments = [shell("fish"), "--no-config", "-c", program]
        done = subprocess.run(
            arguments, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=SECONDS
        )
        assert expected in done.stdout


@pytest.mark.parametrize("name", completion.SCRIPTS)
def test_both_commands_print_the_same(capsys, name):
    """torchrun 2.15 has the flag."""
    assert command.main(["completion", name]) == ExitCode.OK
    script = capsys.readouterr().out
    assert command.main(["--print-completion", name, "--nnodes"]) == ExitCode.OK
    assert capsys.readouterr().out == script
    assert "raylaunch" in script
    if name == "tcsh":
        assert [flag.name for flag in FLAGS if flag.name not in script] == []


@pytest.mark.parametrize("arguments", [["completion"], ["completion", "cmd"], ["--print-completion=cmd"]])
def test_another_shell(capsys, arguments):
    """The error names those that there are."""
    assert command.main(arguments) == ExitCode.USAGE
    assert "write bash, zsh, fish or tcsh" in capsys.readouterr().err

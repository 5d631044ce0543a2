"""The command `raylaunch report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from raylaunch.cli import main
from raylaunch.errors import ExitCode
from tests.cli.runs.made_runs import NOBODY, dead, make_folder


@pytest.fixture
def runs(registry, tmp_path):
    """One run that goes on, one that was lost and one that has ended."""
    registry.add(make_folder(tmp_path / "runs" / "a" / "ended", "budget-spent", result=True))
    registry.add(make_folder(tmp_path / "runs" / "b" / "gone", "chaos-on-hosts", lines=27), driver=dead())
    registry.add(make_folder(tmp_path / "runs" / "b" / "going", "chaos-on-hosts", lines=27))
    return tmp_path / "runs"


def printed(capsys, *arguments: str, code: int = ExitCode.OK) -> str:
    assert main.main(["report", *arguments]) == code
    found = capsys.readouterr()
    return found.out if code == ExitCode.OK else found.err


def test_it_writes_a_file_and_prints_its_path(runs, capsys, tmp_path):
    """Into the run folder, or to another place; of the newest run, or of the one that is named."""
    assert printed(capsys) == f"{runs}/b/going/report.html\n"
    assert "The run goes on" in (runs / "b" / "going" / "report.html").read_text()
    assert printed(capsys, "ended", "-o", "other.html") == "other.html\n"
    assert "As its result says." in (tmp_path / "other.html").read_text()
    assert printed(capsys, str(runs / "a" / "ended")) == f"{runs}/a/ended/report.html\n"


def test_links_and_devices_stay_what_they_are(runs, capsys, tmp_path):
    """`-o /dev/stdout` is a link to a file where stdout is one. No path is printed behind what went to a device."""
    link, target = tmp_path / "link.html", tmp_path / "target.html"
    target.write_text("x" * 1_000_000)
    link.symlink_to(target)
    assert printed(capsys, "gone", "-o", str(link)) == f"{link}\n"
    assert link.is_symlink()
    assert "The run has no result" in target.read_text()
    assert printed(capsys, "gone", "-o", "/dev/null") == ""
    command = [sys.executable, "-m", "raylaunch", "report", "gone", "-o", "/dev/stdout"]
    with (tmp_path / "out.html").open("wb") as file:
        subprocess.run(command, stdout=file, check=True)
    assert (tmp_path / "out.html").read_text().endswith("</html>")
    assert Path("/dev/stdout").is_symlink()


def test_links_that_others_have_put_there(runs, capsys, tmp_path):
    """One in the run folder is replaced. One of another user, in a folder in which everybody may write, is refused."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (runs / "b" / "going" / "report.html").symlink_to(victim)
    assert printed(capsys) == f"{runs}/b/going/report.html\n"
    assert not (runs / "b" / "going" / "report.html").is_symlink()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "report.html").symlink_to(victim)
    assert printed(capsys, "gone", "-o", str(shared / "report.html")) == f"{shared}/report.html\n"
    assert "The run has no result" in victim.read_text()
    if os.geteuid() == 0:
        victim.write_text("precious")
        os.chown(shared / "report.html", 4321, 4321, follow_symlinks=False)
        said = printed(capsys, "gone", "-o", str(shared / "report.html"), code=ExitCode.USAGE)
        assert "cannot write" in said
        assert victim.read_text() == "precious"


def test_json(runs, capsys):
    """The same facts; nothing is written."""
    states = [json.loads(printed(capsys, run, "--json"))["state"] for run in ("ended", "gone", "going")]
    assert states == ["failed", "lost", "running"]
    assert not (runs / "b" / "going" / "report.html").exists()
    assert "exclude" in printed(capsys, "--json", "-o", "x.html", code=ExitCode.USAGE)
    assert "exclude" in printed(capsys, "--json", "--open", code=ExitCode.USAGE)


def test_a_browser(runs, capsys, monkeypatch):
    """It is asked to show the file. Without one, that is said."""
    asked = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: asked.append(uri) or len(asked) == 1)
    assert printed(capsys, "--open") == f"{runs}/b/going/report.html\n"
    assert asked == [f"file://{runs}/b/going/report.html"]
    assert main.main(["report", "--open"]) == ExitCode.OK
    assert "no browser could be started here" in capsys.readouterr().err


def test_what_cannot_be_written(runs, capsys, registry, tmp_path):
    """No such folder, a folder, a path that no file has, or nothing to make a report of."""
    assert f"cannot write {tmp_path}/no/x.html: No such file" in printed(
        capsys, "-o", f"{tmp_path}/no/x.html", code=ExitCode.USAGE
    )
    assert "Is a directory" in printed(capsys, "-o", str(tmp_path), code=ExitCode.USAGE)
    assert "cannot write" in printed(capsys, "-o", "a\0b", code=ExitCode.USAGE)
    registry.add("", id="nothing", driver=NOBODY)
    assert "the run keeps no files" in printed(capsys, "nothing", code=ExitCode.USAGE)
    registry.add("/on/another/machine", id="elsewhere", driver=NOBODY)
    assert "is not on this machine\n\nhint: make it on host-1" in printed(capsys, "elsewhere", code=ExitCode.USAGE)
    (runs / "a" / "ended" / "events.jsonl").unlink()
    assert "events.jsonl cannot be read: No such file" in printed(capsys, "ended", code=ExitCode.USAGE)

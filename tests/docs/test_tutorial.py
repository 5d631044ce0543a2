"""The tutorial works as it is written: its scripts run, one rank is killed, and the losses are those on the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.docs.blocks import DOCS

PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"Save this as `(\S+)`.*?```python\n(.*?)```", PAGE, re.DOTALL)
STEPS = 300


@pytest.mark.parametrize(("name", "script"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_a_script_of_the_tutorial_survives_a_kill(tmp_path: Path, name: str, script: str) -> None:
    """The one with `State` goes on; the other one begins anew. Both print the losses of the page."""
    (tmp_path / name).write_text(script.replace("sleep(0.05)", "sleep(0.01)"))
    (words,) = re.findall(r"^    raylaunch (--standalone .*) train\.py$", PAGE, re.MULTILINE)
    command = [sys.executable, "-m", "raylaunch", *words.split(), name]
    with (tmp_path / "said").open("w") as file:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    said = tmp_path / "said"
    while "step 50: loss" not in said.read_text():
        assert run.poll() is None, said.read_text()
        time.sleep(0.05)
    (pid,) = workers_of(run.pid, "rank 2 of 4")
    os.kill(pid, signal.SIGKILL)
    assert run.wait(100) == 0, said.read_text()
    text = said.read_text()
    assert text.count("step 0: loss") == (1 if "State(" in script else 2), text
    for line in re.findall(r"^step \d+: loss [\d.]+$", PAGE, re.MULTILINE):
        assert line in text


def workers_of(driver: int, title: str) -> list[int]:
    """The processes below the driver with these words in their title."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    below, _found = {driver}, []
    for _ in rows:
        below |= {int(pid) for pid, parent, *_ in rows if int(parent) in below}
    return [int(pid) for pid, _, args in rows if int(pid) in below and title in args]

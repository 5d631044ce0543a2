"""The tutorial works as it is written: its scripts run, one rank is killed, and the losses are those on the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.private_cluster import WARM_TORCH
from tests.warm_python import WarmPython
from tools.docs.blocks import DOCS

PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"Save this as `(\S+)`.*?```python\n(.*?)```", PAGE, re.DOTALL)
TESTS = Path(__file__).parents[1]
#: `raylaunch`, whose fork server finds torch imported.
RAYLAUNCH = f"""
import sys
sys.path.append({str(TESTS)!r})
import warm_fork_servers
sys.path.pop()
from raylaunch.cli.main import main
sys.exit(main())
"""


#: In place of the sleep of each step: the first attempt waits at its 60th until a rank is killed.
WAITS = 'time.sleep(1000 if step == 60 and __import__("os").environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)'


@pytest.mark.parametrize(("name", "script"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_a_script_of_the_tutorial_survives_a_kill(
    warm_torch: WarmPython, tmp_path: Path, name: str, script: str
) -> None:
    """The one with `State` goes on; the other one begins anew. Both print the losses of the page, up to step 100."""
    assert (script.count("time.sleep(0.05)"), script.count("300)")) == (1, 1)
    (tmp_path / name).write_text(script.replace("time.sleep(0.05)", WAITS).replace("300)", "101)"))
    (words,) = re.findall(r"^    raylaunch (--standalone .*) train\.py$", PAGE, re.MULTILINE)
    env = os.environ | {WARM_TORCH: str(warm_torch.executable())}
    with (tmp_path / "said").open("w") as file:
        command = [sys.executable, "-c", RAYLAUNCH, *words.split(), name]
        run = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=file, stderr=subprocess.STDOUT)
    said = tmp_path / "said"
    while "step 50: loss" not in said.read_text():
        assert run.poll() is None, said.read_text()
        time.sleep(0.05)
    os.kill(pid_of(2, tmp_path), signal.SIGKILL)
    assert run.wait(100) == 0, said.read_text()
    text = said.read_text()
    assert text.count("step 0: loss") == (1 if "State(" in script else 2), text
    for line in re.findall(r"^step \d+: loss [\d.]+$", PAGE, re.MULTILINE):
        assert line in text


def pid_of(rank: int, folder: Path) -> int:
    """Return the process id of a rank, from the event log of a run with one node."""
    (log,) = folder.glob("runs/*/latest/events.jsonl")
    events = [json.loads(line).get("event") for line in log.read_text().split("\n")[:-1]]
    (started,) = [event for event in events if event and event["is"] == "WorkersStarted"]
    return int(started["pids"][rank])

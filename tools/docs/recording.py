"""Record a run that survives, and draw it: `python -m tools.docs.recording` writes docs/images/run.svg.

Runs `conf/job.yaml` on this machine without Ray, and kills rank 3 after step 140.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from html import escape, unescape
from pathlib import Path
from typing import Any

from tools.docs.blocks import DOCS, ROOT

PICTURE = DOCS / "images" / "run.svg"
_KILL_AFTER = "step  140/200"
_COMMAND = ("raylaunch", "conf/job.yaml", "ray.address=none")
_STEPS_SHOWN = ("10/", "130/", "140/", "150/", "200/")

_WIDTH, _LINE, _FONT, _MARGIN = 980, 19, 13, 20
_LEFT, _LANE, _BAR = 110, 26, 16
_COLOURS = {"raylaunch": "#7aa2f7", "bad": "#f7768e", "good": "#9ece6a", "job": "#c0caf5", "dim": "#7f88a8"}


def record(folder: Path) -> tuple[str, dict[str, Any], float]:
    """What the run printed, its result.json, and when the worker was killed, in seconds of the run."""
    for name in ("conf", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    said = folder / "said"
    command = [sys.executable, "-m", *_COMMAND]
    with said.open("wb") as file:
        run = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=_environment())
        while _KILL_AFTER not in said.read_text():
            assert run.poll() is None, said.read_text()
            time.sleep(0.05)
        time.sleep(0.4)
        head, *lines = map(json.loads, next(folder.glob("runs/*/*/events.jsonl")).read_text().splitlines())
        os.kill(_last_pid(lines), signal.SIGKILL)
        killed = time.monotonic() - head["clock"]
        assert run.wait(120) == 0, said.read_text()
    return said.read_text(), json.loads(next(folder.glob("runs/*/*/result.json")).read_text()), killed


def _last_pid(lines: list[dict[str, Any]]) -> int:
    """The process of the highest rank, from the event log."""
    actions = [action for line in lines for action in line["actions"]]
    last_node = next(action["roster"][-1] for action in actions if action["is"] == "Launch")
    events = [line["event"] for line in lines if line["event"] is not None]
    started = next(event for event in events if event["is"] == "WorkersStarted" and event["node"] == last_node)
    return int(started["pids"][-1])


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def drawn(said: str, result: dict[str, Any], killed: float) -> str:
    """The run as SVG: a bar for each rank and attempt, and below them what was printed."""
    lines = ["$ " + " ".join(_COMMAND), *shown(said)]
    top = _MARGIN + 30 + 4 * _LANE + 40
    height = top + len(lines) * _LINE + 2 * _MARGIN
    body = [
        *_lanes(result, killed),
        (
            f'<rect x="{_MARGIN}" y="{top - 4}" width="{_WIDTH - 2 * _MARGIN}" '
            f'height="{len(lines) * _LINE + _MARGIN}" rx="8" fill="#1a1b26"/>'
        ),
    ]
    for number, line in enumerate(lines, 1):
        body.append(_text(2 * _MARGIN, top + number * _LINE, line, _COLOURS[_kind(line)], mono=True))
    title = "A run of four workers survives the kill of rank 3"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#16161e"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def text() -> str:
    """What the picture says was printed, for pages on which it would be too small."""
    lines = re.findall(r'monospace"[^>]*>(.*?)</text>', PICTURE.read_text(encoding="utf-8"))
    return "```text\n" + "".join(unescape(line) + "\n" for line in lines) + "```\n"


def shown(said: str) -> list[str]:
    """The lines that the picture shows: not every step, no time of day, and nothing wider than the picture."""
    found: list[str] = []
    for line in said.replace(str(ROOT) + "/", "").splitlines():
        if "`State` commits" in line:
            continue
        step = re.match(r"step +(\S+/)", line)
        if step and step[1] not in _STEPS_SHOWN:
            if found[-1] != "  ...":
                found.append("  ...")
        else:
            found.append(re.sub(r"/\S*/(runs/)", r"\1", line))
    return found


def _lanes(result: dict[str, Any], killed: float) -> list[str]:
    scale = (_WIDTH - _LEFT - 2 * _MARGIN) / result["seconds"]
    body = []
    for rank in range(4):
        y = _MARGIN + 22 + rank * _LANE
        body.append(_text(_MARGIN, y + _BAR - 3, f"rank {rank}", "#c0caf5"))
        for attempt in result["attempts"]:
            began = attempt["running_at"]
            ended = killed if rank == 3 and attempt["number"] == 1 else attempt["ended_at"]
            colour = "#4a7bd0" if attempt["number"] == 1 else "#3a9a5b"
            body.append(
                f'<rect x="{_LEFT + began * scale:.1f}" y="{y}" width="{(ended - began) * scale:.1f}" '
                f'height="{_BAR}" rx="3" fill="{colour}"/>'
            )
    x, y = _LEFT + killed * scale, _MARGIN + 22
    first, second = result["attempts"]
    body += [
        _text(_LEFT, y - 8, "nodes start", "#7f88a8"),
        _text(_LEFT + first["running_at"] * scale, y - 8, f"attempt 1: {first['steps']} steps", "#7aa2f7"),
        _text(x + 12, y - 8, f"attempt 2, {second['pause']:.1f} s later: {second['steps']} steps", "#9ece6a"),
        f'<path d="M{x - 6:.1f},{y + 3 * _LANE + 2} l12,12 m0,-12 l-12,12" stroke="#d03050" stroke-width="3"/>',
        f'<line x1="{x:.1f}" y1="{y - 4}" x2="{x:.1f}" y2="{y + 4 * _LANE}" stroke="#d03050" stroke-dasharray="3 3"/>',
        _text(x - 90, y + 4 * _LANE + 14, "kill -9 of rank 3", "#d03050"),
    ]
    every = max(1, round(result["seconds"] / 6))
    marks = [mark for mark in range(0, int(result["seconds"]) + 1, every) if abs(mark - killed) > every]
    return body + [_text(_LEFT + mark * scale, y + 4 * _LANE + 14, f"{mark} s", "#7f88a8") for mark in marks]


def _kind(line: str) -> str:
    if not line.startswith(("raylaunch:", "$")):
        return "dim" if line.strip() == "..." else "job"
    if "killed" in line and "attempt" not in line:
        return "bad"
    return "good" if re.search(r"attempt \d+ runs|all 4 workers finished", line) else "raylaunch"


def _text(x: float, y: float, text: str, colour: str, *, mono: bool = False) -> str:
    family = "DejaVu Sans Mono, Menlo, Consolas, monospace" if mono else "DejaVu Sans, Helvetica, Arial, sans-serif"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="{family}" font-size="{_FONT}" fill="{colour}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )


def main() -> None:
    """Record and draw."""
    with tempfile.TemporaryDirectory(prefix="raylaunch-recording-") as folder:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(drawn(*record(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main()

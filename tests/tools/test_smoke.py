"""`make smoke`: what it runs, and that it says which tool does not."""

from __future__ import annotations

import sys
from pathlib import Path

from tools import smoke
from tools.bench.__main__ import BENCHES
from tools.smoke import Command


def test_each_bench_is_run_once() -> None:
    found = [word for each in smoke.commands(Path()) for word in each.words if word in BENCHES]
    assert sorted(found) == sorted(BENCHES)


def test_a_tool_that_does_not_run_is_named(monkeypatch, capsys) -> None:
    """With the end of what it printed. Those after it run too."""
    given = [Command("bad", ("tools.no_such_tool",)), Command("good", ("this",))]
    monkeypatch.setattr(smoke, "commands", lambda _: iter(given))
    monkeypatch.setattr(sys, "argv", ["smoke"])
    assert smoke.main() == 1
    shown = capsys.readouterr().out
    assert "bad: exit code 1" in shown
    assert "No module named tools.no_such_tool" in shown
    assert "good: ok" in shown
    assert "1 of 2 tools run" in shown


def test_a_tool_that_takes_too_long_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(smoke, "SECONDS", 0.5)
    found = smoke.run(Command("slow", ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(1000)")))
    assert found.code is None
    assert "KeyboardInterrupt" in found.output

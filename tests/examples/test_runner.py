"""`make examples`: it kills where an example says, and does not pass what goes wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.warm_python import WarmPython
from tools.examples import __main__ as command
from tools.examples import example, runs
from tools.examples.example import EXAMPLES, FOLDER, Example

#: Counts to 60, and keeps the count in a file after each step, as the rank 0 of a script that saves would.
COUNTS = """
import os, time
from pathlib import Path
kept, rank = Path("kept"), os.environ["RANK"]
done = int(kept.read_text()) if kept.exists() else 0
if rank == "0" and done:
    print(f"resuming after step {done}", flush=True)
for step in range(done, 60):
    time.sleep(0.05)
    if rank == "0":
        Path("new").write_text(str(step + 1))
        os.replace("new", kept)
        print(f"step {step + 1}", flush=True)
if rank == "0":
    print("final loss", LOSS)
"""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_torch: WarmPython):
    """Return a function that makes such an example. `loss`: an expression, which sees `done`.

    Nothing that the launchers start imports torch, which takes 2 s of CPU, but a torchrun of which a rank is to be killed.
    """
    ours, theirs = runs._raylaunch(), runs._torchrun  # noqa: SLF001

    def torchrun(restarts: int) -> tuple[str, ...]:
        python, *words = theirs(restarts)
        return (python if restarts else str(warm_torch.executable()), *words)

    monkeypatch.setattr(runs, "_raylaunch", lambda: (*ours, "--set", "preload=[]"))
    monkeypatch.setattr(runs, "_torchrun", torchrun)
    monkeypatch.setattr(runs, "FOLDER", tmp_path)

    def make(loss: str, **more) -> Example:
        (tmp_path / "count.py").write_text(COUNTS.replace("LOSS", loss))
        return Example(**{"script": "count.py", "what": "", "kill_at": r"step 5\n", "files": "kept"} | more)

    return make


def test_a_rank_dies_under_each_launcher_and_the_results_are_compared(counting) -> None:
    said = command.compare(counting("0.5"))
    assert said.startswith("count: bitwise the same loss, 0.5; ")
    steps = [int(step) for step in re.findall(r"after step (\d+)", said)]
    assert len(steps) == 2
    assert all(5 <= step < 60 for step in steps)


def ended(monkeypatch: pytest.MonkeyPatch, ours: str) -> Example:
    """Return an example of which the run that is killed under raylaunch ends with this loss, and the others with 0.5."""
    for name, loss in (("undisturbed", "0.5"), ("killed_under_raylaunch", ours), ("killed_under_torchrun", "0.5")):
        monkeypatch.setattr(runs, name, lambda _, loss=loss: runs.Ended(loss, (3,), 1.0))
    return Example(script="count.py", what="", kill_at="step", tolerance=1e-6)


def test_another_loss_after_a_death_is_a_failure(monkeypatch) -> None:
    with pytest.raises(runs.RunError, match=r"count ended under raylaunch with loss 0.75, and undisturbed with 0.5"):
        command.compare(ended(monkeypatch, "0.75"))


def test_a_small_difference_is_none_where_the_example_allows_it(monkeypatch) -> None:
    assert command.compare(ended(monkeypatch, "0.5000001")).startswith("count: within 1e-06, 0.5; ")


def test_a_run_that_ends_before_it_can_be_killed_is_a_failure(counting) -> None:
    with pytest.raises(runs.RunError, match=r"ended before it could be killed, at 'step 61'"):
        runs.killed_under_raylaunch(counting("0.5", kill_at="step 61"))


def test_a_run_that_begins_anew_is_a_failure(counting) -> None:
    """The script prints nothing of a step from which it goes on, though it was killed."""
    example = counting("0.5", files="")
    (runs.FOLDER / "count.py").write_text((runs.FOLDER / "count.py").read_text().replace("kept.exists()", "False"))
    with pytest.raises(runs.RunError, match="went on 0 times from what it had kept"):
        runs.killed_under_raylaunch(example)


def test_a_script_that_fails_is_shown_with_its_output(counting) -> None:
    with pytest.raises(runs.RunError, match=r"(?s)count ended with exit code 1.*ZeroDivisionError"):
        runs.killed_under_raylaunch(counting("1 / 0"))


def test_nothing_is_left_of_a_run_that_fails(counting, monkeypatch) -> None:
    monkeypatch.setattr(runs, "SECONDS", 0.5)
    made = []
    monkeypatch.setattr(runs.tempfile, "TemporaryDirectory", lambda **more: made.append(SCRATCH(**more)) or made[-1])
    with pytest.raises(runs.RunError, match="took more than 0 s"):
        runs.undisturbed(counting("0.5"))
    assert not Path(made[0].name).exists()


SCRATCH = runs.tempfile.TemporaryDirectory


def test_what_is_not_installed_is_skipped(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["examples"])
    lacking = Example(script="digits.py", what="", kill_at="", needs=("no_such_module",))
    monkeypatch.setattr(example, "EXAMPLES", (lacking,))
    assert command.main() == 0
    assert capsys.readouterr().out == "digits: skipped, since no_such_module is not installed\n"


def test_a_name_that_no_example_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no example is called nonsense; there are .*digits"):
        example.chosen(["nonsense"])
    assert {each.script for each in example.chosen(["hf_trainer"])} == {"hf_trainer.py"}


def test_every_script_has_its_example() -> None:
    assert {each.script for each in EXAMPLES} == {
        path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")
    }

"""What is learned from the imports of a script, and what had better not be."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from raylaunch.node.lesson import Lesson, Part, apart, entry, grown
from raylaunch.node.standby import Standby
from raylaunch.node.understudy import Learned, NotWorth, Understudy, Unfit
from raylaunch.worker.imports import Note
from raylaunch.worker.spec import WorkerSpec
from tests.node.harness import until

LIBRARY = sysconfig.get_path("stdlib")
SITE = next(path for path in sys.path if path.endswith("site-packages"))


def note(name: str, folder: str, *, local_rank: int = 0, **env: str | None) -> Note:
    where = (f"{folder}/{name}.py",) if folder else ()
    return Note(local_rank=local_rank, name=name, where=where, env=env)


def learned(*notes: Note, nproc: int = 1) -> Lesson:
    return grown(Lesson(entry=()), notes, nproc)


def test_installed_modules_are_learned_in_their_order_and_the_scripts_own_are_not() -> None:
    """Nor what is nowhere, or imported already; a package that is the script's own in part is its own."""
    found = learned(
        note("b", SITE),
        note("mine", "/home/me"),
        note("b.c", SITE),
        note("a", LIBRARY),
        note("b", SITE),
        note("nowhere", ""),
        note("pytest", SITE),
        note("shared", SITE),
        note("shared.mine", "/home/me/shared"),
    )
    assert [part.name for part in found.parts] == ["b", "b.c", "a"]
    assert found.own == {"mine", "shared"}
    assert found.places["a"] == (f"{LIBRARY}/a.py",)


def test_a_variable_that_each_worker_sets_otherwise_is_told_apart() -> None:
    """What they set alike is in force when the module is imported."""
    notes = [note("a", SITE, HOME="x"), note("b", SITE, HOME="x", CACHE="0")]
    others = [note("", "", local_rank=1, HOME="x"), note("", "", local_rank=1, HOME="x", CACHE="1")]
    alone, together = learned(*notes), learned(*notes, *others, nproc=2)
    assert [part.env for part in alone.parts] == [{"HOME": "x"}, {"HOME": "x", "CACHE": "0"}]
    assert [part.env for part in together.parts] == [{"HOME": "x"}, {"HOME": "x"}]
    assert (alone.apart, together.apart) == (set(), {"CACHE"})
    assert learned(*notes, nproc=2).apart == {"HOME", "CACHE"}


def test_a_module_is_left_out_with_all_that_is_in_it() -> None:
    """And nothing that only begins with the same letters."""
    assert lesson("a", "a.b", "ab", "b", "b.a").without(["a", "b.a"]) == lesson("ab", "b")


def test_variables_of_the_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that we have not, or not so."""
    monkeypatch.setenv("SAME", "1")
    monkeypatch.setenv("OTHER", "1")
    env = {"SAME": "1", "OTHER": "2", "RANK": "0"}
    spec = WorkerSpec(rank=0, local_rank=0, kind="script", target="a.py", env=env, cwd="/", stdout="", stderr="")
    assert apart([spec]) == {"OTHER", "RANK"}
    assert entry(spec) == ("script", "a.py", "/", "")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that an understudy can import."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quick.py").write_text("")
    (tmp_path / "slow.py").write_text(
        "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    )
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__init__.py").write_text("from . import inner\n1 / 0")
    (tmp_path / "half" / "inner.py").write_text("")


@pytest.mark.usefixtures("installed")
def test_nobody_is_kept_for_what_takes_no_time() -> None:
    """An understudy that has nothing of worth to import says so and ends; one that has stays, and learns more."""
    assert taught(lesson("quick")) == [NotWorth()]
    assert taught(lesson("quick", "slow"), lesson("fails", "quick")) == [Learned(), Learned()]


@pytest.mark.usefixtures("installed")
def test_what_is_not_as_in_the_script_is_not_imported_ahead() -> None:
    """A module from elsewhere; one that cannot be imported, but leaves parts of it behind."""
    elsewhere = replace(lesson("quick"), places={"quick": ("/elsewhere/quick.py",)})
    assert taught(elsewhere) == [Unfit(name="quick", why="imports another `quick` than the script")]
    assert taught(lesson("half")) == [Unfit(name="half", why="")]


def lesson(*names: str) -> Lesson:
    return Lesson(entry=(), parts=tuple(Part(name=name) for name in names))


def taught(*lessons: Lesson) -> list[object]:
    """What an understudy says to these."""
    standby, words = Standby(), []
    theirs = standby.open()
    pid = os.fork()
    if pid == 0:
        try:
            Understudy(theirs, os.getppid(), be_reserve=lambda *_: 0).serve()
        finally:
            os._exit(1)
    theirs.close()
    try:
        for one in lessons:
            standby.teach(one, in_a_hurry=True)
            words.append(until(standby.hear, "it says nothing"))
    finally:
        standby.pid = pid
        standby.dismiss()
        standby.leave()
        os.waitpid(pid, 0)
    return words

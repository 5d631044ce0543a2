"""Reports that tests make, of journals in tests/core/replays and of journals that they write."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from raylaunch.cli.html_report import page, run_report
from raylaunch.cli.html_report.outcome_text import RunEnd
from raylaunch.cli.html_report.report_facts import ReportFacts
from raylaunch.core.failures.failure import Failure
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    Finish,
    Launch,
    NodeJoined,
    NodeLost,
    Progressed,
    Stop,
    WorkersExited,
    WorkersStarted,
)
from raylaunch.core.record import journal, run_layout
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import end_state

REPLAYS = Path(__file__).parents[2] / "core" / "replays"
VOID = {"meta", "link", "br", "hr", "img", "input"}
BLOCKS = {"p", "li", "dt", "dd", "td", "th", "h1", "h2", "h3", "pre", "summary", "div", "span", "title"}


def done(exit_code: int = 0, why: str = "") -> RunEnd:
    return RunEnd(state=end_state(exit_code), exit_code=exit_code, why=why, is_alive=False)


def write_journal(folder: Path, entries: list[JournalEntry], **settings: Any) -> Path:
    """Write a run folder that has nothing but a journal."""
    job = Job(**{"entrypoint": Entrypoint(script="train.py"), **settings})
    folder.mkdir(parents=True, exist_ok=True)
    lines = [journal.header(job, "2026-01-01T12:00:00+00:00", versions={"raylaunch": "0.1.0"})]
    (folder / run_layout.EVENTS).write_text("".join(f"{line}\n" for line in (*lines, *map(journal.line, entries))))
    return folder


def replay_folder(folder: Path, name: str) -> Path:
    """Make a run folder of a recorded journal."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / run_layout.EVENTS).write_bytes((REPLAYS / f"{name}.jsonl").read_bytes())
    return folder


def facts(folder: Path, end: RunEnd | None = None, environ: dict[str, str] | None = None) -> ReportFacts:
    return run_report.collect(folder, "run-1", end or done(), environ or {})


def html(folder: Path, end: RunEnd | None = None, environ: dict[str, str] | None = None) -> str:
    return page.html(facts(folder, end, environ), "0.1.0")


def failed_run(**failure: Any) -> list[JournalEntry]:
    """A run on one node, whose rank 1 fails at last."""
    facts = {"attempt": 1, "rank": 1, "local_rank": 1, "pid": 42, "exit_code": -9, "node": "node-1", "at": 9.0}
    found = Failure(**facts | failure)
    why = f"rank 1 on node-1 {found.what}; no restarts were asked for"
    return [
        JournalEntry(event=None, actions=()),
        JournalEntry(
            event=NodeJoined(at=2.0, node="node-1", address="10.0.0.1", nproc=2),
            actions=(Launch(attempt=1, roster=("node-1",), why="1 of 1 nodes"),),
        ),
        JournalEntry(event=WorkersStarted(at=3.0, attempt=1, node="node-1"), actions=()),
        JournalEntry(event=Progressed(at=4.0, attempt=1, marks=1, low=0, high=0, marked=4.0), actions=()),
        JournalEntry(event=Progressed(at=8.0, attempt=1, marks=41, low=40, high=40, marked=8.0), actions=()),
        JournalEntry(
            event=WorkersExited(at=9.0, attempt=1, node="node-1", failures=(found,)),
            actions=(
                Stop(attempt=1, nodes=("node-1",), grace=1.0, why=why),
                Finish(exit_code=1, why=why),
            ),
        ),
    ]


def restarted_often(restarts: int) -> list[JournalEntry]:
    """A run on two nodes, of which a worker is killed each 10 s."""
    entries = [JournalEntry(event=NodeJoined(at=1.0, node="node-1", address="10.0.0.1", nproc=2), actions=())]
    joined = NodeJoined(at=2.0, node="node-2", address="10.0.0.2", nproc=2)
    launch = Launch(attempt=1, roster=("node-1", "node-2"), why="2 of 2 nodes")
    entries.append(JournalEntry(event=joined, actions=(launch,)))
    for number in range(1, restarts + 2):
        at = 10.0 * number
        entries += [
            JournalEntry(event=WorkersStarted(at=at + 0.1, attempt=number, node=node), actions=())
            for node in launch.roster
        ]
        entries += [
            JournalEntry(
                event=Progressed(at=at + later, attempt=number, marks=marks, low=marks, high=marks, marked=at + later),
                actions=(),
            )
            for later, marks in ((1.0, 1), (4.0, 30), (9.0, 80))
        ]
        failure = Failure(
            attempt=number, rank=3, local_rank=1, pid=42, exit_code=-9, node="node-2", at=at + 9.5, tail="x" * 400
        )
        why = f"rank 3 on node-2 was killed by SIGKILL; restart {number} of 5000"
        actions = (
            Stop(attempt=number, nodes=launch.roster, grace=0.0, why=why),
            Launch(attempt=number + 1, roster=launch.roster, why=why),
        )
        event = WorkersExited(at=at + 9.6, attempt=number, node="node-2", failures=(failure,))
        entries.append(JournalEntry(event=event, actions=actions if number <= restarts else ()))
    return entries


def many_nodes(nodes: int) -> list[JournalEntry]:
    """A run on many nodes, each tenth of which is lost."""
    names = tuple(f"node-{number}" for number in range(1, nodes + 1))
    entries = [
        JournalEntry(event=NodeJoined(at=1.0, node=name, address="10.1.2.3", nproc=8), actions=()) for name in names
    ]
    last = entries.pop()
    launch = Launch(attempt=1, roster=names, why="all are there")
    entries.append(JournalEntry(event=last.event, actions=(launch,)))
    entries += [JournalEntry(event=WorkersStarted(at=3.0, attempt=1, node=name), actions=()) for name in names]
    lost = names[::10]
    for number, name in enumerate(lost, start=2):
        left = tuple(each for each in names if each not in lost[: number - 1])
        why = f"{name} was lost: its host is gone"
        actions = (
            Stop(attempt=number - 1, nodes=left, grace=0.0, why=why),
            Launch(attempt=number, roster=left, why=why),
        )
        event = NodeLost(at=10.0 * number, node=name, why="its host is gone")
        entries.append(JournalEntry(event=event, actions=actions))
    return entries


class Page(HTMLParser):
    """What a browser would find in a page: its elements, and the text of each section by its id."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.sections: dict[str, str] = {}
        self._section = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"these are not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs).get("id") or "outcome"
            self.sections[self._section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in BLOCKS:
            self.handle_data(" ")
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
            if self._section:
                self.sections[self._section] += data

    def words(self, section: str) -> str:
        """The text of a section with single spaces."""
        return " ".join(self.sections[section].split())

"""The log of a run: everything in it can be read back, and leads to the same decisions when it is played again.

To add a replay: `python tests/core/replay_files.py add NAME runs/NAME/ID/events.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import replay_files
from hypothesis import given, settings
from hypothesis import strategies as st
from story import failed, failure, finished, job, joined, raised, started

from raylaunch.core import journal
from raylaunch.core.actions import Action, Finish, Launch
from raylaunch.core.events import Event, Turnover
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.job import Entrypoint, Job, RayOptions
from raylaunch.core.journal import Entry
from raylaunch.core.stacks import StackGroup
from raylaunch.errors import ExitCode

FIXED = settings(derandomize=True, deadline=None, database=None, max_examples=40)

texts = st.text(max_size=8)
times = st.floats(0, 1e9)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | times | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("is", "x")), inner | texts),
    max_leaves=4,
)
errors = st.builds(
    WorkerError,
    type=texts,
    message=texts,
    traceback=texts,
    hopeless=st.booleans(),
    from_file=st.booleans(),
    timestamp=st.integers(0, 2**40),
    written=texts,
)
failures = st.builds(
    Failure,
    attempt=st.integers(1, 9),
    node=texts,
    rank=st.integers(0, 99),
    local_rank=st.integers(0, 7),
    pid=st.integers(1, 99999),
    at=times,
    exit_code=st.integers(-64, 255),
    error=st.none() | errors,
    evidence=texts,
    tail=texts,
    host=texts,
    error_file=texts,
    spoilt=texts,
)
groups = st.builds(
    StackGroup,
    ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    frames=st.lists(texts, max_size=2).map(tuple),
    note=texts,
)
turnovers = st.builds(Turnover, ordered=times, ended=times, forked=times)
jobs = st.builds(
    Job,
    entrypoint=st.builds(
        Entrypoint,
        script=texts,
        args=st.lists(anything, max_size=3),
        kwargs=st.dictionaries(st.sampled_from(("is", "x")), anything),
    ),
    nnodes=st.just(2) | st.just("1:4"),
    env=st.dictionaries(texts, texts, max_size=2),
    preload=st.just("auto") | st.lists(texts, max_size=2),
    ray=st.builds(RayOptions, address=texts, working_dir=st.none() | texts),
)


def value(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any event or action of this kind."""
    by_type = {
        "float": times,
        "int": st.integers(0, 200),
        "int | None": st.none() | st.integers(0, 200),
        "str": texts,
        "tuple[int, ...]": st.lists(st.integers(1, 99), max_size=3).map(tuple),
        "tuple[str, ...]": st.lists(texts, max_size=3).map(tuple),
        "tuple[Failure, ...]": st.lists(failures, max_size=2).map(tuple),
        "Turnover | None": st.none() | turnovers,
        "tuple[StackGroup, ...]": st.lists(groups, max_size=2).map(tuple),
    }
    return st.builds(kind, **{field.name: by_type[str(field.type)] for field in dataclasses.fields(kind)})


def there_and_back(of: Job, *entries: Entry) -> tuple[Job, list[Entry]]:
    return journal.read([journal.header(of, "2026-01-01T00:00:00+00:00"), *map(journal.line, entries)])


# There and back.


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_event_comes_back(kind):
    """Whatever is in it, it is equal to what was written."""

    @FIXED
    @given(value(kind))
    def check(event: Event) -> None:
        entry = Entry(event=event, actions=())
        assert there_and_back(job(), entry) == (job(), [entry])

    check()


@pytest.mark.parametrize("kind", get_args(Action))
def test_every_action_comes_back(kind):
    """Alone, and two of them."""

    @FIXED
    @given(value(kind), value(kind))
    def check(one: Action, two: Action) -> None:
        entries = [Entry(event=None, actions=(one,)), Entry(event=None, actions=(one, two))]
        assert there_and_back(job(), *entries) == (job(), entries)

    check()


@FIXED
@given(jobs)
def test_every_job_comes_back(of):
    """Lists stay lists, and people's own values stay as they are, even such as look like ours."""
    assert there_and_back(of) == (of, [])


@pytest.mark.parametrize("theirs", [{"is": "Job"}, [{"is": "Tick", "at": 1}], {"is": "Stop", "x": [1]}])
def test_values_of_people_are_not_taken_for_ours(theirs):
    """A keyword argument may look like one of our objects."""
    of = Job(entrypoint=Entrypoint(function="a:b", args=[theirs], kwargs={"theirs": theirs}), env={"is": "Job"})
    assert there_and_back(of) == (of, [])


def test_an_entry_is_one_line():
    """Whatever newlines a traceback has."""
    entry = Entry(event=failed("a", **raised("ValueError", "one\ntwo\u2028three")), actions=())
    text = journal.line(entry)
    assert "\n" not in text
    assert len(text.splitlines()) == 1
    assert set(json.loads(text)) == {"event", "actions"}


def test_exit_codes_are_numbers():
    """The log is for other programs too."""
    text = journal.line(Entry(event=None, actions=(Finish(exit_code=ExitCode.UNAVAILABLE, why="no nodes"),)))
    assert json.loads(text)["actions"] == [{"is": "Finish", "exit_code": 3, "why": "no nodes"}]


def test_the_first_line_has_the_job_and_the_time():
    """The wall-clock time at which `at` is 0."""
    head = json.loads(journal.header(job(), "2026-01-01T00:00:00+00:00"))
    assert head["began"] == "2026-01-01T00:00:00+00:00"
    assert (head["job"]["is"], head["job"]["entrypoint"]["script"]) == ("Job", "train.py")


# What is not whole.


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_a_last_line_that_was_cut_off_is_left_out(kept):
    """A full disk or a kill takes the end of it; the rest can be read."""
    whole = Entry(event=joined("a"), actions=(Launch(attempt=1, roster=("a",), why="1 of 1 nodes"),))
    cut = journal.line(Entry(event=failed("a"), actions=()))[:kept]
    assert journal.read([journal.header(job(), ""), journal.line(whole), cut]) == (job(), [whole])


@pytest.mark.parametrize("lines", [[], [""], ["hello"], ["{}"], ["[]"], ['{"event": null, "actions": []}']])
def test_other_files_are_not_logs(lines):
    """Said as an error, not as an empty run."""
    with pytest.raises(ValueError, match="not an event log: the first line names no job"):
        journal.read(lines)


# Played again.


def test_playing_begins_before_the_first_event():
    """The machine's first orders are an entry of their own."""
    first, second = journal.replay(job(1), [joined("a", 1.0)])
    assert (first.event, [type(action).__name__ for action in first.actions]) == (None, ["WakeAt"])
    assert second.actions[0] == Launch(attempt=1, roster=("a",), why="1 of 1 nodes; a joined")


def test_there_are_replays():
    """At least one, or the next test would be empty."""
    assert replay_files.files()


@pytest.mark.parametrize("file", replay_files.files(), ids=lambda file: file.stem)
def test_replays_lead_to_the_same_decisions(file):
    """Each log of a real or a written run is decided today as it was then."""
    of, entries = journal.read(file.read_text(encoding="utf-8").splitlines())
    assert journal.replay(of, [entry.event for entry in entries if entry.event is not None]) == entries


@pytest.mark.parametrize("file", replay_files.files(), ids=lambda file: file.stem)
def test_replays_name_no_machine(file):
    """No folders of whoever made them."""
    text = file.read_text(encoding="utf-8")
    assert replay_files.without_paths(text) == text


def test_a_run_becomes_a_replay(tmp_path):
    """Its paths are shortened, and its events decided by the present machine."""
    logs = {"stdout": "/home/ana/runs/x/attempt-1/rank-1/stdout.log", "stderr": "/home/ana/my.log"}
    events = [joined("a"), started("a"), failed("a", 5.0, **logs), started("a", attempt=2), finished("a", attempt=2)]
    of = Job(entrypoint=Entrypoint(script="/home/ana/train.py"), max_restarts=1)
    source, target = tmp_path / "events.jsonl", tmp_path / "replay.jsonl"
    replay_files.write(source, of, events)
    replay_files.decide_anew(source, target)
    assert "/home" not in target.read_text(encoding="utf-8")
    found, entries = journal.read(Path(target).read_text(encoding="utf-8").splitlines())
    assert found.entrypoint.script == "/job/train.py"
    (told,) = (entry.event.failures for entry in entries if getattr(entry.event, "failures", ()))
    assert told == (failure("a", 5.0, stdout="/job/attempt-1/rank-1/stdout.log", stderr="/job/my.log"),)
    assert entries[-1].actions == (Finish(exit_code=0, why="all 2 workers finished"),)


def test_a_failure_in_an_older_log_can_be_read():
    """A field that it does not have yet has no value."""
    known = failure("a", 1.0, **raised("ValueError"))
    told = journal.encode(known)
    for name in ("host", "error_file", "spoilt"):
        del told[name]
    for name in ("from_file", "timestamp", "written"):
        del told["error"][name]
    assert journal.decode(told) == known

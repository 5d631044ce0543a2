"""The journal of a run: all values can be read back, and replaying the events gives the same actions.

To add a replay: `python tests/core/replay_files.py add NAME runs/NAME/ID/events.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import replay_files
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import failed, failure, finished, job, joined, raised, started

from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from raylaunch.core.machine.events_and_actions import (
    Action,
    Event,
    Finish,
    Launch,
    ReportUnsaved,
    UnreachablePeer,
    WorkersStarted,
)
from raylaunch.core.machine.measured import CommitRate, NodeMemory, RestartTimings
from raylaunch.core.placement.devices import GpuUse
from raylaunch.core.record import journal
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import ExitCode
from tests.profiles import examples

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
    killed_with=texts,
)
groups = st.builds(
    StackGroup,
    ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    frames=st.lists(texts, max_size=2).map(tuple),
    note=texts,
)
timings = st.builds(RestartTimings, ordered=times, ended=times, forked=times)
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


commit_rates = st.builds(CommitRate, every=st.integers(1, 9), commit_seconds=times, step_seconds=times)
gpus = st.builds(GpuUse, rank=st.integers(0, 9), gpu=texts, used=st.integers(0, 9), total=st.integers(0, 9))
memories = st.builds(
    NodeMemory,
    node=texts,
    own=st.integers(0, 9),
    copies=st.integers(0, 9),
    files=st.integers(0, 9),
    gpus=st.lists(gpus, max_size=2).map(tuple),
)
peers = st.builds(UnreachablePeer, node=texts, peer=texts, why=texts)


def values_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for any event or action of this class."""
    by_type = {
        "float": times,
        "RunTime": times,
        "NodeTime": times,
        "int": st.integers(0, 200),
        "int | None": st.none() | st.integers(0, 200),
        "float | None": st.none() | times,
        "str": texts,
        "bool": st.booleans(),
        "HostId": texts,
        "NodeId": texts,
        "SignalName": texts,
        "tuple[int, ...]": st.lists(st.integers(1, 99), max_size=3).map(tuple),
        "tuple[NodeId, ...]": st.lists(texts, max_size=3).map(tuple),
        "tuple[Failure, ...]": st.lists(failures, max_size=2).map(tuple),
        "RestartTimings | None": st.none() | timings,
        "tuple[UnreachablePeer, ...]": st.lists(peers, max_size=2).map(tuple),
        "CommitRate | None": st.none() | commit_rates,
        "tuple[NodeMemory, ...]": st.lists(memories, max_size=2).map(tuple),
        "tuple[StackGroup, ...]": st.lists(groups, max_size=2).map(tuple),
    }
    return st.builds(kind, **{field.name: by_type[str(field.type)] for field in dataclasses.fields(kind)})


def write_and_read(a_job: Job, *entries: JournalEntry) -> tuple[Job, list[JournalEntry]]:
    return journal.read([journal.header(a_job, "2026-01-01T00:00:00+00:00"), *map(journal.line, entries)])


# Writing and reading.


@pytest.mark.parametrize("kind", get_args(Event))
@examples(40)
@given(data=st.data())
def test_every_event_is_read_back(kind, data):
    entry = JournalEntry(event=data.draw(values_of(kind)), actions=())
    assert write_and_read(job(), entry) == (job(), [entry])


@pytest.mark.parametrize("kind", get_args(Action))
@examples(40)
@given(data=st.data())
def test_every_action_is_read_back(kind, data):
    """One action in an entry, and two."""
    one, two = data.draw(values_of(kind)), data.draw(values_of(kind))
    entries = [JournalEntry(event=None, actions=(one,)), JournalEntry(event=None, actions=(one, two))]
    assert write_and_read(job(), *entries) == (job(), entries)


@examples(40)
@given(jobs)
def test_every_job_is_read_back(a_job):
    """Lists stay lists, and values of the user stay as they are, even if they look like encoded objects."""
    assert write_and_read(a_job) == (a_job, [])


@pytest.mark.parametrize("theirs", [{"is": "Job"}, [{"is": "Tick", "at": 1}], {"is": "Stop", "x": [1]}])
def test_user_values_are_not_decoded_as_objects(theirs):
    """An argument of a function may look like an encoded object of raylaunch."""
    a_job = Job(entrypoint=Entrypoint(function="a:b", args=[theirs], kwargs={"theirs": theirs}), env={"is": "Job"})
    assert write_and_read(a_job) == (a_job, [])


def test_entry_is_one_line():
    """Newlines in a traceback are escaped."""
    entry = JournalEntry(event=failed("a", **raised("ValueError", "one\ntwo\u2028three")), actions=())
    text = journal.line(entry)
    assert "\n" not in text
    assert len(text.splitlines()) == 1
    assert set(json.loads(text)) == {"event", "actions"}


def test_exit_codes_are_written_as_numbers():
    """Other programs read the journal too."""
    text = journal.line(JournalEntry(event=None, actions=(Finish(exit_code=ExitCode.UNAVAILABLE, why="no nodes"),)))
    assert json.loads(text)["actions"] == [{"is": "Finish", "exit_code": 3, "why": "no nodes"}]


def test_header_has_the_job_and_the_start_time():
    """`began` is the wall-clock time at which `at` is 0."""
    head = json.loads(journal.header(job(), "2026-01-01T00:00:00+00:00"))
    assert (head["began"], head["epoch"]) == ("2026-01-01T00:00:00+00:00", 1)
    assert head["job"]["entrypoint"]["script"] == "train.py"


# Incomplete files.


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_truncated_last_line_is_omitted(kept):
    """A full disk or a kill may truncate the last line."""
    whole = JournalEntry(event=joined("a"), actions=(Launch(attempt=1, roster=("a",), why="1 of 1 nodes"),))
    cut = journal.line(JournalEntry(event=failed("a"), actions=()))[:kept]
    assert journal.read([journal.header(job(), ""), journal.line(whole), cut]) == (job(), [whole])


@pytest.mark.parametrize("lines", [[], [""], ["hello"], ["{}"], ["[]"], ['{"event": null, "actions": []}']])
def test_other_files_are_not_journals(lines):
    """They raise an error, instead of being read as an empty run."""
    with pytest.raises(ValueError, match="not an event log: the first line names no job"):
        journal.read(lines)


# Replay.


def test_replay_begins_with_the_first_actions():
    """The actions of `Machine.start` are an entry without event."""
    first, second = journal.replay(job(1), [joined("a", 1.0)])
    assert (first.event, [type(action).__name__ for action in first.actions]) == (None, ["SetTimer"])
    assert second.actions[0] == Launch(attempt=1, roster=("a",), why="1 of 1 nodes; a joined")


def test_replay_folder_is_not_empty():
    """Else the next test would have no cases."""
    assert replay_files.files()


@pytest.mark.parametrize("file", replay_files.files(), ids=lambda file: file.stem)
def test_replays_give_the_same_actions(file):
    """The machine still gives the recorded actions for each journal, of real runs and of examples.

    raylaunch 0.1 had no `ReportUnsaved`. It does not affect the run, so a journal without any is compared without it.
    """
    text = file.read_text(encoding="utf-8")
    a_job, entries = journal.read(text.splitlines())
    decided = journal.replay(a_job, [entry.event for entry in entries if entry.event is not None])
    assert decided == entries or ("ReportUnsaved" not in text and without_report_unsaved(decided) == entries)


def without_report_unsaved(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Return the entries as raylaunch 0.1 would have written them."""
    return [
        JournalEntry(
            event=entry.event,
            actions=tuple(action for action in entry.actions if not isinstance(action, ReportUnsaved)),
        )
        for entry in entries
    ]


@pytest.mark.parametrize("file", replay_files.files(), ids=lambda file: file.stem)
def test_replays_contain_no_local_paths(file):
    text = file.read_text(encoding="utf-8")
    assert replay_files.without_paths(text) == text


def test_run_is_converted_to_a_replay(tmp_path):
    """Its paths are shortened, and the actions are those of the present machine."""
    logs = {"stdout": "/home/ana/runs/x/attempt-1/rank-1/stdout.log", "stderr": "/home/ana/my.log"}
    events = [joined("a"), started("a"), failed("a", 5.0, **logs), started("a", attempt=2), finished("a", attempt=2)]
    a_job = Job(entrypoint=Entrypoint(script="/home/ana/train.py"), max_restarts=1)
    source, target = tmp_path / "events.jsonl", tmp_path / "replay.jsonl"
    replay_files.write(source, a_job, events)
    replay_files.rewrite(source, target)
    assert "/home" not in target.read_text(encoding="utf-8")
    found, entries = journal.read(Path(target).read_text(encoding="utf-8").splitlines())
    assert found.entrypoint.script == "/job/train.py"
    (stored,) = (entry.event.failures for entry in entries if getattr(entry.event, "failures", ()))
    assert stored == (failure("a", 5.0, stdout="/job/attempt-1/rank-1/stdout.log", stderr="/job/my.log"),)
    assert entries[-1].actions == (Finish(exit_code=0, why="all 2 workers finished"),)


def test_an_older_journal_can_be_read():
    """Fields that it lacks get their defaults. In 0.1, objects in events had the key `is` too."""
    entry = JournalEntry(event=failed("a", 1.0, **raised("ValueError")), actions=())
    row = json.loads(journal.line(entry))
    (stored,) = row["event"]["failures"]
    for name in ("host", "error_file", "spoilt", "killed_with"):
        del stored[name]
    for name in ("from_file", "timestamp", "written"):
        del stored["error"][name]
    stored["is"], stored["error"]["is"] = "Failure", "WorkerError"
    assert journal.read_entry(json.dumps(row)) == entry


@pytest.mark.parametrize(("former", "name"), [("StopAsked", "StopRequested"), ("ForwardAsked", "ForwardRequested")])
def test_an_event_that_had_another_name(former, name):
    text = '{"event": {"is": "%s", "at": 1.0, "signal": "SIGTERM"}, "actions": []}'
    assert journal.read_entry(text % former) == journal.read_entry(text % name)


def test_a_field_that_had_another_name():
    text = (
        '{"event": {"is": "WorkersStarted", "at": 1, "attempt": 1, "node": "a", "turnover": '
        '{"is": "Turnover", "ordered": 1, "ended": 2, "forked": 3}}, "actions": []}'
    )
    assert journal.read_entry(text).event.timings == RestartTimings(ordered=1, ended=2, forked=3)


def test_what_a_driver_told_nodes_to_restore_is_left_out():
    """Nodes said what they held then, and the driver chose."""
    text = (
        '{"event": {"is": "WorkersStarted", "at": 1, "attempt": 2, "node": "a", "held": [{"rank": 0}], '
        '"awaits_commit": true}, "actions": [{"is": "RestoreCommit", "attempt": 2, "nodes": ["a"], "why": "w"}]}'
    )
    entry = journal.read_entry(text)
    assert (entry.event, entry.actions) == (WorkersStarted(at=1, attempt=2, node="a"), ())


def test_fields_of_a_later_version_are_left_out():
    """A journal of it can be read as far as it goes."""
    text = '{"event": {"is": "Tick", "at": 1.0, "new": {}}, "actions": []}'
    assert journal.read_entry(text).event.at == 1.0


def test_lines_of_a_run_that_goes_on():
    """The first line and each other one can be read alone."""
    a_job = job(1)
    header = journal.read_header(journal.header(a_job, "2026-01-01T00:00:00+00:00", 3.0, {"torch": "2.15"}))
    assert (header.job, header.began, header.clock) == (a_job, "2026-01-01T00:00:00+00:00", 3.0)
    assert header.versions == {"torch": "2.15"}
    entry = JournalEntry(event=joined("a"), actions=())
    assert journal.read_entry(journal.line(entry)) == entry


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "null", "[]", "{}", '{"event": null}', '{"event": 3, "actions": []}'),
        *('{"event": null, "actions": [3]}', '{"event": {"is": "FromTheFuture", "at": 3}, "actions": []}'),
        *('{"event": {"is": "Tick", "at": "x"}, "actions": []}', '{"event": {"is": "Tick"}, "actions": []}'),
        '{"event": null, "actions": {}}',
        '{"event": {"is": "Tick", "at": NaN}, "actions": []}',
        '{"event": {"is": "Tick", "at": 1%s}, "actions": []}' % ("0" * 400),
        '{"event": null, "actions": [{"is": "SetTimer", "at": -1%s, "why": ""}]}' % ("0" * 400),
        '{"event": {"is": "NodeLost", "at": 1.0, "node": 3, "why": "x"}, "actions": []}',
        '{"job": {"is": "Job", "nnodes": []}}',
    ],
)
def test_a_line_that_is_none_of_a_journal(text):
    """What is damaged, or of a later version, is a ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011
        journal.read_entry(text)
    with pytest.raises(ValueError):  # noqa: PT011
        journal.read_header(text)

"""Two or three agents without processes: files go to the next host, and to the nodes that have the ranks later."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType, SimpleNamespace

import pytest
from msgspec import msgpack

from raylaunch.capabilities.state import file_copies
from raylaunch.capabilities.state.agent import StateCopies
from raylaunch.capabilities.state.file_copies import FileFetches
from raylaunch.capabilities.state.sections import StateGoal, StateStatus
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Assignment, Member, assign
from raylaunch.node.linux.ram_folder import RamFolder
from raylaunch.node.state import fast_dir, transfer
from raylaunch.node.state.fast_dir import FastDir, FilesOwner, FileStamp
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.state.transfer import CopyRefusedError
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime.files_wait import WAIT_VARIABLE
from tests.fakes import agent_port
from tests.node.harness import until

SECRET = "1" * 64
JOB = Job(entrypoint=Entrypoint(script="train.py"))


@dataclass
class Spec:
    """What a worker is started from."""

    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Side:
    """One agent's part, on a host of its own."""

    name: str
    most: int | None = None
    reports: list[StateStatus | str] = field(default_factory=list)
    """What it tells the driver, and a person, but where it serves."""

    def __post_init__(self) -> None:
        self.page, self.fd = SharedPage.create()
        self.ram_folder = RamFolder()
        self.ram_folder.create()
        self.memory = StateMemory(self.page, "", self.most, self.ram_folder)
        self.folder = self.memory.files.folder
        port = agent_port(
            spec=SimpleNamespace(node=NodeId(self.name), copy_secret=SECRET, job=JOB),
            address="127.0.0.1",
            memory=self.memory,
            call=lambda work: work(),
            tell=lambda section: self.reports.append(msgpack.decode(section, type=StateStatus)),
            warn=self.reports.append,
        )
        self.copies = StateCopies(port)
        self.address = self.reports.pop().at

    def write(self, name: str, text: str = "") -> None:
        """Write a file as careful scripts do: under another name first."""
        path = Path(self.folder.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(text or name)
        os.replace(path.with_suffix(".new"), path)

    def files(self, node: str = "") -> dict[str, str]:
        folder, found = self.folder.folder(node), {}
        for name in fast_dir.scan(folder) if os.path.isdir(folder) else ():
            with contextlib.suppress(FileNotFoundError):  # it is removed meanwhile
                found[name] = Path(folder, name).read_text()
        return found

    @property
    def why(self) -> str:
        return "\n".join(each for each in self.reports if isinstance(each, str))

    def copy_to(self, attempt: int, target: CopyAddress) -> None:
        self.copies.shown(msgpack.encode(StateGoal(attempt=attempt, copies_to=target)))

    def is_ready(self, attempt: int) -> bool:
        return self.page.numbers[fields.FILES_READY] == attempt

    def close(self) -> None:
        self.copies.close()
        self.memory.close()
        self.ram_folder.remove()
        os.close(self.fd)


@pytest.fixture
def made() -> Iterator[list[Side]]:
    found: list[Side] = []
    yield found
    for side in found:
        side.close()
    assert not [side.folder.root for side in found if os.path.exists(side.folder.root)]


@pytest.fixture
def start(made: list[Side]):
    def make(name: str, most: int | None = None) -> Side:
        made.append(Side(name, most))
        return made[-1]

    return make


def launch(attempt: int, *sides: Side, peers: tuple[Side, ...] | None = None, nproc: int = 1) -> list[bool]:
    """Begin an attempt, in which each node copies to the next one. Return whether its workers wait."""
    members = [Member(node=NodeId(side.name), address="", nproc=nproc, host=side.name) for side in sides]
    served = tuple(side.address for side in (sides if peers is None else peers))
    return [
        begin(side, part, None if target is side else target.address, served)
        for side, target, part in zip(sides, (*sides[1:], sides[0]), assign(attempt, members), strict=True)
    ]


def begin(side: Side, part: Assignment, target: CopyAddress | None, peers: tuple[CopyAddress, ...]) -> bool:
    side.copies.shown(msgpack.encode(StateGoal(attempt=part.attempt, copies_to=target, peers=peers)))
    (spec,) = side.copies.workers(part, (Spec(),))
    assert spec.env.get(WAIT_VARIABLE) in (None, str(part.attempt))
    return WAIT_VARIABLE in spec.env


def test_files_are_copied_to_the_next_host_as_they_change_and_go(start):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    first.write("step-1/model")
    first.write("latest", "1")
    until(lambda: second.files("a") == {"step-1/model": "step-1/model", "latest": "1"}, "copies")
    assert first.reports == [StateStatus(at=first.address, has_files=True)]
    first.write("step-2/model")
    first.write("latest", "2")
    Path(first.folder.path, "step-1/model").unlink()
    until(lambda: second.files("a") == {"step-2/model": "step-2/model", "latest": "2"}, "the change to be copied")
    until(lambda: first.memory.usage("a").files == 13, "its size to be known")
    until(lambda: second.memory.usage("b").copies == 13, "the size of copies to be known")
    assert (first.why, second.why, second.files()) == ("", "", {})
    status = os.stat(os.path.join(first.folder.path, "latest"))
    copied = os.stat(os.path.join(second.folder.folder("a"), "latest"))
    assert copied.st_mtime_ns == status.st_mtime_ns


def test_a_file_that_is_being_written_is_not_copied_and_its_last_version_stays(start):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    first.write("model", "old")
    until(lambda: second.files("a") == {"model": "old"}, "a copy")
    with open(os.path.join(first.folder.path, "model"), "w") as file:
        file.write("half")
        file.flush()
        first.write("other")
        until(lambda: "other" in second.files("a"), "another copy")
        assert second.files("a")["model"] == "old"
        file.write(" and whole")
    until(lambda: second.files("a")["model"] == "half and whole", "the new version")


def test_the_node_that_gets_the_ranks_of_a_lost_one_has_its_files(start):
    """Here the neighbour, which has them as copies; and the others shift by one rank, too."""
    sides = first, second, third = start("a"), start("b"), start("c")
    launch(1, *sides, peers=())
    for rank, side in enumerate(sides):
        side.write(f"rank-{rank}")
    for rank, (side, after) in enumerate(zip(sides, (*sides[1:], sides[0]), strict=True)):
        until(lambda after=after, side=side: after.files(side.name), f"a copy of rank {rank}")
    first.copies.close()
    assert launch(2, second, third) == [True, True]
    until(lambda: second.is_ready(2) and third.is_ready(2), "both to be complete")
    assert second.files() == {"rank-0": "rank-0", "rank-1": "rank-1"}
    assert third.files().items() >= {"rank-1": "rank-1", "rank-2": "rank-2"}.items()  # and what b has just got
    assert launch(3, second, third) == [False, False]  # nothing has changed
    until(lambda: third.files("b") == second.files(), "both files to be copied again")


def test_files_come_from_another_host_and_a_new_node_gets_those_of_the_rank_that_state_would_restore(start):
    first, second, third = start("a"), start("b"), start("c")
    launch(1, first, second, peers=())
    first.write("rank-0", "older")
    second.write("rank-1")
    until(lambda: first.files("b") and second.files("a"), "copies")
    first.write("rank-0", "newest")
    launch(2, first, second, third)
    until(lambda: third.is_ready(2), "the new node to be complete")
    assert third.files() == {"rank-0": "newest"}  # rank 2 modulo 2
    assert (first.files(), second.files()) == ({"rank-0": "newest"}, {"rank-1": "rank-1"})


def test_a_script_that_overwrites_a_file_in_place_does_not_change_the_copy_of_another_node(start):
    """It has got the file from that copy, with the rank of the other node, which goes on with another rank."""
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    first.write("snapshot", "old")
    until(lambda: second.files("a") == {"snapshot": "old"}, "a copy")
    launch(2, second, first)
    until(lambda: first.is_ready(2) and second.is_ready(2), "the workers to begin")
    assert second.files() == {"snapshot": "old"}
    Path(second.folder.path, "snapshot").write_text("new")
    until(lambda: first.files("b") == {"snapshot": "new"}, "a copy of the new one")
    assert (first.files(), second.files("a")) == ({"snapshot": "old"}, {"snapshot": "old"})


def test_of_two_files_with_the_same_name_the_newer_one_stays(start):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    for side in (first, second):
        side.write("older")
        side.write("newer")
    until(lambda: len(second.files("a")) == 2, "copies")
    for name, seconds in (("older", -100), ("newer", 100)):
        for folder in (first.folder.path, second.folder.folder("a")):
            path = Path(folder, name)
            path.write_text("of a")
            os.utime(path, (time.time() + seconds, time.time() + seconds))
    first.copies.close()
    launch(2, second, peers=(second,))
    until(lambda: second.is_ready(2), "it to be complete")
    assert second.files() == {"older": "older", "newer": "of a"}


def test_what_cannot_be_fetched_is_said_and_workers_begin_without_it(start, monkeypatch):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    second.write("rank-1")
    until(lambda: first.files("b"), "a copy")
    launch(1, first)
    monkeypatch.setattr(FastDir, "link", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    members = [Member(node=NodeId(name), address="", nproc=1, host=name) for name in ("x", "a")]
    assert begin(first, assign(2, members)[1], None, (first.address,))
    until(lambda: first.is_ready(2), "the workers to begin")
    assert "a does not have all files of its ranks in RAYLAUNCH_FAST_DIR" in first.why
    assert first.folder.own.attempt == 1  # so the next attempt tries again


def test_copies_are_limited_and_what_has_none_is_said(start):
    first, second = start("a"), start("b", most=100_000)
    launch(1, first, second, peers=())
    first.write("small")
    first.write("large", "x" * 200_000)
    until(lambda: "`state_memory`" in first.why, "it to be said")
    until(lambda: second.files("a") == {"small": "small"}, "the small one to be copied")
    first.write("large", "y" * 200_000)
    first.write("last")
    until(lambda: "last" in second.files("a"), "it to go on")
    assert "a has no copy of files on b" in first.why
    assert second.memory.files.reserve((0, 0), 99_995) != ""  # what `State` may use is less by what copies use


def test_a_node_without_room_for_any_file_says_so(start):
    first, second = start("a"), start("b", most=1)
    launch(1, first, second, peers=())
    first.write("file")
    until(lambda: "`state_memory`" in first.why, "it to be said")
    assert second.files("a") == {}


def test_what_was_refused_is_offered_again(start, monkeypatch):
    monkeypatch.setattr(file_copies, "_REFUSED_SECONDS", 0.5)
    first, second = start("a"), start("b", most=1)
    launch(1, first, second, peers=())
    first.write("file")
    until(lambda: "`state_memory`" in first.why, "it to be said")
    second.memory.files._most_bytes = 10**9  # noqa: SLF001
    until(lambda: second.files("a") == {"file": "file"}, "a copy")


def test_an_agent_that_cannot_be_reached_is_named(start, monkeypatch):
    """Not at once: where its host is lost, the driver names another one."""
    patience = 0.5
    monkeypatch.setattr(file_copies, "_FAILING_SECONDS", patience)
    first, second, third = start("a"), start("b"), start("c")
    launch(1, first, second, peers=())
    gone = replace(second.address, port=1)
    first.write("file")
    until(lambda: second.files("a"), "a copy")
    first.copy_to(1, gone)
    began = time.monotonic()
    until(lambda: first.why, "it to be said")
    assert time.monotonic() - began > patience
    assert "a has no copy of files on b: [Errno 111] Connection refused" in first.why
    first.copy_to(1, third.address)
    until(lambda: third.files("a") == {"file": "file"}, "a copy on another host")
    assert first.why.count("\n") == 0


def test_files_are_looked_for_often_though_others_were_slow_to_come(start, monkeypatch):
    """A busy machine takes seconds to fetch files. The script writes others soon after."""
    monkeypatch.setattr(file_copies, "_LOOK_SHARE", 0.005)
    monkeypatch.setattr(file_copies, "_MOST_LOOK_SECONDS", 10**6)
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    first.write("file")
    until(lambda: second.files("a"), "a copy")
    fetch = FileFetches.fetch

    def slow(self, *arguments):
        time.sleep(1.0)
        fetch(self, *arguments)

    monkeypatch.setattr(FileFetches, "fetch", slow)
    launch(3, first, second)
    until(lambda: first.is_ready(3), "the workers to begin")
    until(lambda: second.is_ready(3), "the workers to begin")
    time.sleep(1.0)  # it has looked once more
    first.write("file", "new")
    until(lambda: second.files("a") == {"file": "new"}, "it to be copied")


def test_too_many_files_are_not_copied(start, monkeypatch):
    monkeypatch.setattr(fast_dir, "MOST_FILES", 3)
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    for number in range(5):
        first.write(f"file-{number}")
    until(lambda: "more than 3 files, which are not copied" in first.why, "it to be said")


def test_links_and_devices_are_not_copied(start):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    os.symlink("/etc/passwd", os.path.join(first.folder.path, "link"))
    os.symlink("/etc", os.path.join(first.folder.path, "folder"))
    os.mkfifo(os.path.join(first.folder.path, "fifo"))
    first.write("file")
    until(lambda: second.files("a") == {"file": "file"}, "a copy")


def owner(node: str) -> FilesOwner:
    return FilesOwner(node=node, attempt=1, first_rank=0, nproc=1, world_size=1)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "x\0y", "x" * 5000])
def test_names_from_another_host_stay_below_the_folder(start, name):
    side = start("a")
    for request in ({"do": "put", "stamp": FileStamp(1, 1)}, {"do": "get"}):
        with pytest.raises((OSError, CopyRefusedError)), transfer.connection(side.address, SECRET) as line:
            transfer.ask(line, NoneType, **request, node="b", name=name)
    for request in ({"do": "list", "node": name or ".."}, {"do": "finish", "owner": owner(name)}):
        with pytest.raises((OSError, CopyRefusedError)), transfer.connection(side.address, SECRET) as line:
            transfer.ask(line, NoneType, **request)
    assert side.files() == {}


@pytest.mark.parametrize("node", ["", "..", "a/b", "/"])
def test_no_other_agent_changes_the_folder_itself(start, node):
    side = start("a")
    side.write("file")
    for request in (
        {"do": "offer", "owner": owner(node)},
        {"do": "finish", "owner": owner(node)},
        {"do": "put", "node": node, "name": "file", "stamp": FileStamp(0, 1)},
    ):
        with pytest.raises(OSError), transfer.connection(side.address, SECRET) as line:  # noqa: PT011
            transfer.ask(line, NoneType, **request)
    assert side.files() == {"file": "file"}


def test_a_link_in_the_place_of_a_subfolder_is_not_followed(start, tmp_path):
    side = start("a")
    os.makedirs(side.folder.folder("b"))
    os.symlink(tmp_path, os.path.join(side.folder.folder("b"), "sub"))
    with transfer.connection(side.address, SECRET) as line:
        transfer.ask(line, NoneType, "put", node="b", name="sub/x", stamp=FileStamp(1, 1))
        checksum = 0xD87F7E0C  # of "test", so wrong: the file is refused even before it is placed
        line.sendall(b"x" + transfer.TRAILER.pack(True, checksum))
        with pytest.raises(CopyRefusedError, match="checksum"):
            transfer.read_answer(line, NoneType)
        transfer.ask(line, NoneType, "put", node="b", name="sub/x", stamp=FileStamp(0, 1))
        line.sendall(transfer.TRAILER.pack(True, 0))
        with pytest.raises(CopyRefusedError):
            transfer.read_answer(line, NoneType)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b'{"do": "x"}',
        b'{"do": "offer", "owner": {}}',
        b'{"do": "offer", "owner": {"node": "b", "attempt": 1, "first_rank": 0, "nproc": 1, "world_size": 0}}',
        b'{"do": "push", "part": {"rank": 0}}',
        b'{"do": "get", "node": "b", "name": 5}',
        b"[" * 100_000,
    ],
)
def test_nonsense_ends_the_connection_and_nothing_else(start, body):
    side = start("a")
    with transfer.connection(side.address, SECRET) as line:
        line.sendall(len(body).to_bytes(4, "big") + body)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(1) == b""
    with transfer.connection(side.address, SECRET) as line:
        assert transfer.ask(line, dict[str, FilesOwner], "owners", before=9) == {}


def test_copies_that_nobody_uses_any_more_are_removed(start, monkeypatch):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    first.write("rank-0")
    until(lambda: second.files("a"), "a copy")
    first.copies.close()
    monkeypatch.setattr(file_copies, "_KEPT_SECONDS", 0.5)
    launch(2, second, peers=(second,))
    until(lambda: second.is_ready(2), "it to be complete")
    until(lambda: "a" not in second.folder.owners(), "copies to be removed")
    assert second.files() == {"rank-0": "rank-0"}
    assert not os.path.exists(os.path.join(second.folder.root, "copies", "a"))


def test_an_agent_takes_over_the_folder_of_one_that_was_killed(start):
    first, second = start("a"), start("b")
    launch(1, first, second, peers=())
    first.write("rank-0")
    until(lambda: second.files("a"), "a copy")
    second.copies.close()
    heir = start("c")
    heir.folder.adopt(second.folder.root)
    assert (heir.files("a"), heir.folder.own.node) == ({"rank-0": "rank-0"}, "b")
    assert not os.path.exists(second.folder.root)


def test_a_file_that_changes_while_it_is_sent_is_not_taken(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    ours, theirs = socket.socketpair()
    with ours, theirs, path.open("rb") as file:
        assert not transfer.send_file(ours, file.fileno(), 20, lambda: False)
        with (tmp_path / "copy").open("wb") as copy, pytest.raises(OSError, match="changed while it was copied"):
            transfer.receive_file(theirs, copy.fileno(), 20)


def test_owners_are_kept_for_an_agent_that_follows(start):
    side = start("a")
    launch(1, side, peers=())
    found = json.loads(Path(side.folder.root, "owners.json").read_text())
    assert found["owners"][""] == {"node": "a", "attempt": 1, "first_rank": 0, "nproc": 1, "world_size": 1}

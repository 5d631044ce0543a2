"""What a survivor does between two attempts, with this process as survivor and supervisor, and without torch."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from raylaunch.worker.heartbeats import heartbeat_writer, shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime import files_wait
from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.light_commits import LightCommits
from raylaunch.worker.survivors.made_groups import MadeGroups
from raylaunch.worker.survivors.survivor import Survivor
from raylaunch.worker.survivors.survivor_link import Rejoin, SurvivorWord

SLOT = shared_page.slot_offset(0)


def nothing() -> None:
    """Do nothing."""


class Groups(MadeGroups):
    """Calls functions of the test in the place of torch's."""

    on_forget: Callable[[], None] = staticmethod(nothing)
    on_make: Callable[[], None] = staticmethod(nothing)

    def forget(self) -> None:
        self.on_forget()

    def make_group(self, backend: str | None) -> None:
        self.on_make()


class Writer(HeartbeatWriter):
    """Calls a function of the test whenever the survivor, which waits, says that it is alive."""

    on_alive: Callable[[], None] = staticmethod(nothing)

    def record_alive(self) -> None:
        super().record_alive()
        self.on_alive()


class Light(LightCommits):
    """Calls a function of the test with the inode of the file in which the last commit is completed; 0: it has none."""

    on_complete: Callable[[int], None] = staticmethod(lambda _: None)
    inode = 0
    newest = 0

    def use(self, fd: int, newest: int) -> None:
        self.inode, self.newest = os.fstat(fd).st_ino, newest
        super().use(fd, newest)

    def complete(self) -> None:
        self.on_complete(self.inode)
        self.inode = 0
        super().complete()


class Node:
    """A survivor of attempt 1, and what its node does."""

    def __init__(self, groups: MadeGroups | None = None) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")
        listener.listen()
        self.page, self._fd = SharedPage.create()
        self.page.reset(1, 1)
        os.environ[survivor_link.ADDRESS_VARIABLE] = listener.getsockname()[1:].decode()
        os.environ[shared_page.PAGE_VARIABLE] = f"/proc/{os.getpid()}/fd/{self._fd}:0"
        self.groups, self.writer = Groups(), Writer(self.page.numbers, SLOT)
        self.light = Light()
        self.survivor = Survivor(groups or self.groups, self.writer, self.light)
        self._supervisor, _ = listener.accept()
        self._said: list[tuple[str, int]] = []
        listener.close()

    def order(self, attempt: int, *removed: str, file: int | None = None, **env: str) -> None:
        env |= {heartbeat_writer.ATTEMPT_VARIABLE: str(attempt)}
        order = Rejoin(
            attempt=attempt, env=env, removed=[*removed], title="", stdout="", stderr="", newest=attempt * 10
        )
        socket.send_fds(self._supervisor, [survivor_link.encode(order)], [] if file is None else [file])

    def announced(self) -> int:
        """Have the survivor say that it can stay. Return how many seconds it may take to leave its attempt."""
        self.survivor.announce()
        return SurvivorWord(**json.loads(self._supervisor.recv(survivor_link.MESSAGE_BYTES))).seconds

    def heard(self) -> list[tuple[str, int]]:
        """Return what the survivor has said so far."""
        while select.select([self._supervisor], [], [], 0)[0]:
            self._hear()
        return [*self._said]

    def _hear(self) -> None:
        word = SurvivorWord(**json.loads(self._supervisor.recv(survivor_link.MESSAGE_BYTES)))
        self._said.append((word.word, word.attempt))

    def begin(self, attempt: int) -> None:
        self.page.reset(attempt, 1)

    @property
    def has_taken_over(self) -> bool:
        """Whether the survivor has become a worker of the attempt that has begun."""
        return self.page.numbers[SLOT + shared_page.OWNER_PID] != 0

    def rejoin(self) -> list[tuple[str, int]]:
        """Have the survivor rejoin, and return what it has told the supervisor."""
        assert self.survivor.explains(ConnectionError("Connection closed by peer"))
        self.survivor.rejoin(None)
        while not self._said or self._said[-1][0] != "ready":
            self._hear()
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        self.survivor.close()
        self.light.close()
        self._supervisor.close()
        os.close(self._fd)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(os, "environ", os.environ | {heartbeat_writer.ATTEMPT_VARIABLE: "1"})
    found = Node()
    yield found
    found.close()


def test_an_error_whose_text_cannot_be_made_is_none_of_a_lost_peer(node):
    class NamelessError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert not node.survivor.explains(NamelessError())


def test_it_waits_for_the_files_of_its_rank(node):
    """It says that it is alive meanwhile. The script does not see that it had to wait."""
    waits, ready = [], []

    def wait() -> None:
        if node.has_taken_over:
            waits.append(os.environ["RANK"])
            node.page.numbers[shared_page.FILES_READY] = 2 if len(waits) > 2 else 1

    node.groups.on_forget = lambda: node.begin(2)
    node.writer.on_alive = wait
    node.groups.on_make = lambda: ready.append(node.page.numbers[shared_page.FILES_READY])
    node.order(2, RANK="1", **{files_wait.WAIT_VARIABLE: "2"})
    assert node.rejoin() == [("returned", 2), ("completed", 2), ("ready", 2)]
    assert (waits, ready) == (["1"] * 3, [2])
    assert files_wait.WAIT_VARIABLE not in os.environ


def test_it_does_not_wait_for_files_when_a_later_attempt_begins(node):
    made = []

    def fail() -> None:
        if node.has_taken_over:
            node.groups.on_forget = lambda: node.begin(3)
            node.writer.on_alive = nothing
            node.order(3, files_wait.WAIT_VARIABLE, RANK="0")

    node.groups.on_forget = lambda: node.begin(2)
    node.writer.on_alive = fail
    node.groups.on_make = lambda: made.append(os.environ["RANK"])
    node.order(2, RANK="1", **{files_wait.WAIT_VARIABLE: "2"})
    assert node.rejoin() == [("returned", 2), ("completed", 2), ("returned", 3), ("completed", 3), ("ready", 3)]
    assert made == ["0"]


def test_its_environment_is_that_of_the_attempt_though_one_before_has_not_begun(node):
    """The supervisor says what is different from the attempt before."""

    def fail() -> None:
        node.groups.on_forget = lambda: node.begin(3)
        node.order(3, "NEW", OLD="again", RANK="0")

    os.environ["OLD"] = "old"
    node.groups.on_forget = fail
    node.order(2, "OLD", WORLD_SIZE="2", NEW="new", RANK="1")
    assert node.rejoin() == [("returned", 2), ("completed", 2), ("returned", 3), ("completed", 3), ("ready", 3)]
    found = {name: os.environ.get(name) for name in ("WORLD_SIZE", "OLD", "NEW", "RANK")}
    assert found == {"WORLD_SIZE": "2", "OLD": "again", "NEW": None, "RANK": "0"}


def test_it_completes_its_last_commit_when_it_has_returned(node):
    """Then the fork server starts other workers meanwhile. It does so once, though another attempt begins then."""
    found = []

    def fail() -> None:
        node.groups.on_forget = lambda: node.begin(3)
        node.order(3)

    fd = os.memfd_create("test")
    node.light.on_complete = lambda inode: found.append((inode, node.heard()))
    node.groups.on_forget = fail
    node.order(2, file=fd)
    assert node.rejoin() == [("returned", 2), ("completed", 2), ("returned", 3), ("completed", 3), ("ready", 3)]
    first = [("returned", 2)]
    assert found == [(os.fstat(fd).st_ino, first), (0, [*first, ("completed", 2), ("returned", 3)])]
    assert node.light.newest == 20
    os.close(fd)


def test_without_a_file_it_completes_nothing(node):
    found = []
    node.light.on_complete = found.append
    node.groups.on_forget = lambda: node.begin(2)
    node.order(2)
    node.rejoin()
    assert found == [0]

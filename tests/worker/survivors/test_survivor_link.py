"""What survivors and their supervisor tell each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.survivor_link import Rejoin

ORDER = Rejoin(
    attempt=4, env={"RANK": "1", "NAME": "\udcff"}, removed=["OLD"], title="rank 1", stdout="/out", stderr=""
)


def test_there_is_no_connection_outside_a_launch(monkeypatch):
    monkeypatch.delenv(survivor_link.ADDRESS_VARIABLE, raising=False)
    assert survivor_link.connect() is None
    monkeypatch.setenv(survivor_link.ADDRESS_VARIABLE, "nobody-listens-here")
    assert survivor_link.connect() is None


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The connection, at the supervisor and at the worker."""
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker.settimeout(60)
    yield supervisor, worker
    supervisor.close()
    worker.close()


def test_a_file_comes_with_the_order(ends):
    supervisor, worker = ends
    fd = os.memfd_create("test")
    socket.send_fds(supervisor, [survivor_link.encode(ORDER)], [fd])
    supervisor.send(survivor_link.encode(ORDER))
    order, given = survivor_link.receive_rejoin(worker)
    assert order == ORDER
    assert os.fstat(given).st_ino == os.fstat(fd).st_ino
    assert survivor_link.receive_rejoin(worker) == (ORDER, -1)
    os.close(given)
    os.close(fd)


def test_programs_that_a_worker_starts_do_not_get_the_file(ends):
    """`socket.recv_fds` ignores its flags in Python 3.11 and 3.12."""
    socket.send_fds(ends[0], [survivor_link.encode(ORDER)], [ends[0].fileno()])
    _, given = survivor_link.receive_rejoin(ends[1])
    found = os.get_inheritable(given)
    os.close(given)
    assert not found


def test_the_end_of_the_connection_is_an_error(ends):
    ends[0].close()
    with pytest.raises(EOFError):
        survivor_link.receive_rejoin(ends[1])


def test_a_socket_whose_descriptor_the_script_has_closed(ends, tmp_path):
    """What has its number now is neither written to, nor read from, nor closed."""
    _, worker = ends
    link = survivor_link.OwnSocket(worker)
    assert link.get() is worker
    number = worker.fileno()
    os.close(number)
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if mine.fileno() != number:
        os.dup2(mine.fileno(), number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        link.get()
    link.close()
    worker.close()
    assert os.fstat(number)
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)
    os.close(number)
    mine.detach() if mine.fileno() == number else mine.close()
    other.close()

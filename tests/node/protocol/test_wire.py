"""Messages between the supervisor and the fork server arrive complete, with their file descriptor, or not at all."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from raylaunch.node.protocol import wire

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = wire.pair()
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("size", [0, 31_000, 32_000, 33_000, 200_000, 300_000, 5_000_000])
def test_a_message_of_any_size_arrives_whole(ends: Ends, size: int) -> None:
    """Also one that is longer than the socket's buffer, before the other end reads."""
    wire.send(ends[0], b"x" * size)
    assert wire.receive(ends[1]) == (b"x" * size, None)


def test_messages_keep_their_order(ends: Ends) -> None:
    """Short messages do not overtake long ones."""
    sent = [b"x" * size for size in (10, 100_000, 20, 200_000, 30)]
    for message in sent:
        wire.send(ends[0], message)
    assert [wire.receive(ends[1])[0] for _ in sent] == sent


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_file_comes_with_its_message(ends: Ends, size: int) -> None:
    """A file descriptor arrives with its message, long or short."""
    fd = wire.memory_file("test", b"last words")
    wire.send(ends[0], b"x" * size, fd=fd)
    os.close(fd)
    message, received = wire.receive(ends[1])
    assert message == b"x" * size
    assert received is not None
    assert wire.read_all(received) == b"last words"


def test_messages_sent_before_a_close_arrive(ends: Ends) -> None:
    """Then `receive` raises EOFError."""
    wire.send(ends[0], "last")
    ends[0].close()
    assert wire.receive(ends[1]) == ("last", None)
    with pytest.raises(EOFError):
        wire.receive(ends[1])


def test_sending_to_a_closed_socket_raises(ends: Ends) -> None:
    """The error is OSError, and no file descriptor is leaked."""
    ends[1].close()
    for size in (10, 300_000):
        with pytest.raises(OSError, match="Broken pipe"):
            wire.send(ends[0], b"x" * size)


def test_a_memory_file_is_not_inherited() -> None:
    """Programs that a worker starts do not keep its report open."""
    fd = wire.memory_file("test", b"x" * 3_000_000)
    assert not os.get_inheritable(fd)
    assert len(wire.read_all(fd)) == 3_000_000


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_file_for_which_there_is_no_room_is_an_error(ends: Ends, size: int) -> None:
    """The file that comes with a message, or that has the message."""
    wire.send(ends[0], b"x" * size, fd=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            wire.receive(ends[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Which sockets of a process are shut down: those of its process groups and of their store, but none that listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from raylaunch.worker.survivors.broken_collectives import GroupSockets


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def connected(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return a listening socket, one that has connected to it, and the other end of that."""
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    ours = stack.enter_context(socket.create_connection(listening.getsockname()))
    theirs = stack.enter_context(listening.accept()[0])
    for sock in (ours, theirs):
        sock.settimeout(100)
    return listening, ours, theirs


def works(ours: socket.socket, theirs: socket.socket) -> bool:
    try:
        ours.sendall(b"x")
        return theirs.recv(1) == b"x"
    except OSError:
        return False


def test_connections_of_a_group_end_and_others_stay(stack):
    """gloo's listening socket stays too: gloo would end the process."""
    sockets = GroupSockets()
    _, *others = connected(stack)
    with sockets.opening():
        listening, *group = connected(stack)
    _, *later = connected(stack)
    sockets.shut_down(store_port=0)
    assert not works(*group)
    assert works(*others)
    assert works(*later)
    assert stack.enter_context(socket.create_connection(listening.getsockname()))


def test_connections_of_a_group_that_is_being_made_end(stack):
    """A rank waits there for one that has died before it could connect."""
    sockets = GroupSockets()
    _, *others = connected(stack)
    with sockets.opening():
        _, *group = connected(stack)
        sockets.shut_down(store_port=0)
    assert not works(*group)
    assert works(*others)


def test_connections_to_the_store_end(stack):
    """They were opened before the group."""
    listening, *store = connected(stack)
    GroupSockets().shut_down(listening.getsockname()[1])
    assert not works(*store)


def test_a_descriptor_that_belongs_to_another_socket_by_now_is_left_alone(stack):
    sockets = GroupSockets()
    with sockets.opening():
        _, ours, _ = connected(stack)
    fd = ours.detach()
    _, *others = connected(stack)
    assert others[0].fileno() != fd
    socket.socket(fileno=fd).close()
    duplicate = stack.enter_context(others[0].dup())
    assert duplicate.fileno() == fd
    sockets.shut_down(store_port=0)
    assert works(*others)

"""How agents find out whether they reach each other, on addresses of the loopback interface."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from raylaunch.capabilities.peers import agent
from raylaunch.capabilities.peers.agent import (
    PeerAddress,
    PeerGoal,
    PeerProbe,
    PeerStatus,
    why_unreachable,
)
from tests import profiles
from tests.fakes import agent_port


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(agent, "_PAUSE_SECONDS", 0.0)


class Peer:
    """One node: carries out a goal, and waits for the answer."""

    def __init__(self, address: str) -> None:
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.address = address
        self.probe = PeerProbe(agent_port(address=address, tell=self.answers.put_nowait))

    async def answer(self, goal: PeerGoal) -> PeerStatus:
        self.probe.shown(msgpack.encode(goal))
        return msgpack.decode(await asyncio.wait_for(self.answers.get(), 100), type=PeerStatus)

    async def listen(self, name: str) -> PeerAddress:
        answer = await self.answer(PeerGoal(check=1))
        return PeerAddress(node=name, address=self.address, port=answer.port, token=answer.token)


async def unreachable(*peers: PeerAddress) -> dict[str, str]:
    """Return which of these nodes another one cannot reach, and why."""
    answer = await Peer("127.0.0.9").answer(PeerGoal(check=7, peers=peers))
    assert answer.check == 7
    return dict(answer.unreachable)


def test_nodes_that_reach_each_other():
    async def check():
        one, other = Peer("127.0.0.2"), Peer("127.0.0.3")
        assert await unreachable(await one.listen("node-1"), await other.listen("node-2")) == {}
        one.probe.close()
        other.probe.close()

    asyncio.run(check())


def test_nodes_that_do_not(monkeypatch):
    """One refuses, one does not answer, at the address of one another program answers, or hangs up."""
    monkeypatch.setattr(agent, "CONNECT_SECONDS", 2.5)

    def answer(listening: socket.socket, *data: bytes) -> None:
        for part in data:
            connection, _ = listening.accept()
            connection.sendall(part)
            connection.close()

    async def check():
        found = {}
        with (
            socket.create_server(("127.0.0.2", 0)) as closed,
            socket.create_server(("127.0.0.2", 0)) as silent,
            socket.create_server(("127.0.0.2", 0)) as stranger,
            socket.create_server(("127.0.0.2", 0)) as rude,
        ):
            threads = [
                threading.Thread(
                    target=answer, args=(stranger, b"SSH-2.0-OpenSSH_9.2 and more, and still more", b"x" * 99)
                ),
                threading.Thread(target=answer, args=(rude, b"", b"x")),
            ]
            for thread in threads:
                thread.start()
            listening = {"closed": closed, "silent": silent, "stranger": stranger, "rude": rude}
            ports = {name: one.getsockname()[1] for name, one in listening.items()}
            closed.close()
            found = await unreachable(
                *(
                    PeerAddress(node=name, address="127.0.0.2", port=port, token="0" * 32)
                    for name, port in ports.items()
                )
            )
        assert found == {
            "closed": "127.0.0.2: Connection refused",
            "silent": "no answer from 127.0.0.2 within 2.5 s",
            "stranger": "another program answers at 127.0.0.2",
            "rude": "the connection to 127.0.0.2 was closed",
        }

    asyncio.run(check())


@pytest.mark.parametrize(("address", "port"), [("127.0.0.2", 2**70), ("127.0.0.2", -1), ("\udce9\x1b", 1), ("\0", 1)])
def test_what_is_no_address_is_not_reached(address, port):
    why = asyncio.run(why_unreachable(PeerAddress(node="a", address=address, port=port, token="0")))
    assert why.isprintable()
    assert why


def test_a_connection_that_succeeds_the_second_time(monkeypatch):
    """A single loss says nothing."""
    tries = []

    async def greeting(peer: PeerAddress) -> bytes:
        tries.append(peer.node)
        if len(tries) == 1:
            raise TimeoutError
        return b"0"

    monkeypatch.setattr(agent, "_greeting", greeting)
    assert asyncio.run(unreachable(PeerAddress(node="a", address="::1", port=1, token="0"))) == {}
    assert tries == ["a", "a"]


def test_a_node_without_descriptors_accuses_nobody(monkeypatch):
    async def fail(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(agent.asyncio, "open_connection", fail)
    assert asyncio.run(unreachable(PeerAddress(node="a", address="::1", port=1, token="0"))) == {}


def test_a_node_that_cannot_listen_says_so():
    """192.0.2.1 is an address of no machine (RFC 5737)."""

    async def check():
        return await Peer("192.0.2.1").answer(PeerGoal(check=3))

    assert asyncio.run(check()) == PeerStatus(check=3, port=0)


def test_strangers_at_the_port_of_a_probe():
    """They get what everybody gets, and what they send is not read. The port is closed in the end."""

    async def check():
        node = Peer("127.0.0.2")
        place = await node.listen("node-1")
        strangers = []
        for data in (b"", b"\0" * 100_000, b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(place.address, place.port)
            writer.write(data)
            strangers.append((reader, writer))
        assert await unreachable(place) == {}
        assert await strangers[0][0].read() == place.token.encode()
        node.probe.close()
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(place.address, place.port)
        for _, writer in strangers:
            writer.close()

    asyncio.run(check())


@profiles.examples(20)
@given(st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=8))
def test_whatever_strangers_send(sent):
    async def check():
        node = Peer("127.0.0.2")
        place = await node.listen("node-1")
        strangers = []
        for data, stays in sent:
            _, writer = await asyncio.open_connection(place.address, place.port)
            writer.write(data)
            strangers.append(writer)
            if not stays:
                writer.close()
        assert await unreachable(place) == {}
        node.probe.close()
        for writer in strangers:
            writer.close()

    asyncio.run(check())


def test_a_new_order_ends_the_one_before():
    async def check():
        node = Peer("127.0.0.2")
        before, after = await node.listen("node-1"), await node.listen("node-1")
        assert "node-1" in await unreachable(before)
        assert await unreachable(after) == {}
        node.probe.close()

    asyncio.run(check())

"""The agents' part of a check whether nodes reach each other: each listens for a while, and connects to the others.

Each agent listens on any free port, as gloo and NCCL do, so the check also finds a firewall that lets only Ray's ports
through. Each client gets a token and nothing else; the agent ignores what it sends. The driver gives the token to the
other nodes. It shows them that the address leads to this node, and not to another machine that has the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import msgpack

from raylaunch.cluster.capability import AgentPart, AgentPort
from raylaunch.core.decoding import prepare
from raylaunch.core.newtypes import NodeId
from raylaunch.core.text import printable

LISTEN_SECONDS = 30.0
CONNECT_SECONDS = 3.0
"""How long one connection may take. Linux repeats a lost SYN after a second."""
_TRIES = 2
_PAUSE_SECONDS = 0.5
PROBE_SECONDS = _TRIES * (CONNECT_SECONDS + _PAUSE_SECONDS)
"""How long a probe takes at most."""
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EADDRNOTAVAIL)
"""Errors that tell nothing of the network: this machine lacks something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where another node listens, and what it sends to whoever connects."""

    node: NodeId
    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGoal:
    """Take part in a check: first listen for other nodes, for half a minute; then connect to them."""

    check: int
    """Its number."""
    peers: tuple[PeerAddress, ...] | None = None
    """The nodes to connect to; None: listen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """How far a node is with a check."""

    check: int
    port: int = 0
    """Where it listens, at its address; 0: it cannot."""
    token: str = field(default="", repr=False)
    unreachable: tuple[tuple[NodeId, str], ...] | None = None
    """The nodes that it could not connect to, each with the reason; None: it has not tried yet."""


prepare(PeerGoal, PeerStatus)


class PeerProbe(AgentPart):
    """Takes part in checks, for one node."""

    def __init__(self, port: AgentPort) -> None:
        self._port = port
        self._status = PeerStatus(check=0)
        self._listening: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    def shown(self, section: bytes) -> None:
        """Listen, or connect to the others; what was begun of the same kind before ends."""
        goal = msgpack.decode(section, type=PeerGoal)
        if goal.peers is None:
            self._listening = _instead_of(self._listening, self._listen(goal))
        else:
            self._connecting = _instead_of(self._connecting, self._connect(goal, goal.peers))

    def close(self) -> None:
        """Stop listening and connecting, without telling anything."""
        for task in (self._listening, self._connecting):
            if task is not None:
                task.cancel()

    def _tell(self, status: PeerStatus) -> None:
        self._status = status
        self._port.tell(msgpack.encode(status))

    async def _listen(self, goal: PeerGoal) -> None:
        token = secrets.token_hex(16)

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(token.encode())
                writer.close()
                await writer.wait_closed()

        try:
            server = await asyncio.start_server(greet, self._port.address, 0)
        except OSError:
            self._tell(PeerStatus(check=goal.check))
            return
        async with server:
            self._tell(PeerStatus(check=goal.check, port=server.sockets[0].getsockname()[1], token=token))
            await asyncio.sleep(LISTEN_SECONDS)

    async def _connect(self, goal: PeerGoal, peers: Sequence[PeerAddress]) -> None:
        reasons = await asyncio.gather(*map(why_unreachable, peers))
        unreachable = tuple((peer.node, why) for peer, why in zip(peers, reasons, strict=True) if why)
        self._tell(replace(self._status, check=goal.check, unreachable=unreachable))


def _instead_of(before: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    if before is not None:
        before.cancel()
    return asyncio.get_running_loop().create_task(work)


async def why_unreachable(peer: PeerAddress) -> str:
    """Return why this node cannot connect to another one; `""`: it can, or cannot find out."""
    why = ""
    for _ in range(_TRIES):
        try:
            if await asyncio.wait_for(_greeting(peer), CONNECT_SECONDS) == peer.token.encode():
                return ""
            why = f"another program answers at {peer.address}"
        except asyncio.IncompleteReadError:
            why = f"the connection to {peer.address} was closed"
        except (TimeoutError, asyncio.TimeoutError):  # two errors in Python 3.10
            why = f"no answer from {peer.address} within {CONNECT_SECONDS:g} s"
        except OSError as error:
            if error.errno in _OWN_FAULTS:
                return ""
            why = f"{peer.address}: {_text(error)}"
        except (ValueError, OverflowError) as error:  # what cannot be an address or a port
            return printable(f"{peer.address}: {error}")
        await asyncio.sleep(_PAUSE_SECONDS)
    return why


async def _greeting(peer: PeerAddress) -> bytes:
    reader, writer = await asyncio.open_connection(peer.address, peer.port)
    try:
        return await reader.readexactly(len(peer.token))
    finally:
        writer.close()


def _text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)

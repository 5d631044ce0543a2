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
from collections.abc import Callable, Coroutine
from typing import Any

from raylaunch.core.text import printable
from raylaunch.node.protocol.peer_messages import (
    ListenForPeers,
    PeerAddress,
    PeerListening,
    PeerOrder,
    PeerReport,
    PeersProbed,
    ProbePeers,
)

LISTEN_SECONDS = 30.0
CONNECT_SECONDS = 3.0
"""How long one connection may take. Linux repeats a lost SYN after a second."""
_TRIES = 2
_PAUSE_SECONDS = 0.5
PROBE_SECONDS = _TRIES * (CONNECT_SECONDS + _PAUSE_SECONDS)
"""How long a probe takes at most."""
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EADDRNOTAVAIL)
"""Errors that tell nothing of the network: this machine lacks something."""


class PeerProbe:
    """One node's part. All methods must be called in one event loop, and return at once."""

    def __init__(self, address: str, report: Callable[[PeerReport], None]) -> None:
        """`address`: where the node listens. `report` takes the answers to orders."""
        self._address = address
        self._report = report
        self._tasks: dict[type[Any], asyncio.Task[None]] = {}

    def handle(self, order: PeerOrder) -> None:
        """Carry out an order. It cancels the previous order of the same class, if that is not done."""
        match order:
            case ListenForPeers():
                self._begin(ListenForPeers, self._listen(order))
            case ProbePeers():
                self._begin(ProbePeers, self._probe(order))

    def close(self) -> None:
        """Stop listening and connecting: cancel the orders that are being carried out, without a report."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def _begin(self, kind: type[Any], work: Coroutine[Any, Any, None]) -> None:
        before = self._tasks.pop(kind, None)
        if before is not None:
            before.cancel()
        self._tasks[kind] = asyncio.get_running_loop().create_task(work)

    async def _listen(self, order: ListenForPeers) -> None:
        token = secrets.token_hex(16)

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(token.encode())
                writer.close()
                await writer.wait_closed()

        try:
            server = await asyncio.start_server(greet, self._address, 0)
        except OSError as error:
            self._report(PeerListening(check=order.check, port=0, token="", why=_text(error)))
            return
        async with server:
            port = server.sockets[0].getsockname()[1]
            self._report(PeerListening(check=order.check, port=port, token=token))
            await asyncio.sleep(LISTEN_SECONDS)

    async def _probe(self, order: ProbePeers) -> None:
        found = await asyncio.gather(*map(_why_unreachable, order.peers))
        unreachable = tuple((peer.node, why) for peer, why in zip(order.peers, found, strict=True) if why)
        self._report(PeersProbed(check=order.check, unreachable=unreachable))


async def _why_unreachable(peer: PeerAddress) -> str:
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

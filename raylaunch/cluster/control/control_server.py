"""Serves those who know the secret of a run: each connection has a thread, which asks and answers one thing at a time.

What a client does not read stays in its own thread, which waits for it and for nobody else: the driver never waits for
a client while the run lasts. A client that takes nothing for `SLOW_SECONDS` is dropped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from raylaunch.cluster.control import control_frames
from raylaunch.cluster.control.control_frames import BUSY, MOST_CLIENTS
from raylaunch.cluster.control.control_messages import (
    ControlAnswer,
    ControlRequest,
    GetState,
    ListLogs,
    ReadLogs,
    Refused,
)
from raylaunch.cluster.driver.observer import described
from raylaunch.node.protocol import acceptor
from raylaunch.node.protocol.acceptor import Acceptor

Handler = Callable[[ControlRequest], Iterator[ControlAnswer]]
"""Answers a request. It is called in the threads of clients, by several at a time."""
SLOW_SECONDS = 30.0
"""How long a client may take to read what it is sent, or to ask the next thing."""
_POLL_SECONDS = 0.02


class _Client:
    """One connection, and what it asked last."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.reads_logs = False


class ControlServer(Acceptor):
    """The driver's end of all control connections."""

    def __init__(self, address: str, answers: Handler) -> None:
        """Listen at this address of the driver's machine only. Raises OSError."""
        super().__init__(acceptor.listen(address), thread="raylaunch-control")
        self._answers = answers
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread that accepts connections."""
        self._listen_in_thread()

    def close(self) -> None:
        """Stop listening, and close the connections of all clients."""
        super().close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.line.shutdown(socket.SHUT_RDWR)

    def await_clients(self, seconds: float, *, reading_logs: bool = False) -> None:
        """Wait until clients that look on have seen the end of the run and left, for `seconds` at most.

        `reading_logs`: only those that read logs.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                awaited = [client for client in self._clients if client.reads_logs or not reading_logs]
            if not awaited:
                return
            time.sleep(_POLL_SECONDS)

    def _admit(self, line: socket.socket, name: str) -> bool:
        client = _Client(line)
        with self._lock:
            if len(self._clients) >= MOST_CLIENTS:
                with contextlib.suppress(OSError):
                    line.send(BUSY)
                return False
            self._clients.add(client)
        thread = threading.Thread(target=self._serve, args=(client,), daemon=True, name=f"raylaunch-{name[:20]}")
        try:
            thread.start()
        except RuntimeError:  # "can't start new thread"
            self._gone(client)
            return False
        return True

    def _gone(self, client: _Client) -> None:
        with self._lock:
            self._clients.discard(client)

    def _serve(self, client: _Client) -> None:
        client.line.settimeout(SLOW_SECONDS)
        try:
            with client.line, client.line.makefile("rb") as file:
                client.line.sendall(b"+")
                while (request := control_frames.load_request(file)) is not None:
                    client.reads_logs = isinstance(request, ListLogs | ReadLogs) or (
                        client.reads_logs and isinstance(request, GetState)
                    )
                    for answer in self._guarded(request):
                        client.line.sendall(control_frames.dump(answer))
                    client.line.sendall(control_frames.dump_end())
        except (OSError, EOFError, ValueError):  # it is gone, or too slow, or says what is no request
            pass
        finally:
            self._gone(client)

    def _guarded(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        """Answer. What goes wrong is told to the client, and to nobody else."""
        try:
            yield from self._answers(request)
        except Exception as error:  # noqa: BLE001
            yield Refused(why=described(error))

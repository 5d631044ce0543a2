"""The daemon's listener thread: it takes runs and signals from commands while the main thread runs a job."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from raylaunch.cli.daemon import daemon_messages
from raylaunch.cli.daemon.daemon_messages import ClientStream, DaemonState, RunEnded, RunRequest, SignalForwarded
from raylaunch.node.protocol import wire

_MESSAGES = (str, ClientStream, RunRequest, SignalForwarded)
"""What commands send."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""If a command dies, its run gets the first of these that stops it."""
_GRACE_SECONDS = 0.1
"""Minimum wait for a run whose command was answered `FREE` just before the daemon's time was over."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientConnection:
    """The connection to one command, and what the command has sent."""

    sock: socket.socket
    streams: dict[int, int] = field(default_factory=dict)
    """Received files by the descriptor (0, 1, 2) that they become."""
    run: RunRequest | None = None
    closed: bool = False

    def send(self, message: Any) -> None:
        """Send a message, unless the command is gone."""
        with contextlib.suppress(OSError):
            wire.send(self.sock, message)


class Listener:
    """Accepts connections. One command at a time has the daemon, from the answer `FREE` to the end of its run."""

    def __init__(self, server: socket.socket, first: socket.socket, state: Callable[[], DaemonState]) -> None:
        """`first`: the connection to the command that started this daemon and has it from the beginning."""
        self._server = server
        self._state = state
        self._selector = selectors.DefaultSelector()
        self._runs: queue.SimpleQueue[ClientConnection | None] = queue.SimpleQueue()
        #: Guards the three attributes below, and makes sure that signals reach only a run that has begun.
        self._lock = threading.Lock()
        self._active: ClientConnection | None = ClientConnection(sock=first)
        self._has_begun = False
        self._is_ending = False
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(first, selectors.EVENT_READ, self._active)
        threading.Thread(target=self._listen, daemon=True, name="raylaunch-listener").start()

    # Called by the main thread.

    def wait(self, seconds: float) -> ClientConnection | None:
        """Return the next command that sends a run; None if the time is over or the daemon is to end.

        After None no command is accepted any more, so the daemon must exit.
        """
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            with contextlib.suppress(queue.Empty):
                client = self._runs.get(timeout=max(left, _GRACE_SECONDS))
                if client is not None:
                    return client
            with self._lock:
                if self._active is None and (self._is_ending or time.monotonic() >= until):
                    self._is_ending = True
                    return None

    def begin(self) -> bool:
        """Tell the command that its run starts; from now on its signals are raised here. False if it is gone."""
        with self._lock:
            assert self._active is not None, "a run has a command"
            self._has_begun = not self._active.closed
            if self._has_begun:
                self._active.send(daemon_messages.STARTED)
            return self._has_begun

    def finish(self, code: int, leave: Callable[[], None], *, stays: bool) -> None:
        """End the run: stop raising signals, call `leave`, and then tell the command. `stays`: take further runs."""
        with self._lock:
            self._has_begun = False
            self._is_ending |= not stays
            leave()
            client, self._active = self._active, None
        if client is not None:
            client.send(RunEnded(code=code))

    # Called by the listener thread.

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    with contextlib.suppress(OSError):
                        self._accept(self._server.accept()[0])
                else:
                    self._receive(key.data)

    def _accept(self, connection: socket.socket) -> None:
        connection.setblocking(False)  # a command that reads no answers does not make others wait
        if wire.peer_is_same_user(connection):
            self._selector.register(connection, selectors.EVENT_READ, ClientConnection(sock=connection))
        else:
            connection.close()

    def _receive(self, client: ClientConnection) -> None:
        try:
            message, fd = wire.receive(client.sock)
            if isinstance(message, ClientStream) and fd is not None:
                before = client.streams.get(message.number)
                client.streams[message.number], fd = fd, before
            if fd is not None:
                os.close(fd)
            kind = next(kind for kind in _MESSAGES if isinstance(message, kind))
            self._handle(client, msgspec.convert(msgspec.to_builtins(message), kind))
        except Exception:  # noqa: BLE001
            self._disconnect(client)  # it is gone, or of another version: unpickling checks nothing

    def _handle(self, client: ClientConnection, message: Any) -> None:
        match message:
            case daemon_messages.ACQUIRE:
                client.send(daemon_messages.FREE if self._acquire(client) else daemon_messages.BUSY)
            case RunRequest() if client is self._active and client.run is None:
                client.run = message
                self._runs.put(client)
            case SignalForwarded():
                self._raise_signal(client, signal.Signals[message.signal])
            case daemon_messages.STATE:
                client.send(asdict(self._state()))
            case daemon_messages.END:
                with self._lock:
                    self._is_ending = True
                client.send(asdict(self._state()))
                self._runs.put(None)
            case _:
                pass

    def _acquire(self, client: ClientConnection) -> bool:
        with self._lock:
            is_free = self._active is None and not self._is_ending
            if is_free:
                self._active = client
            return is_free

    def _disconnect(self, client: ClientConnection) -> None:
        self._selector.unregister(client.sock)
        client.closed = True
        client.sock.close()
        if client.run is not None:
            self._stop_run(client)
            return
        for fd in client.streams.values():
            os.close(fd)
        with self._lock:
            if client is self._active:  # it acquired the daemon but sent no run
                self._active = None

    def _stop_run(self, client: ClientConnection) -> None:
        """Stop the run of a command that has died, as a signal to the command would."""
        assert client.run is not None
        handled = set(client.run.job.signals_to_handle).difference(client.run.ignored)
        self._raise_signal(client, next((one for one in _STOP_SIGNALS if one.name in handled), signal.SIGKILL))

    def _raise_signal(self, client: ClientConnection, number: signal.Signals) -> None:
        with self._lock:
            if client is self._active and self._has_begun:
                os.kill(os.getpid(), number)

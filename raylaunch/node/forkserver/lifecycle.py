"""The life of a fork server: from its first message to its end, or from a hot standby's promotion."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from raylaunch.node.forkserver.hot_standby import StandbyLink, wait_for_promotion
from raylaunch.node.forkserver.server import ForkServer
from raylaunch.node.linux import limits
from raylaunch.node.linux.processes import run_at_bottom
from raylaunch.node.preload.fork_safety import why_fork_is_unsafe
from raylaunch.node.preload.initial import import_preloads
from raylaunch.node.protocol import forkserver_messages, messages, wire
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.worker.runtime import entry


def main(link: StandbyLink, control_fd: int) -> int:
    """Serve until the supervisor is gone. Returns the exit code, in each forked child that child's."""
    entry.demote_bootstrap_path()
    return run_at_bottom(partial(_serve, link, socket.socket(fileno=control_fd), import_preloads))


def _serve(
    link: StandbyLink,
    control: socket.socket,
    prepare: Callable[[forkserver_messages.Initialize], messages.Ready],
    imported: ImportManifest | None = None,
) -> int:
    """Be a fork server from its first message to its end. `prepare` imports what `Initialize` names."""
    server = None
    try:
        initialize, _ = wire.receive(control)
        server = ForkServer(link, control, initialize, prepare(initialize), imported, _be_standby)
        server.serve()
    except (EOFError, ConnectionError):
        pass  # the supervisor is gone
    except OSError as error:
        why = limits.explained(error, "the fork server")
        print(f"raylaunch: a fork server cannot go on: {why}", file=sys.stderr, flush=True)  # noqa: T201
        with contextlib.suppress(OSError):
            wire.send(control, forkserver_messages.ServerFailed(why=why))
    if server is not None:
        with contextlib.suppress(OSError):  # no file descriptor is left: the subreaper ends the rest
            server.end()
    link.finish()
    return 0


def _be_standby(server: ForkServer, line: socket.socket, imported: ImportManifest | None) -> int:
    if not wait_for_promotion(server.link, line) or why_fork_is_unsafe():
        os._exit(0)  # without the exit handlers of imported modules
    server.link.become_active()
    return _serve(server.link, line, lambda _: replace(server.ready, pid=os.getpid()), imported)

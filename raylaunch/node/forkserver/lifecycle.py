"""The life of a fork server: from its first message to its end, or from a hot standby's promotion.

A fork server whose subreaper was killed ends what it has started, and is the subreaper of its standby from then on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from raylaunch.core.job.job import StartMethod
from raylaunch.node.forkserver import promotion
from raylaunch.node.forkserver.hot_standby import StandbyLink, wait_for_promotion
from raylaunch.node.forkserver.server import ForkServer
from raylaunch.node.linux import command_line, limits, processes
from raylaunch.node.linux.processes import run_at_bottom
from raylaunch.node.preload.fork_safety import why_fork_is_unsafe
from raylaunch.node.preload.initial import import_preloads
from raylaunch.node.protocol import forkserver_messages, messages, wire
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.worker.runtime import entry, process_setup, staleness

_STATE_MODULES = ("raylaunch.worker.state.elastic_state", "raylaunch.worker.survivors.survivor")
"""What a worker would import for `State` and `elastic`, which takes 30 ms, with all that they import.

The module of `elastic` itself is not among them: in a worker its import changes torch.
"""


def main(link: StandbyLink, control_fd: int) -> int:
    """Serve until the supervisor is gone. Returns the exit code, in each forked child that child's."""
    entry.demote_bootstrap_path()
    return run_at_bottom(partial(_serve, link, socket.socket(fileno=control_fd), _import_ahead))


def _import_ahead(initialize: forkserver_messages.Initialize) -> messages.Ready:
    """Import what the job preloads and, if the script may use them, the modules of `State` and `elastic`."""
    if initialize.start_method == StartMethod.FORKSERVER and _may_use_state(initialize.script):
        for module in _STATE_MODULES:
            import_module(module)
    ready = import_preloads(initialize)
    staleness.note_preloaded()
    return ready


def _may_use_state(script: str) -> bool:
    """Return whether a script names this package; True if it cannot be read, or workers run something else."""
    try:
        return not script or b"raylaunch" in Path(script).read_bytes()
    except OSError:
        return True


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
        heir = server.standby.pid if server.has_lost_subreaper and not promotion.agent_is_gone(link.lifeline) else 0
        with contextlib.suppress(OSError):  # no file descriptor is left: the subreaper ends the rest
            server.end(spared=heir)
        if heir:
            _be_subreaper(server)
    with contextlib.suppress(OSError):  # `_be_subreaper` has closed it
        control.close()  # an agent that is alive notices the end
    link.finish()
    return 0


def _be_subreaper(server: ForkServer) -> None:
    """Let the standby serve, with this process as its subreaper. Returns when all of the node has ended."""
    command_line.set_helper_title("subreaper")
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        wire.send(server.control, forkserver_messages.SubreaperReplaced(pid=os.getpid()))
    process_setup.close_other_fds(server.promote, server.link.lifeline)
    processes.release_memory()
    promotion.run_standbys(0, server.promote, server.link.lifeline)


def _be_standby(server: ForkServer, line: socket.socket, imported: ImportManifest | None) -> int:
    link = wait_for_promotion(server.link, line)
    if link is None or why_fork_is_unsafe():
        os._exit(0)  # without the exit handlers of imported modules
    link.become_active()
    return _serve(link, line, lambda _: replace(server.ready, pid=os.getpid()), imported)

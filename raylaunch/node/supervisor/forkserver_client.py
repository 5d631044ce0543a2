"""The supervisor's connection to its fork server, with all that may outlive a run on the node (`keep_warm`)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TypeVar

from raylaunch.core.job.job import StartMethod
from raylaunch.node.forkserver import file_timer, subreaper
from raylaunch.node.linux import processes, scratch
from raylaunch.node.linux.fd_store import FdStoreClient
from raylaunch.node.linux.processes import CLEANUP_WAIT_SECONDS
from raylaunch.node.linux.ram_folder import RamFolder
from raylaunch.node.protocol import forkserver_messages, node_status, wire
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.node.protocol.node_spec import AgentSpec, NodeSpec
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime.process_setup import encodable

RESET_SECONDS = 5.0
ACTIVATE_SECONDS = 5.0
_END_SECONDS = 2 * CLEANUP_WAIT_SECONDS + 1
"""The subreaper waits for the fork server first, and then kills what that has left."""

Answer = TypeVar("Answer", forkserver_messages.ResetDone, node_status.Ready)


class ForkServerProcess:
    """The subreaper, whose child is the fork server. Both exit by themselves when our ends of their sockets are closed.

    Those are `control`, on which the fork server gets its orders, and the lifeline (see `lifeline`).
    """

    def __init__(self, spec: NodeSpec, control: socket.socket, store: FdStoreClient) -> None:
        """Start them. `control` is the fork server's end. Raises OSError."""
        #: Our end, readable when all that a dead fork server left has ended.
        self.lifeline, theirs = socket.socketpair()
        with theirs, store.connect() as stored:
            fds = (control.fileno(), theirs.fileno(), stored.fileno())
            self._first = subprocess.Popen(  # noqa: S603
                [sys.executable, "-u", subreaper.__file__, *map(str, fds), *spec.temporary_folders()],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=spec.env,
                cwd=spec.cwd,
                start_new_session=True,
            )
        store.send_all()
        #: The subreaper's process id.
        self.pid = self._first.pid
        #: Whether the fork server has died, and what it left may not have ended.
        self.is_dying = False

    def died(self) -> None:
        """Let the subreaper end what the dead fork server has left, also if it is stopped."""
        self.is_dying = True
        self._first.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Wait until they have killed everything and exited, for seconds at most."""
        self.lifeline.shutdown(socket.SHUT_WR)  # continues the subreaper if it is stopped; it continues the rest
        poll = select.poll()
        poll.register(self.lifeline, 0)
        if not poll.poll(_END_SECONDS * 1000):  # until none of them is left that has the other end
            processes.kill_with_group(self.pid)
        self.lifeline.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._first.wait(CLEANUP_WAIT_SECONDS)

    def request_end(self) -> None:
        """Ask for the end of everything but the subreaper, which keeps what is in its store."""
        with contextlib.suppress(OSError):  # it has ended
            self.lifeline.send(b"x")

    def wait_for_requested_end(self) -> None:
        """Wait until everything else has ended, for seconds at most; if there is nothing to keep, the subreaper too."""
        try:
            self.lifeline.settimeout(_END_SECONDS)
            self.lifeline.recv(1)  # nothing, if the subreaper had nothing to keep, and has ended too
        except TimeoutError:
            processes.kill_with_group(self.pid)
        except OSError:
            pass  # it has ended

    def name_of_dead(self, server: int) -> str:
        """After the fork server's end: name the process that was killed, as in `FailureRecord.killed_with`.

        `server` is the fork server's process id. If the subreaper was killed, the fork server ends with it, and the
        subreaper is a zombie before the fork server learns of it.
        """
        if self._first.poll():
            return f"the subreaper (process {self.pid})"
        return f"the fork server (process {server})"


class ForkServerClient:
    """The fork server's process, its control socket, and what it gets at its start.

    It gets the shared page, the file timer's pipe, the folder for files and a temporary one for logs. At most one
    supervisor uses a client at a time.
    """

    def __init__(self, env: Mapping[str, str], *, kept: bool) -> None:
        """`env`: the environment that the fork server is going to have. `kept` False: logs need a temporary folder."""
        self.page, self._page_fd = SharedPage.create()
        self._timer_env = file_timer.variables(env)
        self._folder = "" if kept else scratch.new_path()
        #: The folder for files of workers, which lasts as long as the client.
        self.ram_folder = RamFolder()
        #: What outlives this process.
        self.fd_store = FdStoreClient()
        self._server: ForkServerProcess | None = None
        #: The fork server's process id, once it was ready.
        self.pid = 0
        #: What the fork server answered to `activate`, until the supervisor takes it.
        self.ready: node_status.Ready | None = None
        #: What the fork server can import ahead, for its successor.
        self.manifest: ImportManifest | None = None
        #: What a fork server or its subreaper said last of its own end.
        self.last_words = ""
        #: Our end of the socket to the fork server, while there is one.
        self.control: socket.socket | None = None

    def complete(
        self, spec: AgentSpec, *, address: str, env: dict[str, str], interface_env: dict[str, str], cwd: str
    ) -> NodeSpec:
        """Return a run's specification on this node, with the page, folder and variables of this client."""
        return NodeSpec(
            agent=spec,
            address=address,
            env={encodable(name): encodable(value) for name, value in (env | self._timer_env).items()},
            interface_env=interface_env,
            cwd=encodable(cwd),
            run_dir=self._folder or encodable(spec.run_dir),
            page=f"/proc/{os.getpid()}/fd/{self._page_fd}",
            fast_dir=self.ram_folder.path,
        )

    def start(self, spec: NodeSpec, preload: tuple[str, ...]) -> None:
        """Start a fork server, which sends `Ready` when it has imported these modules. Raises OSError."""
        self.last_words = ""
        ours, theirs = wire.pair()
        with theirs:
            self._server = ForkServerProcess(spec, theirs, self.fd_store)
        self.control = ours
        job = spec.agent.job
        initialize = forkserver_messages.Initialize(
            preload=preload,
            start_method=StartMethod(job.start_method),
            page=spec.page,
            preload_auto=isinstance(job.preload, str),
            script=job.entrypoint.target if spec.agent.kind == "script" else "",
            manifest=self.manifest,
        )
        wire.send(ours, initialize)

    def receive(self) -> tuple[forkserver_messages.ForkServerEvent, int | None]:
        """Receive the fork server's next event and the file descriptor that came with it. Keeps what outlives it.

        Waits if there is none. Raises EOFError or OSError where the fork server is gone.
        """
        assert self.control is not None
        event, fd = wire.receive(self.control)
        if isinstance(event, node_status.Ready):  # only now: the processes that remove the folders are there
            self.pid = event.pid
            self.ram_folder.create()
            if self._folder:
                scratch.create(self._folder)
        if isinstance(event, node_status.ManifestChanged):
            self.manifest = event.manifest
        if isinstance(event, forkserver_messages.ServerFailed):
            self.last_words = event.why
        return event, fd

    def server_died(self) -> str:
        """The fork server died: begin to end what it has left, which `dying` tells the end of.

        Returns which process died, and why if it told that, as in `FailureRecord.killed_with`.
        """
        assert self._server is not None
        self._close_control()
        self._server.died()
        name = self._server.name_of_dead(self.pid)
        return f"{name}: {self.last_words}" if self.last_words else name

    @property
    def dying(self) -> socket.socket | None:
        """What is readable when all that a dead fork server left has ended; None: there is no dead one."""
        return self._server.lifeline if self._server is not None and self._server.is_dying else None

    def end_dead_server(self, *, is_last: bool) -> None:
        """End the subreaper of a fork server that died, of which nothing else is left.

        `is_last`: no other one will follow, and this process ends soon, too.
        """
        assert self._server is not None
        self._server.is_dying = False
        with contextlib.suppress(OSError):  # what it says next is another answer
            self._server.lifeline.recv(1, socket.MSG_DONTWAIT)
        if is_last:
            self.leave_state()
        else:
            self.end_server()

    def reset(self) -> bool:
        """End and forget all of a run, for seconds at most. False: the fork server did not do so in time."""
        if self._request(forkserver_messages.Reset(), forkserver_messages.ResetDone, RESET_SECONDS) is None:
            return False
        if self._folder:
            scratch.clear(self._folder)
        self.ram_folder.clear()
        return True

    def activate(self) -> bool:
        """After `reset`: return whether another run can begin. Waits for the answer, for seconds at most."""
        self.ready = self._request(forkserver_messages.Activate(), node_status.Ready, ACTIVATE_SECONDS)
        return self.ready is not None

    def _request(
        self, order: forkserver_messages.ForkServerOrder, answer: type[Answer], seconds: float
    ) -> Answer | None:
        """Send an order and wait for its answer. Other events that come before it are of a run that is over."""
        assert self.control is not None
        deadline = time.monotonic() + seconds
        try:
            wire.send(self.control, order)
            while select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                event, fd = self.receive()
                if fd is not None:
                    os.close(fd)
                if isinstance(event, answer):
                    return event
        except (EOFError, OSError, ValueError):
            pass  # the fork server is gone, or another thread has closed the socket
        return None

    def end_server(self) -> None:
        """End the fork server and what it has started. Waits for that, for seconds at most."""
        self._close_control()
        if self._server is not None:
            self._server.end()
            self._server = None

    def _close_control(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None

    def leave_state(self) -> None:
        """End the fork server and what it has started, for seconds at most; another agent may take the rest over.

        If this process is killed now, the subreaper holds what `State` has, and removes the folders.
        """
        self.ram_folder.abandon()
        if self._server is not None:
            self._server.request_end()
        self._close_control()  # not before: a subreaper that does not know why its fork server ends answers at once
        if self._server is not None:
            self._server.wait_for_requested_end()

    def close(self) -> None:
        """End the fork server, and remove the page and the temporary folders."""
        self.ram_folder.release()
        self.end_server()
        self.fd_store.close()
        self.page.close()
        os.close(self._page_fd)
        if self._folder:
            scratch.remove(self._folder)
        self.ram_folder.remove()

    @property
    def subreaper_pid(self) -> int:
        """The process id of the fork server's parent, 0 where there is none."""
        return self._server.pid if self._server is not None else 0

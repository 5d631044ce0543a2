"""The last lines of `raylaunch ps`: list or end this user's daemons on this machine, and the agents that they keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from raylaunch.cli.daemon import client, daemon_messages, socket_dir
from raylaunch.cli.daemon.daemon_messages import DaemonState
from raylaunch.core.text import count, duration, printable

_END_HINT = "`raylaunch ps --end` ends idle daemons now, and others after their run"


def text(environ: Mapping[str, str], *, end: bool) -> str:
    """Return the text for all daemons, which may be none; with `end`, also tell them to exit. Raises NoDaemonError."""
    request = daemon_messages.END if end else daemon_messages.STATE
    lines = [line for path in socket_dir.sockets(socket_dir.folder(environ)) for line in _daemon_lines(path, request)]
    return "".join(f"{printable(line)}\n" for line in (lines if end or not lines else [*lines, _END_HINT]))


def states(environ: Mapping[str, str]) -> list[DaemonState]:
    """Return the states of all daemons that answer. Raises NoDaemonError."""
    paths = socket_dir.sockets(socket_dir.folder(environ))
    found = (client.request_state(path, daemon_messages.STATE) for path in paths)
    return [state for state in found if state is not None]


def _daemon_lines(path: Path, request: str) -> Iterator[str]:
    state = client.request_state(path, request)
    if state is not None:
        yield from _state_lines(state, end=request == daemon_messages.END)
    elif path.exists():
        pid = socket_dir.pid_of(path)
        yield f"pid {pid}: does not answer; it may be of another version; `kill {pid}` ends it"


def _state_lines(state: DaemonState, *, end: bool) -> Iterator[str]:
    since = duration(round(state.seconds))
    activity = f"running {state.title} for {since}" if state.title else f"idle for {since}"
    if end:
        yield f"pid {state.pid}: {activity}; it ends {'after this run' if state.title else 'now'}"
        return
    then = "" if state.title else f"; it ends in {duration(round(state.left))} if no run starts"
    yield f"pid {state.pid}: {activity}{then}"
    if state.address:
        yield f"  connected to the Ray cluster at {state.address}"
    for address, nproc, memory in state.agents:
        size = f", {memory / 1e6:.0f} MB" if memory else ""
        yield f"  {address}: idle agent for {count(nproc, 'worker')}{size}"

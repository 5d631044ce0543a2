"""`raylaunch status`: this user's warm drivers on this machine, what they keep warm, and how to end them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from raylaunch.cli import warm_command, warm_folder, warm_words
from raylaunch.cli.warm_words import State
from raylaunch.core.words import count

_HOW_TO_END = "`raylaunch status --end` ends those that rest, and the others after their runs"


def text(environ: Mapping[str, str], *, end: bool) -> str:
    """What there is; with `end`, all of it is told to end. Raises NoWarmDriverError where nobody can be asked."""
    word = warm_words.END if end else warm_words.STATE
    lines = [line for path in warm_folder.sockets(warm_folder.folder(environ)) for line in _of(path, word)]
    if not lines:
        return "no warm driver on this machine\n"
    return "\n".join(lines if end else [*lines, _HOW_TO_END]) + "\n"


def _of(path: Path, word: str) -> Iterator[str]:
    state = warm_command.ask(path, word)
    if state is not None:
        yield from _told(state, end=word == warm_words.END)
    elif path.exists():
        pid = warm_folder.pid_of(path)
        yield f"pid {pid}: does not answer, perhaps as it is of another version; `kill {pid}` ends it"


def _told(state: State, *, end: bool) -> Iterator[str]:
    doing = f"runs {state.title}, for {_time(state.seconds)}" if state.title else f"rests for {_time(state.seconds)}"
    if end:
        yield f"pid {state.pid}: {doing}; {'it ends after that' if state.title else 'it ends'}"
        return
    then = "" if state.title else f", ends in {_time(state.left)} unless it is used"
    yield f"pid {state.pid}: {doing}{then}"
    if state.address:
        yield f"  connected to the Ray cluster at {state.address}"
    for address, nproc, memory in state.agents:
        size = f", {memory / 1e6:.0f} MB" if memory else ""
        yield f"  {address}: an agent for {count(nproc, 'worker')} rests{size}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

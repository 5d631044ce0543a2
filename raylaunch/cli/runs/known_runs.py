"""Which runs there are, and which one a person means.

This module alone decides where runs are found: in the registry of this user, in the registry of the cluster that this
machine belongs to, or by the name of a folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from raylaunch.cli.run_once import say
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.control import cluster_registry
from raylaunch.cluster.driver import run_registry
from raylaunch.cluster.driver.run_registry import RegisteredRun
from raylaunch.core.record import run_layout
from raylaunch.errors import ConfigError
from raylaunch.node.linux import procfs

_MOST_NAMED = 5
_RECENT_SECONDS = 0.3


def all_runs(environ: Mapping[str, str]) -> list[RunReader]:
    """Return the runs of this user that are known here, and all of the cluster, the newest first."""
    own = {run.entry.identity: run for run in _own_runs(environ)}
    for run in cluster_registry.runs(environ):
        key = run.identity  # whichever driver it has now
        if key not in own:
            own[key] = _reader(run, is_registered=False)
        elif own[key].entry.exit_code is None:  # its entry is newer than the file, which was written once
            own[key] = _reader(run)
        else:
            own[key] = _reader(replace(own[key].entry, control=run.control, renewed=run.renewed))
    return sorted(own.values(), key=lambda run: run.entry.began, reverse=True)


def _own_runs(environ: Mapping[str, str]) -> list[RunReader]:
    directory = _registry(environ)
    run_registry.prune(directory)
    return [_reader(run) for run in run_registry.runs(directory)]


def forget_lost(runs: Sequence[RunReader]) -> list[RunReader]:
    """Remove runs whose drivers are gone, as was just seen, from the cluster's registry.

    Returns the ones that are listed nowhere else.
    """
    listed = [run.entry for run in runs if run.is_gone and run.entry.renewed]
    if gone := {entry.control for entry in listed if entry.control is not None}:
        cluster_registry.forget(gone)
    return [run for run in runs if run.is_gone and not run.is_registered]


def find_to_change(text: str | None, environ: Mapping[str, str]) -> RunReader:
    """Return the run that a person means to stop or to change. None: the one that goes on, if possible in this folder.

    Raises ConfigError, also if several may be meant.
    """
    if text is None:
        every = [run for run in _own_runs(environ) if _goes_on(run)]
        every = every or [run for run in all_runs(environ) if _is_mine(run) and _goes_on(run)]
        going_on = _of_this_folder(every) or every
        if len(going_on) == 1:
            return going_on[0]
        if going_on:
            msg = f"{len(going_on)} runs go on: which one is meant?"
            raise ConfigError(msg, hint=f"write {_names(going_on)}; `raylaunch ps` shows them")
    return find(text, environ, among=_goes_on)


def _goes_on(run: RunReader) -> bool:
    """Whether it has not ended, as far as is known."""
    return run.entry.exit_code is None and (run.entry.is_alive is not False or run.entry.is_detached)


def _is_mine(run: RunReader) -> bool:
    return run.is_registered or run.entry.user == procfs.user_name()


def _of_this_folder(runs: Sequence[RunReader]) -> list[RunReader]:
    """Return those that keep their files below the working folder."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return []
    return [run for run in runs if run.entry.folder and Path(run.entry.folder).is_relative_to(here)]


def find(
    text: str | None, environ: Mapping[str, str], *, among: Callable[[RunReader], bool] = lambda _: True
) -> RunReader:
    """Return the run that a person means: an id, its beginning, a name or a folder.

    None: the newest run that keeps its files below the working folder, else the newest run. A run of another user in
    the cluster is not meant without its name or id, and one of this user is meant before it. Of several whose id begins
    so, the ones of `among` are meant if there are any.

    Raises ConfigError, which names those that may be meant.
    """
    if text and (found := _of_folder(text, environ)):
        return found
    own = _own_runs(environ)
    if text is None and (here := _of_this_folder(own)):
        return here[0]
    if text is None and own and own[0].entry.exit_code is None and (own[0].entry.is_alive or own[0].entry.is_detached):
        return own[0]
    known = [run for run in own if text in (run.entry.id, f"{run.entry.name}/{run.entry.id}")]
    known = known or all_runs(environ)
    mine = [run for run in known if _is_mine(run)]
    if not known:
        msg = "there is no run yet" if text is None else f"there is no run `{text}`, nor any other run of this user"
        raise ConfigError(msg, hint="a run of another user, or one that was copied, is named by its folder")
    if text is None and not mine:
        raise ConfigError("there is no run of this user yet", hint=f"of others there are {_names(known)}")
    if text is None:
        return mine[0]
    meant = [run for run in known if text in (run.entry.id, f"{run.entry.name}/{run.entry.id}")]
    meant = meant or [run for run in (*mine, *known) if run.entry.name == text][:1]
    meant = meant or [run for run in known if text and run.entry.id.startswith(text)]
    meant = [run for run in meant if among(run)] or meant
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(f"`{text}` may be one of {len(meant)} runs", hint=f"write {_names(meant)}")
    raise ConfigError(f"there is no run `{text}`", hint=f"there are {_names(_nearest(text, known))}")


def await_driver(run: RunReader) -> None:
    """Look for the driver of a run. Waits for another driver of a detached run whose driver is gone."""
    run.await_driver(lambda: say(f"{run.entry.title} has no driver right now: waiting for the next one"))


def _registry(environ: Mapping[str, str]) -> Path:
    try:
        return run_registry.folder(environ)
    except RuntimeError as error:
        raise ConfigError(f"the list of runs is not known: {error}", hint="set XDG_STATE_HOME or HOME") from None


def _names(runs: Sequence[RunReader]) -> str:
    names = [f"`{run.entry.name}/{run.entry.id}`" for run in runs[:_MOST_NAMED]]
    return ", ".join(names) + (" ..." if len(runs) > _MOST_NAMED else "")


def _nearest(text: str, known: Sequence[RunReader]) -> list[RunReader]:
    """Return the runs whose name or id resembles the text; else the newest ones."""
    near = get_close_matches(text, {run.entry.id for run in known} | {run.entry.name for run in known}, n=_MOST_NAMED)
    return [run for run in known if run.entry.id in near or run.entry.name in near] or list(known)


def _of_folder(text: str, environ: Mapping[str, str]) -> RunReader | None:
    """Return the run of a folder; None if it is not the folder of a run. Raises ConfigError if it cannot be read."""
    try:
        is_folder = Path(text).is_dir()
        names = set(os.listdir(text)) if is_folder else set()
    except OSError as error:
        raise ConfigError(f"the folder {text} cannot be read: {error.strerror}", hint="its owner can") from None
    except ValueError:  # no path has a NUL
        return None
    if not names & {run_layout.EVENTS, run_layout.JOB, run_layout.RESULT}:
        return None
    path = os.path.realpath(text)
    for entry in run_registry.runs(_registry(environ)):
        if entry.folder and os.path.realpath(entry.folder) == path:
            return _reader(entry)
    run = RunReader(RegisteredRun(id=Path(path).name, name=Path(path).parent.name, folder=path))
    run.refresh()
    if (header := run.files.header) is not None:
        run.entry = replace(run.entry, began=header.began, name=header.job.title)
    return run


def _reader(entry: RegisteredRun, *, is_registered: bool = True) -> RunReader:
    """Return what reads the run: its driver is asked while it lasts."""
    if entry.ended or entry.is_alive is False:
        return RunReader(entry, is_registered=is_registered, is_gone=True)
    find: Callable[[], RegisteredRun | None] | None = None
    if entry.is_detached:
        find = partial(_newest_entry, entry)
    elif cluster_registry.is_stale(entry):
        find = lambda: None  # noqa: E731
    return RunReader(entry, find, is_registered=is_registered)


def _newest_entry(run: RegisteredRun) -> RegisteredRun | None:
    """Return what the cluster knows of a detached run; None: it does not know the run any more."""
    found = (each for each in _recent_runs() if each.token == run.token)
    return next((each for each in found if not cluster_registry.is_stale(each)), None)


def _recent_runs() -> list[RegisteredRun]:
    """Return what the cluster said a moment ago, or ask it: many runs of a cluster that is gone may be listed."""
    with _asked.lock:
        began = time.monotonic()
        if began >= _asked.until:
            _asked.runs = cluster_registry.runs(os.environ)
            now = time.monotonic()
            _asked.until = now + max(_RECENT_SECONDS, 2.0 * (now - began))
        return _asked.runs


@dataclass(slots=True)
class _Asked:
    """The last answer, for all threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runs: list[RegisteredRun] = field(default_factory=list)
    until: float = 0.0


_asked = _Asked()

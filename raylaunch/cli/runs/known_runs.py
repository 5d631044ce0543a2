"""Which runs there are, and which one a person means.

This module alone decides where runs are found: in the registry of this user, in the registry of the cluster that this
machine belongs to, or by the name of a folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from raylaunch.cli.run_once import say
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.control import cluster_registry
from raylaunch.cluster.driver import run_registry
from raylaunch.cluster.driver.run_registry import DriverProcess, RegisteredRun
from raylaunch.core.record import run_layout
from raylaunch.errors import ConfigError
from raylaunch.node.linux import procfs
from raylaunch.node.protocol.acceptor import SecretAddress

_MOST_NAMED = 5
_RECENT_SECONDS = 0.3
_RESULT_SECONDS = 10.0
"""How long a driver may take to write its result, at most, where others wait for it."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A run, with what is known of it before its journal is read."""

    id: str
    name: str
    folder: str
    """The run folder; "" if the run keeps nothing."""
    began: str
    """The time of day, in ISO 8601; "": only the journal knows."""
    cluster: str
    driver: DriverProcess | None
    """None: a folder that the registry does not have."""
    exit_code: int | None
    """What the driver noted at its end; None: it has not ended, or its driver was killed."""
    control: SecretAddress | None = None
    """Where its driver can be asked; None: nowhere, or not any more."""
    user: str = ""
    """Whose run it is; "": not known."""
    is_registered: bool = True
    """Whether it is in the registry of this user."""
    is_detached: bool = False
    """Whether another driver takes over when its driver is gone."""
    reader: RunReader = field(compare=False)

    @property
    def is_alive(self) -> bool | None:
        """Whether its driver is; None: not known, or the run may have another one by now."""
        return None if self.driver is None or self.is_detached else self.driver.is_alive

    @property
    def title(self) -> str:
        """Name and id, as messages name the run."""
        return f"{self.name} {self.id}"

    def await_result(self, seconds: float = _RESULT_SECONDS) -> None:
        """Wait for the result of a run whose workers have ended, unless its driver is gone, which writes it last."""
        reader, deadline = self.reader, time.monotonic() + seconds
        while self.exit_code is None and not reader.result() and time.monotonic() < deadline:
            if not (self.is_alive or (reader.has_driver and not reader.is_gone)):
                break
            reader.wait(_LOOK_SECONDS)


def all_runs(environ: Mapping[str, str]) -> list[KnownRun]:
    """Return the runs of this user that are known here, and all of the cluster, the newest first."""
    own = {(run.id, run.began, run.driver): run for run in _own_runs(environ)}
    for run in cluster_registry.runs(environ):
        key = (run.id, run.began, run.driver)
        if key not in own:
            own[key] = _known(run, is_registered=False)
        elif own[key].exit_code is None:  # its entry is newer than the file, which was written once
            own[key] = _known(run)
    return sorted(own.values(), key=lambda run: run.began, reverse=True)


def _own_runs(environ: Mapping[str, str]) -> list[KnownRun]:
    directory = _registry(environ)
    run_registry.prune(directory)
    return [_known(run) for run in run_registry.runs(directory)]


def forget_lost(runs: Sequence[KnownRun]) -> list[KnownRun]:
    """Remove runs whose drivers are gone, as was just seen, from the cluster's registry.

    Returns the ones that are listed nowhere else.
    """
    if gone := {run.control for run in runs if run.control is not None and run.reader.is_gone}:
        cluster_registry.forget(gone)
    return [run for run in runs if run.reader.is_gone and not run.is_registered]


def find_to_change(text: str | None, environ: Mapping[str, str]) -> KnownRun:
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


def _goes_on(run: KnownRun) -> bool:
    """Whether it has not ended, as far as is known."""
    return run.exit_code is None and (run.is_alive is not False or run.is_detached)


def _is_mine(run: KnownRun) -> bool:
    return run.is_registered or run.user == procfs.user_name()


def _of_this_folder(runs: Sequence[KnownRun]) -> list[KnownRun]:
    """Return those that keep their files below the working folder."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return []
    return [run for run in runs if run.folder and Path(run.folder).is_relative_to(here)]


def find(
    text: str | None, environ: Mapping[str, str], *, among: Callable[[KnownRun], bool] = lambda _: True
) -> KnownRun:
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
    if text is None and own and own[0].exit_code is None and (own[0].is_alive or own[0].is_detached):
        return own[0]
    known = [run for run in own if text in (run.id, f"{run.name}/{run.id}")]
    known = known or all_runs(environ)
    mine = [run for run in known if _is_mine(run)]
    if not known:
        msg = "there is no run yet" if text is None else f"there is no run `{text}`, nor any other run of this user"
        raise ConfigError(msg, hint="a run of another user, or one that was copied, is named by its folder")
    if text is None and not mine:
        raise ConfigError("there is no run of this user yet", hint=f"of others there are {_names(known)}")
    if text is None:
        return mine[0]
    meant = [run for run in known if text in (run.id, f"{run.name}/{run.id}")]
    meant = meant or [run for run in (*mine, *known) if run.name == text][:1]
    meant = meant or [run for run in known if text and run.id.startswith(text)]
    meant = [run for run in meant if among(run)] or meant
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(f"`{text}` may be one of {len(meant)} runs", hint=f"write {_names(meant)}")
    raise ConfigError(f"there is no run `{text}`", hint=f"there are {_names(_nearest(text, known))}")


def await_driver(run: KnownRun) -> None:
    """Look for the driver of a run. Waits for another driver of a detached run whose driver is gone."""
    run.reader.await_driver(lambda: say(f"{run.title} has no driver right now: waiting for the next one"))


def _registry(environ: Mapping[str, str]) -> Path:
    try:
        return run_registry.folder(environ)
    except RuntimeError as error:
        raise ConfigError(f"the list of runs is not known: {error}", hint="set XDG_STATE_HOME or HOME") from None


def _names(runs: Sequence[KnownRun]) -> str:
    names = [f"`{run.name}/{run.id}`" for run in runs[:_MOST_NAMED]]
    return ", ".join(names) + (" ..." if len(runs) > _MOST_NAMED else "")


def _nearest(text: str, known: Sequence[KnownRun]) -> list[KnownRun]:
    """Return the runs whose name or id resembles the text; else the newest ones."""
    near = get_close_matches(text, {run.id for run in known} | {run.name for run in known}, n=_MOST_NAMED)
    return [run for run in known if run.id in near or run.name in near] or list(known)


def _of_folder(text: str, environ: Mapping[str, str]) -> KnownRun | None:
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
    for run in run_registry.runs(_registry(environ)):
        if run.folder and os.path.realpath(run.folder) == path:
            return _known(run)
    reader = RunReader(path)
    reader.refresh()
    header = reader.files.header
    began, name = (header.began, header.job.title) if header else ("", Path(path).parent.name)
    return KnownRun(
        id=Path(path).name,
        name=name,
        folder=path,
        began=began,
        cluster="",
        driver=None,
        exit_code=None,
        reader=reader,
    )


def _known(run: RegisteredRun, *, is_registered: bool = True) -> KnownRun:
    return KnownRun(
        id=run.id,
        name=run.name,
        folder=run.folder,
        began=run.began,
        cluster=run.cluster,
        driver=run.driver,
        exit_code=run.exit_code if run.ended else None,
        control=run.control,
        user=run.user,
        is_registered=is_registered,
        is_detached=run.is_detached and not run.ended,
        reader=_reader(run),
    )


def _reader(run: RegisteredRun) -> RunReader:
    """Return what reads the run: its driver is asked while it lasts."""
    if run.ended or (run.driver.is_alive is False and not run.is_detached):
        return RunReader(run.folder)
    find = partial(_newest_entry, run) if run.is_detached else None
    is_stale = cluster_registry.is_stale(run) and not run.is_detached
    return RunReader(run.folder, run.control, (lambda: None) if is_stale else find)


def _newest_entry(run: RegisteredRun) -> RegisteredRun | None:
    """Return what the cluster knows of a detached run; None: it does not know the run any more."""
    found = (each for each in _recent_runs() if each.token == run.token)
    return next((each for each in found if not cluster_registry.is_stale(each)), None)


def _recent_runs() -> list[RegisteredRun]:
    """Return what the cluster said a moment ago, or ask it: many runs of a cluster that is gone may be listed."""
    began = time.monotonic()
    if began >= _asked.until:
        _asked.runs = cluster_registry.runs(os.environ)
        now = time.monotonic()
        _asked.until = now + max(_RECENT_SECONDS, 2.0 * (now - began))
    return _asked.runs


@dataclass(slots=True)
class _Asked:
    runs: list[RegisteredRun] = field(default_factory=list)
    until: float = 0.0


_asked = _Asked()

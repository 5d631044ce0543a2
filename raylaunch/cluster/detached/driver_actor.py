"""The driver of a detached run as a Ray actor: a process of the cluster, which outlives the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster import named_resources
from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.lease import end_this_process
from raylaunch.cluster.control import cluster_registry
from raylaunch.cluster.detached.detached_run import DetachedRun, DriverNews, Tell
from raylaunch.cluster.driver import interim_keeper, succession
from raylaunch.cluster.driver.interim_keeper import InterimState
from raylaunch.cluster.driver.succession import Succession
from raylaunch.cluster.local.file_writer import opened
from raylaunch.cluster.ray_api import actor_errors
from raylaunch.cluster.registry_key import NAMESPACE, RENEW_SECONDS
from raylaunch.cluster.session import ray_session
from raylaunch.core.job.job import Job, RayOptions
from raylaunch.core.record import run_layout
from raylaunch.errors import ClusterError, ConfigError, ExitCode
from raylaunch.node.linux import processes

TITLE = "raylaunch: driver"
"""What `ps` shows of it, after `ray::`."""
_ASK_SECONDS = 2.0
"""How long a call waits for news."""
_LINGER_SECONDS = 5.0
"""How long the driver waits, after the end, for a command that has asked for news so recently to hear of it."""
_MOST_NEWS = 2000
_RETRY_SECONDS = 0.2

_KEEP_SECONDS = 10.0
"""How long the command waits, at most, until an interim keeper has what was requested."""
_SAME_VERSIONS = "install the same raylaunch and Ray on all nodes, and for the command"
_BEGIN_SECONDS = 60.0
"""How long a driver waits for the command to tell what to run."""

Drive = Callable[[DetachedRun, Tell, Succession], int]
"""Runs it, and returns the exit code. A function of a module, which the actor's process can import too."""


class DriverActor:
    """The actor of a run's driver. `begin` is its first call: Ray's head would keep arguments of the constructor.

    If its process dies, Ray starts it anew. Then it goes on with the ledger that agents keep, or an interim keeper.
    """

    def __init__(self, patience: float, *, takes_over: bool = False) -> None:
        """`patience`: seconds for which some agent may keep the ledger of a driver that is gone.

        `takes_over`: another driver has begun the run, though Ray has not started this one in its place.
        """
        type(self).__name__ = TITLE
        self._patience = patience
        context = ray.get_runtime_context()
        self._me = context.current_actor
        self._token = named_resources.token_of(str(context.get_actor_name()))
        self._is_another = takes_over or context.was_current_actor_reconstructed
        self._news = NewsFeed()
        #: Ray's reference to the answer of the interim keeper.
        self._interim: Any = None
        self._request: bytes | None = None
        self._requested = threading.Event()
        threading.Thread(target=self._drive, daemon=True, name="raylaunch-driver").start()

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def begin(self, message: bytes) -> None:
        """Begin the run, unless it has begun. `message`: a `DetachedRun`, and what runs it."""
        if self._request is None:
            self._request = message
            self._requested.set()

    async def versions(self) -> str:
        """Return what must be equal in this process and the command that starts the run."""
        return _versions()

    async def is_there(self) -> bool:
        """Return True: this process is there."""
        return True

    async def news(self, after: int) -> tuple[str, list[DriverNews]]:
        """Return the news after number `after`, or nothing when two seconds have passed; and which process this is.

        The command may leave when it has the run's id. So that is not told before somebody keeps what was requested.
        """
        return self._news.life, await self._news.after(after, self._await_keeper)

    async def _await_keeper(self) -> None:
        if self._interim is not None:
            await asyncio.wait([asyncio.wrap_future(self._interim.future())], timeout=_KEEP_SECONDS)

    def _drive(self) -> None:
        self._me.is_there.options(name=TITLE).remote()  # Ray sets the title of a process after a call
        try:
            place = self._found() if self._is_another else self._first()
        except Exception as error:  # noqa: BLE001
            self._news.tell(DriverNews(text=f"the driver cannot begin: {type(error).__name__}: {error}\n"))
            self._leave(int(ExitCode.UNAVAILABLE))
        else:
            if place is None:
                self._end()
            else:
                self._run(place)

    def _first(self) -> Succession | None:
        """Return the place of the first driver; None: the command died before it had told what to run."""
        self._requested.wait(_BEGIN_SECONDS)
        if self._request is None:
            return None
        if named_resources.announced(self._token) is None:
            named_resources.announce(self._token, 1)
        with contextlib.suppress(RayError):
            timeout = _load(self._request)[0].job.driver_timeout
            self._interim = interim_keeper.keep(self._token, timeout, InterimState(request=self._request))
        return Succession(token=self._token, request=self._request)

    def _found(self) -> Succession | None:
        """Return the place of a driver after another, or of one that begins; None: nobody knows what to run."""
        since = time.monotonic()

        def look() -> Succession | None:
            found = succession.find(self._token, since)
            return self._first() if found is None and self._request is not None else found

        place = succession.await_ledger(look, self._patience, AbsenceNotes(self._token).say)
        if place is not None and place.predecessor is None:
            named_resources.remove_nodes(self._token)  # the last driver may have started some
        return place

    def _run(self, place: Succession) -> None:
        code = int(ExitCode.INTERNAL)
        try:
            run, drive = _load(place.request)
            _take_place_of(run, needs_folder=place.predecessor is None)
            code = drive(replace(run, job=replace(run.job, ray=RayOptions())), self._news.tell, place)
        except ConfigError as error:
            code = error.exit_code
            self._news.tell(DriverNews(text=f"error: {error.message}\n\nhint: {error.hint}\n"))
        except Exception as error:  # noqa: BLE001
            self._news.tell(DriverNews(text=f"the driver cannot begin: {type(error).__name__}: {error}\n"))
        finally:
            if place.is_in_command():
                named_resources.remove_nodes(self._token)
            self._leave(code, place)

    def _leave(self, code: int, place: Succession | None = None) -> None:
        """Tell the command that the run has ended, and end what is left of it, if this driver is in command."""
        self._news.tell(DriverNews(exit_code=code))
        self._news.linger()
        if place is not None and not place.is_in_command():
            end_this_process()
        self._end()

    def _end(self) -> None:
        """End all that is left of the run, and this process."""
        named_resources.remove(self._token)
        ray.kill(self._me)


class NewsFeed:
    """Holds the driver's news for the command that started the run, which asks for them by one call after the other."""

    def __init__(self) -> None:
        """Of the event loop in which this is called."""
        self._loop = asyncio.get_event_loop()
        self._changed = asyncio.Event()
        #: Identifies this process, whose news are counted from 0.
        self.life = secrets.token_hex(4)
        self._news: list[DriverNews] = []
        #: How many of the news the command has got.
        self._told = 0
        #: How many calls of `after` wait for an answer, and the time.monotonic() at which one did last.
        self._listeners, self._listened_at = 0, time.monotonic()

    def tell(self, news: DriverNews) -> None:
        """Append news. Any thread may call it."""
        if len(self._news) < _MOST_NEWS or not news.text:
            self._news.append(news)
            self._loop.call_soon_threadsafe(self._changed.set)

    async def after(self, number: int, may_tell: Callable[[], Awaitable[None]]) -> list[DriverNews]:
        """Return the news after this number, or nothing when two seconds have passed. Awaits `may_tell` before."""
        self._told = max(self._told, number)
        self._listeners += 1
        try:
            if len(self._news) <= number:
                self._changed.clear()
                timer = self._loop.call_later(_ASK_SECONDS, self._changed.set)
                await self._changed.wait()
                timer.cancel()
            await may_tell()
        finally:
            self._listeners -= 1
            self._listened_at = time.monotonic()
        return self._news[number:]

    def linger(self) -> None:
        """Wait, in another thread than the loop's, until the command has got all news or seems to have left."""
        deadline = (time.monotonic() if self._listeners else self._listened_at) + _LINGER_SECONDS
        while self._told < len(self._news) and time.monotonic() < deadline:
            time.sleep(0.05)


class AbsenceNotes:
    """Says in `status`, `driver.log` and Ray's log why this driver is not in command yet."""

    def __init__(self, token: str) -> None:
        self._token = token
        #: What was said last, and the time.monotonic() of that.
        self._said, self._said_at = "", 0.0

    def say(self, why: str) -> None:
        """Say this, if it is new or was said a while ago."""
        now, is_new = time.monotonic(), why != self._said
        if is_new or now >= self._said_at + RENEW_SECONDS:
            self._said, self._said_at = why, now
            noting = partial(self._note, why, is_new=is_new)
            threading.Thread(target=noting, daemon=True, name="raylaunch-say").start()  # a file system may not answer

    def _note(self, why: str, *, is_new: bool) -> None:
        line = f"raylaunch: no driver is in command: {why}\n"
        if is_new:
            sys.stderr.write(line)
        run = cluster_registry.note_absence(self._token, why)
        if is_new and run is not None and run.folder:
            with contextlib.suppress(OSError):
                log = opened(Path(run.folder) / run_layout.DRIVER_LOG)
                os.write(log, line.encode(errors="backslashreplace"))
                os.close(log)


def _versions() -> str:
    return serialization.versions(DetachedRun, DriverNews)


def _load(message: bytes) -> tuple[DetachedRun, Drive]:
    found: tuple[DetachedRun, Drive] = pickle.loads(message)  # noqa: S301
    return found


def _take_place_of(run: DetachedRun, *, needs_folder: bool) -> None:
    """Make this process one as that which requested the run, but connected to Ray as it is. See `DetachedRun.enter`.

    Raises ConfigError.
    """
    try:
        run.enter(needs_folder=needs_folder)
    except OSError as error:
        host = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        msg = f"the folder {run.cwd}, in which the run was started, cannot be used on {host}: {error.strerror}"
        hint = "Ray has started the driver there; a detached run needs its folder on all nodes, by a shared file system"
        raise ConfigError(msg, hint=hint) from None
    processes.set_niceness(run.niceness)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def start(run: DetachedRun, drive: Drive, address: str) -> Iterator[DriverNews]:
    """Start the driver on this machine's node of the cluster, and yield its news; it goes on when nobody asks for more.

    If that fails before the run has an id, nothing of it is left. Raises ClusterError.
    """
    with ray_session.connected(run.job, address):
        yield DriverNews(begins=True)
        token, has_id = secrets.token_hex(8), False
        try:
            actor = _started(run.job, token)
            _compare_versions(actor)
            for news in _news(actor, pickle.dumps((run, drive))):
                has_id = has_id or bool(news.run_id)
                yield news
        except Exception as error:
            if not has_id:
                named_resources.remove(token)
            if isinstance(error, ClusterError):
                raise
            is_lost = isinstance(error, RayError)
            why = actor_errors.summary(error) if is_lost else f"{type(error).__name__}: {error}"
            msg = f"the driver of the run {'is lost' if is_lost else 'cannot be understood'}: {why}"
            raise ClusterError(msg, hint="" if is_lost else _SAME_VERSIONS) from error


def _started(job: Job, token: str) -> Any:
    # An agent that was cut off learns that its driver is gone only when its lease has expired.
    patience = job.driver_timeout + job.node_timeout
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(max_restarts=-1, max_task_retries=0, enable_task_events=False)(DriverActor)
        .options(
            name=named_resources.driver_name(token),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        )
        .remote(patience)
    )


def _compare_versions(actor: Any) -> None:
    """Raise ClusterError if the driver cannot read what this process sends, or the other way round."""
    try:
        theirs = ray.get(actor.versions.remote())
    except RayTaskError:
        theirs = "a raylaunch that does not say its version"
    if theirs != _versions():
        msg = f"the driver of the run cannot be started: Ray has {theirs} there, and this command has {_versions()}"
        raise ClusterError(msg, hint=_SAME_VERSIONS)


def _news(actor: Any, request: bytes) -> Iterator[DriverNews]:
    actor.begin.remote(request)
    life, seen = "", 0
    while True:
        try:
            now, found = ray.get(actor.news.options(name=TITLE).remote(seen))
        except ActorUnavailableError:  # Ray starts it again, perhaps before any agent knows the run
            time.sleep(_RETRY_SECONDS)
            actor.begin.remote(request)
            continue
        if now != life:
            life, seen, found = now, 0, found if not seen else []
        for news in found:
            seen += 1
            if news.exit_code is not None or news.runs:
                actor.news.options(name=TITLE).remote(seen)  # it need not wait for this process
            yield news
            if news.exit_code is not None:
                return

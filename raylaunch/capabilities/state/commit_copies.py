"""Copies of commits: pushes what the node's ranks commit to another host, and fetches what the node lacks.

It is what `file_copies` is for files. Both classes are called in the agent's event loop, and work in threads.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import NoneType

from raylaunch.core.machine.commits import Commit, CopyAddress, HeldCommit, Holder, RestoreOrder
from raylaunch.core.text import printable
from raylaunch.node.state import transfer
from raylaunch.node.state.state_files import StateFiles
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.state.transfer import CopyRefusedError, TornError

_LOOK_SECONDS = 0.02
"""How often is looked whether there is another commit to copy."""
_RETRY_SECONDS = (0.1, 0.3, 1.0)
"""The pauses after failures in a row; the last one is repeated."""
_ASK_SECONDS, _ASK_AGAIN_SECONDS = 3.0, 0.3
"""How long a subreaper may take to answer: it first imports what it needs. Where a host's processes are all gone, its
kernel refuses at once. One that has not answered the last time has less time, since its host may be gone."""
_MOST_ASKED = 16
"""How many are asked at a time: those whose hosts are gone take their seconds together."""
_OUTSIDE_TRIES = 4
"""How often a part is fetched from outside of the world, from where nobody may answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPort:
    """What `CommitPushes` and `CommitFetches` need of the agent."""

    memory: StateMemory
    secret: str
    """That agents of the run know."""
    say: Callable[[str], None]
    """Tell the person something. Any thread may call it."""
    call: Callable[[Callable[[], None]], None]
    """Have the agent's event loop call this, while it runs. Any thread may call it."""

    def failed(self, stop: threading.Event, failures: int, what: str, error: Exception) -> int:
        """Wait before the next try, unless it is stopped. From the second failure on, say why. Return their number."""
        if failures and not stop.is_set():
            self.say(printable(f"a node {what}: {error or type(error).__name__}"))
        stop.wait(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
        return failures + 1


@dataclass(slots=True)
class _Push:
    """What a thread copies, and to whom. It ends soon after `stop` is set."""

    attempt: int = 0
    target: CopyAddress | None = None
    is_begun: bool = False
    stop: threading.Event = field(default_factory=threading.Event)


class CommitPushes:
    """Copies what the node's ranks commit to another agent."""

    def __init__(self, port: CopyPort) -> None:
        self._port = port
        self._push = _Push()

    @property
    def target(self) -> CopyAddress | None:
        """Where commits of the attempt are copied to; None: nowhere."""
        return self._push.target

    def copy_to(self, target: CopyAddress, attempt: int) -> None:
        """Copy the commits of an attempt to this agent from now on."""
        self.stop()
        self._push = _Push(attempt=attempt, target=target)
        self._port.memory.begin_copies(attempt)
        self.begin()

    def begin(self) -> None:
        """Begin, if the script has made a commit."""
        push = self._push
        if push.target is not None and not push.is_begun and any(True for _ in self._port.memory.files):
            push.is_begun = True
            arguments = push, push.target
            threading.Thread(target=self._push_all, args=arguments, daemon=True, name="raylaunch-state-copies").start()

    def stop(self) -> None:
        """Copy nothing any more."""
        self._push.stop.set()
        self._push = _Push()

    # In the thread.

    def _push_all(self, push: _Push, target: CopyAddress) -> None:
        transfer.lower_priority()
        memory = self._port.memory
        done: Commit | None = None
        failures = 0
        while not push.stop.wait(_LOOK_SECONDS):
            parts = memory.to_copy(push.attempt)
            if not parts or parts[0].commit == done:
                continue
            began = time.monotonic()
            try:
                self._push_parts(push.stop, target, parts)
            except (OSError, CopyRefusedError) as error:
                what = f"has no copy of its state on {target.node}"
                failures = self._port.failed(push.stop, failures, what, error)
                continue
            failures, done = 0, parts[0].commit
            memory.copied(done)
            until = 2 * time.monotonic() - began
            while time.monotonic() < until and not memory.is_hurried and not push.stop.wait(_LOOK_SECONDS):
                pass

    def _push_parts(self, stop: threading.Event, target: CopyAddress, parts: tuple[HeldCommit, ...]) -> None:
        memory = self._port.memory
        push(
            memory.files,
            target,
            self._port.secret,
            parts,
            is_marked=parts[0] in memory.files.kept(),
            is_stopped=stop.is_set,
            rate=float("inf") if memory.is_hurried else transfer.COPY_BYTES_PER_SECOND,
        )


class CommitFetches:
    """Asks others what they hold, before the ranks choose what to restore, and then gets what the node lacks."""

    def __init__(self, port: CopyPort) -> None:
        self._port = port
        self._stop = threading.Event()
        #: What others than the nodes of the world hold; None: they are being asked.
        self.lost: tuple[Holder, ...] | None = ()
        #: Those that have not answered when they were asked last.
        self._silent: AbstractSet[CopyAddress] = frozenset()

    def begin(self, addresses: tuple[CopyAddress, ...]) -> None:
        """Ask others than the nodes of the world for another attempt."""
        self.stop()
        self._stop = threading.Event()
        self.lost = None if addresses else ()
        if addresses:
            arguments = self._stop, addresses
            threading.Thread(target=self._ask_all, args=arguments, daemon=True, name="raylaunch-state-lost").start()

    def fetch(self, order: RestoreOrder) -> None:
        """Get what the node lacks, and let its workers restore."""
        if order.sources:
            arguments = self._stop, order
            threading.Thread(target=self._fetch_all, args=arguments, daemon=True, name="raylaunch-state-fetch").start()
        else:
            self._port.memory.announce(order)

    def stop(self) -> None:
        """Get nothing any more."""
        self._stop.set()

    # In threads.

    def _ask_all(self, stop: threading.Event, addresses: tuple[CopyAddress, ...]) -> None:
        found: dict[CopyAddress, Holder | None] = {}
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(min(len(addresses), _MOST_ASKED)) as pool:
            found = dict(zip(addresses, pool.map(self._asked_of, addresses), strict=True))

        def learn() -> None:
            self._silent = {address for address, holder in found.items() if holder is None}
            if not stop.is_set():
                self.lost = tuple(holder for holder in found.values() if holder is not None)

        self._port.call(learn)

    def _asked_of(self, address: CopyAddress) -> Holder | None:
        """Ask twice if the connection breaks: an agent may just be killed, and its subreaper answers then."""
        seconds = _ASK_AGAIN_SECONDS if address in self._silent else _ASK_SECONDS
        for _ in range(2):
            try:
                with transfer.connection(address, self._port.secret, seconds=seconds) as line:
                    return Holder(at=address, held=transfer.ask(line, tuple[HeldCommit, ...], "held"))
            except ConnectionError:
                continue
            except (OSError, CopyRefusedError):
                break
        return None

    def _fetch_all(self, stop: threading.Event, order: RestoreOrder) -> None:
        """Get all parts that the node lacks, and then let its workers restore."""
        assert order.commit is not None
        memory = self._port.memory
        for source, ranks in order.sources:
            parts = [HeldCommit(rank=rank, world_size=order.world_size, commit=order.commit) for rank in ranks]
            failures = 0
            # Where one outside is gone, workers say what they lack, and the next attempt goes on without it.
            while not stop.is_set() and not (source.outside and failures == _OUTSIDE_TRIES):
                try:
                    with transfer.connection(source, self._port.secret) as line:
                        for part in parts:
                            fetch(memory.files, line, part, (order.commit, order.kept))
                    break
                except (OSError, CopyRefusedError) as error:
                    what = f"cannot get its state from {source.node}"
                    failures = self._port.failed(stop, failures, what, error)
        self._port.call(lambda: None if stop.is_set() else memory.announce(order))


def push(
    files: StateFiles,
    target: CopyAddress,
    secret: str,
    parts: Iterable[HeldCommit],
    *,
    is_marked: bool = True,
    is_stopped: Callable[[], bool] = lambda: False,
    rate: float = transfer.COPY_BYTES_PER_SECOND,
) -> None:
    """Copy parts to another agent, at most `rate` bytes per second. `is_marked`: as in `CopyRequest`.

    Raises CopyRefusedError, and OSError, also where it is stopped.
    """
    with transfer.connection(target, secret) as line:
        for part in parts:
            with files.reading(part.rank, part.commit, part.world_size) as fd:
                if fd is None:
                    msg = "it was overwritten before it was copied"
                    raise TornError(msg)
                size = transfer.part_bytes(fd, part)
                transfer.ask(line, NoneType, "push", part=part, size=size, is_marked=is_marked)
                transfer.send_part(line, fd, part, size, is_stopped=is_stopped, rate=rate)
                transfer.read_answer(line, NoneType)


def fetch(files: StateFiles, line: socket.socket, part: HeldCommit, spared: Collection[Commit | None]) -> None:
    """Get a part from another agent, unless it is there. Raises CopyRefusedError and OSError."""
    there = files.find(part.rank, part.commit, part.world_size)
    if there is not None and not there.is_light:  # of a light part, what is needed may be the whole one
        return
    size = transfer.ask(line, int, "fetch", part=part)
    with files.writing_copy(part, size, spared) as file:
        if isinstance(file, str):
            raise CopyRefusedError(file)
        transfer.receive_part(line, file, part, size)

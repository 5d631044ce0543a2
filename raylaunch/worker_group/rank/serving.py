"""The function that a group launches: makes an object in each rank, and calls its methods for the caller."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import raylaunch.worker
from raylaunch.core.failures.failure import is_of_lost_peer
from raylaunch.core.text import text_of
from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.runtime import boot
from raylaunch.worker_group.rank import frames, packing, shared_parts
from raylaunch.worker_group.rank.messages import Answer, Begin, Call, End, GroupRank, RankHello, RankReady

ADMITTED = b"+"
RAY_NODE = "RAYLAUNCH_RAY_NODE"
"""The variable that has the id of the rank's node in Ray."""
_CONNECT_SECONDS = 60.0
_NOTHING = object()


class RankServer:
    """What runs in each rank. It is unpickled before the process group is made."""

    def __init__(self, host: str, port: int, secret: str, kind: type) -> None:
        """`host`, `port`, `secret`: where the caller listens. `kind`: the class of the object."""
        self._address = host, port
        self._secret = secret
        self._kind = kind
        self._object: Any = _NOTHING
        self._line: socket.socket | None = None
        #: The file of the last result that is shared; None: none is.
        self._shared: int | None = None
        self._is_terminated: Callable[[], bool] = lambda: False

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (*self._address, self._secret, self._kind)

    def __call__(self) -> None:
        """Make the object and answer calls, until the caller has no more."""
        self._is_terminated = _note_sigterm()
        with self._connected() as line:
            self._line = line
            run = raylaunch.worker.elastic(self._serve) if is_elastic(self._kind) else self._serve
            run()

    def _begin(self, line: socket.socket) -> None:
        message, parts = frames.receive(line)
        assert isinstance(message, Begin)
        datasets, *arguments = packing.split(parts, message.lengths)
        shards = packing.unpacked(datasets)
        raylaunch.worker.dataset_shards = {name: partial(packing.unpacked, shard) for name, shard in shards.items()}
        if self._object is _NOTHING:
            args, kwargs = _arguments(arguments)
            self._object = self._kind(*args, **kwargs)

    def _serve(self) -> None:
        """Answer calls. A rank that stays leaves this by an exception, and enters it again in the next attempt."""
        line, self._line = self._line, None
        with line or self._connected() as connected:
            frames.send(connected, RankReady(completed=self._restored()))
            while self._answer_next(connected):
                pass

    def _restored(self) -> int | None:
        """Restore the object's `state`, if it is a `State`, and return the steps that were done."""
        state = getattr(self._object, "state", None)
        is_there = "raylaunch.worker.state.elastic_state" in sys.modules and isinstance(state, raylaunch.worker.State)
        return state.restore() if is_there and state is not None else None

    def _answer_next(self, line: socket.socket) -> bool:
        with _waiting_for_call():
            message, parts = frames.receive(line)
        self._end_sharing()
        if isinstance(message, End):
            return False
        assert isinstance(message, Call)
        _check_objects()
        answer = self._answer(message, parts)
        _check_objects()
        frames.send(line, *answer)
        return True

    def _answer(self, call: Call, parts: list[bytearray]) -> tuple[Answer, list[frames.Buffer]]:
        try:
            args, kwargs = _arguments(packing.split(parts, call.lengths))
            result = getattr(self._object, call.method)(*args, **kwargs)
            found = packing.packed(result)
            if not call.shares_result:
                return Answer(number=call.number), found
            shared, self._shared = shared_parts.share(found)
            return Answer(number=call.number, shared=shared), []
        except BaseException as error:
            is_end = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and self._is_terminated())
            if is_end or (is_elastic(self._kind) and _explains(error)):
                raise
            return _failed(call.number, error)

    def _end_sharing(self) -> None:
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None

    @contextlib.contextmanager
    def _connected(self) -> Any:
        """Connect to the caller, say which rank this is, and begin the attempt."""
        context = raylaunch.worker.context()
        hello = RankHello(
            place=GroupRank(
                rank=context.rank,
                host=socket.gethostname(),
                node=context.node_rank,
                pid=os.getpid(),
                gpus=tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))),
            ),
            attempt=context.attempt,
            world_size=context.world_size,
            has_object=self._object is not _NOTHING,
            ray_node=os.environ.get(RAY_NODE, ""),
        )
        with _admitted(self._address, f"{self._secret} {context.attempt}:{context.rank}\n".encode()) as line:
            frames.send(line, hello)
            self._begin(line)
            yield line


def _unpickled(host: str, port: int, secret: str, kind: type) -> RankServer:
    if is_elastic(kind):
        raylaunch.worker.elastic  # noqa: B018  # from now on it notes which groups and models are made
    return RankServer(host, port, secret, kind)


def _note_sigterm() -> Callable[[], bool]:
    """Return a function that says whether SIGTERM has come since, for which there is a handler, such as Ray's.

    The SystemExit that follows is no answer to a call: the rank is to end, since another one has failed. The exception
    itself does not say where it is from: `ray.get` puts one of its own in place of the handler's.
    """
    noted, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child would write of its signals, too

    def has_come() -> bool:
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(noted, 1 << 16)
        return False

    return has_come


def is_elastic(kind: type) -> bool:
    """Return whether a class says that its objects stay when other ranks die."""
    return bool(getattr(kind, "elastic", False))


@contextlib.contextmanager
def _waiting_for_call() -> Iterator[None]:
    """Between two calls there is nothing to save, and no progress."""
    writer = heartbeat_writer.current_writer()
    with raylaunch.worker.section("waiting for a call"), writer.ready_to_stop() if writer else contextlib.nullcontext():
        yield


def _check_objects() -> None:
    """Raise RuntimeError if this rank has arrays in Ray's store that Ray is not kept from using again."""
    if shared_parts.is_any_lost():
        raise RuntimeError("the actor has died that held objects of Ray's for this rank, whose arrays may have changed")


def _explains(error: BaseException) -> bool:
    from raylaunch.worker.survivors import elastic_function  # noqa: PLC0415

    return elastic_function.explains(error)


def _admitted(address: tuple[str, int], hello: bytes) -> socket.socket:
    """Return a connection that the caller has admitted. It may drop one if many come at once."""
    give_up_at = time.monotonic() + _CONNECT_SECONDS
    while True:
        line = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(hello)
        with contextlib.suppress(ConnectionResetError):
            if line.recv(1) == ADMITTED:
                line.settimeout(None)
                return line
        line.close()
        if time.monotonic() > give_up_at:
            raise ConnectionRefusedError("the caller does not admit this rank")
        time.sleep(0.1)


def _arguments(values: Sequence[Sequence[frames.Buffer]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments, *scattered = values
    load: Callable[[int], object] = lambda number: packing.unpacked(scattered[number])  # noqa: E731
    found: tuple[tuple[Any, ...], dict[str, Any]] = packing.unpacked(arguments, load)
    return found


def _failed(number: int, error: BaseException) -> tuple[Answer, list[frames.Buffer]]:
    """Return the answer for an exception. One that cannot be pickled is sent as its text."""
    text = f"{type(error).__name__}: {text_of(error)}"
    try:
        parts = packing.packed(error)
    except Exception:  # noqa: BLE001
        parts = []
    answer = Answer(
        number=number,
        error=text,
        traceback="".join(boot.formatted(error)),
        lost_peer=is_of_lost_peer(text),
    )
    return answer, parts

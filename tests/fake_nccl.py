"""CUDA and NCCL on a machine without a GPU: streams that a thread runs, and a process group whose kernels stand there.

As with NCCL, a collective returns at once. Its kernel stands in the stream until the kernels of all ranks do; of a rank
that is gone nothing is ever heard. Whoever waits for the device waits in C, where Python's signal handlers do not run.
An abort lets the kernel that stands there end as if it had succeeded, with garbage in its tensor, and what is behind it
in the stream goes on with that. Ranks meet in files, in the folder FAKE_NCCL.

`on_device` says which CPU tensors are taken for CUDA's; only copies of them are queued, so other operations on them are
launched by `launch`. FAKE_NCCL_FAULTS, in JSON, says what goes wrong besides:

    stuck               [[attempt, number], ...]: no rank's kernel of these collectives ever ends
    abort_seconds       how long an abort takes; -1: it never ends
    abort               "raises"; "poisons" the device, so that it only gives errors; "together": it only ends when all
                        groups are being aborted
    destructor_seconds  how long the destructor of a group waits
    version             of NCCL
    spins               whether a wait for the device takes CPU, as a wait for CUDA usually does
    records             whether there is a Flight Recorder that can be asked; by default there is
    waits               whether the host waits for each collective: with it, what computes on the host can be trained
    watchdog            [attempt, number, seconds]: for how long the kernel of this collective may stand until the
                        watchdog does what TORCH_NCCL_ASYNC_ERROR_HANDLING says
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.overrides import TorchFunctionMode

GARBAGE = 1e30
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
"""Seconds. The threads of CUDA and NCCL run no Python. These do, and must seldom do so while ranks hang and write their
stacks: one in 900 times faulthandler crashed, which reads the frames of threads that run (`docs/hangs.md`).
"""
FAULTS = json.loads(os.environ.get("FAKE_NCCL_FAULTS", "{}"))
LIBC = ctypes.CDLL(None)
PR_SET_NAME = 15


class Gate:
    """Closed until it is opened. Who waits for it is in C, and has released the interpreter's lock."""

    def __init__(self) -> None:
        kind = "spin" if FAULTS.get("spins") else "mutex"
        self._lock, self._unlock = (getattr(LIBC, f"pthread_{kind}_{what}") for what in ("lock", "unlock"))
        self._memory = ctypes.create_string_buffer(64)
        getattr(LIBC, f"pthread_{kind}_init")(self._memory, None)
        self._lock(self._memory)

    def open(self) -> None:
        self._unlock(self._memory)

    def wait(self) -> None:
        self._lock(self._memory)
        self._unlock(self._memory)


class Stream:
    """Kernels that run one after the other. A kernel is called until it returns something else than False."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.kernels: deque[Callable[[], object]] = deque()
        device_.streams.append(self)

    def launch(self, kernel: Callable[[], object]) -> None:
        self.kernels.append(kernel)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.launch(lambda: event.is_done)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def step(self) -> bool:
        """Run the first kernel, if there is one. Return whether it has ended."""
        if not self.kernels or self.kernels[0]() is False:
            return False
        self.kernels.popleft()
        return True


class Event:
    """As `torch.cuda.Event`, recorded once at most."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.is_done = True
        self.at = 0.0
        self._gate = Gate()

    def record(self, stream: Stream | None = None) -> None:
        self.is_done = False
        (stream or _current[-1]).launch(self._end)

    def _end(self) -> None:
        self.is_done, self.at = True, time.monotonic()
        self._gate.open()

    def synchronize(self) -> None:
        device_.wait_for(self, self._gate)
        if device_.is_poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


class Device:
    """All streams, and who runs their kernels: a thread from `start` on, and else whoever waits."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.is_poisoned = False
        self.has_thread = False
        #: Chooses the stream that goes on while somebody waits, if there is no thread.
        self.choose: Callable[[list[Stream]], Stream] = lambda ready: ready[0]

    def start(self) -> None:
        self.has_thread = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Run the kernels. Where none goes on, look less and less often: see `_LONGEST_PAUSE`."""
        pause = _SHORTEST_PAUSE
        while True:
            if sum(stream.step() for stream in self.streams):
                pause = _SHORTEST_PAUSE
            else:
                time.sleep(pause)
                pause = min(1.1 * pause, _LONGEST_PAUSE)

    def wait_for(self, event: Event, gate: Gate) -> None:
        if self.has_thread:
            gate.wait()
        while not event.is_done:
            self.choose([stream for stream in self.streams if stream.kernels]).step()


device_ = Device()
_current = [Stream()]
_tensors: list[torch.Tensor] = []
_addresses: set[int] = set()


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, which is taken for one on the device from now on. It is never freed."""
    _tensors.append(tensor)
    _addresses.add(tensor.untyped_storage().data_ptr())
    return tensor


def hold(*objects: Any) -> None:
    """Take all tensors of modules and optimizers for tensors on the device."""
    for one in objects:
        states = one.state.values() if isinstance(one, torch.optim.Optimizer) else (one.state_dict(),)
        for tensor in [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]:
            on_device(tensor.to_local() if hasattr(tensor, "to_local") else tensor)


BEGINS = {
    "gloo": 'BACKEND, hold = "gloo", lambda *_: None',
    "fakenccl": 'import fake_nccl; fake_nccl.install(); BACKEND, hold = "fakenccl", fake_nccl.hold',
}
"""How a script begins that may have either backend. It calls `hold` with what it commits, before it does."""


def environment(folder: Path, faults: dict[str, Any] | None = None) -> dict[str, str]:
    """Let scripts in this folder import this module. Return what it needs in their environment."""
    (folder / "fake_nccl.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    (folder / "fake").mkdir()
    return {"FAKE_NCCL": str(folder / "fake"), "FAKE_NCCL_FAULTS": json.dumps(faults or {})}


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _addresses


def launch(kernel: Callable[[], object]) -> None:
    """Launch a kernel in the current stream."""
    _current[-1].launch(kernel)


def synchronize(device: object = None) -> None:
    """Wait for all that was launched in the current stream."""
    event = Event()
    event.record(_current[-1])
    event.synchronize()


class _QueuedCopies(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_ and kwargs and kwargs.get("non_blocking"):
            target, source = args
            launch(functools.partial(torch.Tensor.copy_, target.detach(), source.detach()))
            return target
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        with _QueuedCopies():
            yield
    finally:
        _current.remove(stream)


CUDA = {
    "Stream": Stream,
    "Event": Event,
    "stream": _stream,
    "synchronize": synchronize,
    "current_stream": lambda _=None: _current[-1],
    "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0),
    "device": lambda _: contextlib.nullcontext(),
    "is_initialized": lambda: True,
}
"""What takes the place of functions of `torch.cuda`, and of `torch.cpu`, which is the module of such tensors."""
_generator = torch.Generator()
RANDOM = {
    "get_rng_state": lambda _=None: _generator.get_state(),
    "set_rng_state": lambda state, _=None: _generator.set_state(state),
    "manual_seed": _generator.manual_seed,
}
"""What takes the place of functions of `torch.cuda` alone: tensors get the CPU's random numbers."""
TENSOR = {"is_cuda": property(is_on_device), "is_cpu": property(lambda tensor: not is_on_device(tensor))}
"""What takes the place of attributes of tensors."""


_aborting: dict[str, bool] = {}
"""Whether each group of this process is being aborted, by its folder's name."""


TEAR_DOWN, SKIP_CLEAN_UP = "1", "3"
"""Values of TORCH_NCCL_ASYNC_ERROR_HANDLING with which the watchdog ends the process. With the first one it aborts the
communicators before."""
_ABORTS_BEFORE_SECONDS = 0.3


def _watch(name: str, group: weakref.ref[FakeNCCL]) -> None:
    """Be the watchdog, by whose name a process with NCCL is known."""
    LIBC.prctl(PR_SET_NAME, b"pt_nccl_watchdg")
    handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", SKIP_CLEAN_UP)
    pipe = _recorder_pipe() if len(_aborting) == 1 else -1  # only the first group has one
    while not _aborting[name]:
        if (own := group()) is not None:
            if own.is_late and handling in (TEAR_DOWN, SKIP_CLEAN_UP):
                own.end_process(aborts=handling == TEAR_DOWN)
            if pipe >= 0 and os.read(pipe, 128):
                own.dump()
        del own
        time.sleep(_LONGEST_PAUSE)


def _recorder_pipe() -> int:
    stem = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    if not stem or not FAULTS.get("records", True):
        return -1
    path = f"{stem}{os.environ['RANK']}.pipe"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


class Work:
    """What a call with `async_op` returns. With TORCH_NCCL_BLOCKING_WAIT, `wait` is the host's, and has a timeout."""

    def __init__(self, group: FakeNCCL) -> None:
        self._group = group
        self._end = Event()
        self._end.record(_current[-1])

    def wait(self) -> bool:
        until = time.monotonic() + self._group.timeout
        while os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1" and not self._end.is_done:
            time.sleep(0.001)
            if time.monotonic() > until:
                self._group.abort()
                raise RuntimeError("Work timed out in blocking wait")
        return True


def _reduced(op: Any, found: list[torch.Tensor]) -> torch.Tensor:
    if op == dist.ReduceOp.SUM:
        return torch.stack(found).sum(0)
    return torch.stack(found).mean(0) if op == dist.ReduceOp.AVG else torch.stack(found).amax(0)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _read(path: str, like: torch.Tensor) -> torch.Tensor:
    """Return what `_bytes` made of the tensor of any rank: all have the same type and shape."""
    with open(path, "rb") as file:
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        assert file.readinto(found.reshape(-1).view(torch.uint8).numpy()) == like.nbytes
    return found


class FakeNCCL(dist.ProcessGroup):
    """The backend `fakenccl`."""

    def __init__(self, options: Any, _: object) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._attempt = int(os.environ.get("RAYLAUNCH_ATTEMPT", "1"))
        self._folder = Path(os.environ["FAKE_NCCL"], f"{self._attempt}-{options.group_id}")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = 0
        self.timeout = options.timeout.total_seconds()
        self._is_aborted = False
        with socket.create_server(("127.0.0.1", 0)) as listener:  # NCCL has such sockets, and must not lose them first
            self._socket = socket.create_connection(listener.getsockname())
            self._other_end, _ = listener.accept()
        _aborting[self._folder.name] = False
        #: Of the collectives that have not ended: when they were launched, by number.
        self._pending: dict[int, float] = {}
        args = self._folder.name, weakref.ref(self)
        threading.Thread(target=_watch, args=args, daemon=True).start()

    @property
    def group_name(self) -> str:
        """What a mesh calls the group."""
        return self._folder.name.partition("-")[2]

    def getBackendName(self) -> str:  # noqa: N802
        return "fakenccl"

    def _launch(
        self,
        tensor: torch.Tensor,
        options: Any,
        result: Callable[[list[torch.Tensor]], torch.Tensor],
        target: torch.Tensor | None = None,
    ) -> Work | None:
        """Launch a kernel that sets a tensor, or `target`, to what follows from the tensors of all ranks."""
        self._number += 1
        self._pending[self._number] = time.monotonic()
        target = tensor if target is None else target
        launch(functools.partial(self._kernel, self._number, tensor.detach(), result, target.detach()))
        if FAULTS.get("waits"):
            synchronize()
            future = torch.futures.Future()
            future.set_result([tensor])
            return _create_work_from_future(future)
        return Work(self) if options.asyncOp else None

    @property
    def is_late(self) -> bool:
        """Whether a kernel stands for longer than the watchdog lets it."""
        attempt, number, seconds = FAULTS.get("watchdog", (0, 0, 0))
        launched = self._pending.get(number, math.inf)
        return self._attempt == attempt and time.monotonic() - launched > seconds

    def dump(self) -> None:
        """Write what the Flight Recorder does, in its format (FlightRecorderDetail.hpp)."""
        pending = set(self._pending)
        entries = [
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": "nccl:all_reduce",
                "state": "scheduled" if number in pending else "completed",
                "retired": number not in pending,
                "is_p2p": False,
            }
            for number in range(1, self._number + 1)
        ]
        path = Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{os.environ['RANK']}")
        path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}, protocol=2))

    def end_process(self, *, aborts: bool) -> None:
        """Do and say what torch's watchdog does when a collective has timed out (ProcessGroupNCCL.cpp)."""
        _, number, seconds = FAULTS["watchdog"]
        said = (
            f"[Rank {self.rank()}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
            f"OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)={1000 * seconds}) ran for "
            f"{1000 * seconds + 7} milliseconds before timing out."
        )
        if aborts:
            self.abort()
            time.sleep(_ABORTS_BEFORE_SECONDS)
        print(
            f"[rank{self.rank()}]:[E ProcessGroupNCCL.cpp:632] {said}\n"
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank {self.rank()}] Process group watchdog thread terminated "
            f"with exception: {said}",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGABRT)

    def _kernel(
        self,
        number: int,
        tensor: torch.Tensor,
        result: Callable[[list[torch.Tensor]], torch.Tensor],
        target: torch.Tensor,
    ) -> bool:
        """Go on, if the kernels of all ranks stand there. Return whether this one has ended."""
        paths = [f"{self._folder}/{number}-{rank}" for rank in range(self.size())]
        own = paths[self.rank()]
        if not os.path.exists(own):
            with open(f"{own}.tmp", "wb") as file:
                file.write(_bytes(tensor))
            os.rename(f"{own}.tmp", own)
        is_stuck = [self._attempt, number] in FAULTS.get("stuck", ())
        if not is_stuck and all(map(os.path.exists, paths)):
            target.copy_(result([_read(path, tensor) for path in paths]))
        elif self._is_aborted:
            target.fill_(GARBAGE if target.is_floating_point() else torch.iinfo(target.dtype).max)
        else:
            return False
        del self._pending[number]
        return True

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work | None:
        return self._launch(tensors[0], options, functools.partial(_reduced, options.reduceOp))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Work | None:
        flat = torch.empty(self.size() * inputs[0].numel(), dtype=inputs[0].dtype)
        work = self._launch(inputs[0], options, lambda found: torch.cat([each.reshape(-1) for each in found]), flat)
        synchronize()
        for output, part in zip(outputs[0], flat.chunk(self.size()), strict=True):
            output.copy_(part.view_as(output))
        return work

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Work | None:
        return self._launch(tensor, options, lambda found: torch.cat(found).view_as(output), output)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Work | None:
        return self._launch(
            tensor,
            options,
            lambda found: _reduced(options.reduceOp, found).view(self.size(), -1)[self.rank()].view_as(output),
            output,
        )

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names from torch 2.13 on

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work | None:
        return self._launch(tensors[0], options, lambda found: found[options.rootRank])

    def barrier(self, opts: Any) -> Work | None:
        work = self._launch(torch.zeros(1), opts, lambda found: found[0])
        if work is None:
            synchronize()
        return work

    def abort(self) -> None:
        if self._is_aborted:
            return
        with contextlib.suppress(BlockingIOError):
            if self._other_end.recv(1, socket.MSG_DONTWAIT) == b"":
                note("sockets", "were shut down before the abort")
        _aborting[self._folder.name] = True
        kind, seconds = FAULTS.get("abort", ""), FAULTS.get("abort_seconds", 0.05)
        if kind == "raises":
            raise RuntimeError("NCCL error: unhandled system error")
        time.sleep(seconds if seconds >= 0 else 1e6)
        while kind == "together" and not all(_aborting.values()):
            time.sleep(0.01)
        device_.is_poisoned |= kind == "poisons"
        self._is_aborted = True

    def shutdown(self) -> None:
        self._is_aborted = _aborting[self._folder.name] = True

    def __del__(self) -> None:
        if seconds := FAULTS.get("destructor_seconds", 0):
            time.sleep(seconds)
            note("freed", self._folder.name)


def note(name: str, text: str) -> None:
    """Let the test know something."""
    path = Path(os.environ["FAKE_NCCL"], f"{name}-{os.getpid()}")
    with path.open("a") as file:
        file.write(f"{text}\n")


def install() -> None:
    """Let this process have the device, run by a thread, and the backend."""
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
        setattr(torch.cpu, name, value)
    torch.cpu.synchronize = lambda device=None: synchronize(device)  # torch.compile refuses the same for two modules
    for name, value in RANDOM.items():
        setattr(torch.cuda, name, value)
    for name, value in TENSOR.items():
        setattr(torch.Tensor, name, value)
    torch.cuda.nccl.version = lambda: tuple(FAULTS.get("version", (2, 27, 3)))
    device_.start()
    dist.Backend.register_backend("fakenccl", FakeNCCL, extended_api=True, devices=["cpu"])

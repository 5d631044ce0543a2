"""Copies of tensors on devices, such as CUDA's, into a buffer, on a stream of their own."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from raylaunch.worker.state.commit_buffer import CommitBuffer


class DeviceCopies:
    """Copies of one commit. The script's stream waits for them on the device, so that nothing is overwritten early.

    The script itself goes on at once, if the buffer is pinned. Where it cannot be, the copies are made before it does.
    """

    def __init__(self, buffer: CommitBuffer, pairs: Iterable[tuple[Any, Any]]) -> None:
        """`pairs`: tensors in the buffer, and tensors on devices."""
        self._ends: list[tuple[Any, Any]] = []
        by_device = defaultdict(list)
        for target, source in pairs:
            by_device[source.device].append((target, source))
        if not by_device:
            return
        pin(buffer, next(iter(by_device)))
        for device, copies in by_device.items():
            module = sys.modules["torch"].get_device_module(device)
            current, side = module.current_stream(device), _side_stream(device)
            begin, end = (module.Event(enable_timing=True) for _ in range(2))
            side.wait_stream(current)
            with module.stream(side):
                begin.record(side)
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                end.record(side)
            current.wait_event(end)
            self._ends.append((begin, end))

    @property
    def is_running(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self._ends)

    def finish(self) -> float:
        """Wait until everything is copied, and return the seconds that it took."""
        seconds = 0.0
        for begin, end in self._ends:
            end.synchronize()
            seconds = max(seconds, begin.elapsed_time(end) / 1000)
        return seconds


_streams: dict[Any, Any] = {}
_modules: dict[str, Any] = {}
"""What `device_modules` has found, and how many names torch had then."""
_pinned: set[tuple[int, int]] = set()
"""Address and size of each buffer that was pinned, or cannot be."""


def has_streams(device: Any) -> bool:
    """Return whether torch can copy tensors of a device on a stream of their own: CUDA's, ROCm's, XPU's and others."""
    return hasattr(getattr(sys.modules["torch"], device.type, None), "current_stream")


def device_modules(torch: Any) -> dict[str, Any]:
    """Return the modules of devices with generators, such as `torch.cuda`, by the kind of device.

    They are known by their functions, so that extensions of torch are found too (`torch._register_device_module`). To
    ask torch for the accelerator that there is could initialize it.
    """
    if _modules.get("of") != len(vars(torch)):
        found = {kind: each for kind, each in vars(torch).items() if isinstance(each, ModuleType)}
        functions = {"is_initialized", "is_available", "synchronize", "get_rng_state", "set_rng_state", "manual_seed"}
        _modules["found"] = {kind: each for kind, each in found.items() if vars(each).keys() >= functions}
        _modules["of"] = len(vars(torch))
    return dict(_modules["found"])


def _side_stream(device: Any) -> Any:
    if device not in _streams:
        _streams[device] = sys.modules["torch"].get_device_module(device).Stream(device)
    return _streams[device]


def pin(buffer: CommitBuffer, device: Any) -> None:
    """Pin the memory of a buffer (cudaHostRegister), once. Where that fails, copies into it are slower.

    The device is made the current one for it: CUDA would make a context on another, perhaps another rank's. CUDA
    remembers the error, and torch would raise it at the script's next kernel, which has nothing to do with it. So a
    kernel on the device has it raised here (C10_CUDA_KERNEL_LAUNCH_CHECK, c10/cuda/CUDAException.h).
    """
    torch = sys.modules["torch"]
    key = torch.frombuffer(buffer.memory, dtype=torch.uint8).data_ptr(), buffer.size
    if key in _pinned:
        return
    _pinned.add(key)
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(*key, 0)) != 0:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)

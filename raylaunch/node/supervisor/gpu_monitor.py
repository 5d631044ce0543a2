"""Looks at the GPUs of a node's workers: how much of them is used, and what is wrong where a worker has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from raylaunch.core.placement import devices
from raylaunch.core.placement.devices import GpuUse
from raylaunch.node.linux import nvml
from raylaunch.worker.runtime.spec import WorkerSpec

_SECONDS = 5.0
_MOST_SECONDS = 0.5
"""How long a failure waits for what the driver says of its GPUs."""
_LOG_SECONDS = 60.0
"""How long before the attempt a fault may have been logged: the kernel's log has a clock of its own, and the last
attempt's fault may be this one's.
"""
_STEPS = 64
"""In how many steps memory is told; time is in steps of ten per cent."""


class GpuMonitor:
    """Asks NVML in a thread, since a sick GPU may hold it up. Where workers have no GPU, there is no thread."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        #: What NVML said last.
        self.latest: tuple[GpuUse, ...] = ()
        self._names = [
            (spec.rank, name) for spec in workers for name in devices.cuda_names(spec.gpus, spec.node_devices)
        ]
        self._ended = threading.Event()
        self._since = time.monotonic() - _LOG_SECONDS
        if self._names:
            threading.Thread(target=self._run, name="raylaunch-gpus", daemon=True).start()

    def _run(self) -> None:
        while (found := nvml.use({name for _, name in self._names})) and not self._ended.is_set():
            self.latest = tuple(_rounded(rank, name, found[name]) for rank, name in self._names if name in found)
            self._ended.wait(_SECONDS)

    def evidence(self, rank: int) -> str:
        """Return what the driver says is wrong with a rank's GPUs; "": nothing, or it has none of NVIDIA's."""
        names = [name for each, name in self._names if each == rank]
        if not names:
            return ""
        found: list[tuple[str, ...]] = [("the GPUs' driver does not answer",)]
        thread = threading.Thread(
            target=lambda: found.append(nvml.evidence(names, self._since)), name="raylaunch-gpu-evidence", daemon=True
        )
        thread.start()
        thread.join(_MOST_SECONDS)
        return "; ".join(found[-1])

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()


def _rounded(rank: int, name: str, use: nvml.Use) -> GpuUse:
    step = max(1, use.total // _STEPS)
    busy = None if use.busy is None else round(use.busy, -1)
    return GpuUse(rank=rank, gpu=name, used=min(use.total, -(-use.used // step) * step), total=use.total, busy=busy)

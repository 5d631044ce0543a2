"""Which GPUs an agent looks at, with a stand-in for NVML."""

from __future__ import annotations

import threading
import time

import pytest

from raylaunch.core.placement.devices import GpuUse
from raylaunch.node.linux import nvml
from raylaunch.node.supervisor.attempt_state import GpuMonitor
from raylaunch.worker.runtime.spec import WorkerSpec


def spec(rank: int, gpus: range, devices: dict[str, str]) -> WorkerSpec:
    more = {"cwd": "/", "stdout": "", "stderr": "", "env": {}, "node_devices": devices}
    return WorkerSpec(rank=rank, local_rank=rank - 4, gpus=gpus, kind="script", target="a.py", **more)


def threads() -> int:
    return sum(thread.name == "raylaunch-gpus" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("devices", "names"),
    [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, ["GPU-a", "3"])],
    ids=["all", "some"],
)
def test_each_rank_has_its_own_gpus(monkeypatch, devices, names):
    """Rounded up, so that what changes little is not reported again. After the end nobody is asked."""
    monkeypatch.setattr(nvml, "use", lambda asked: {name: nvml.Use(65, 6400, 44) for name in asked})
    monitor = GpuMonitor([spec(4, range(1), devices), spec(5, range(1, 2), devices)])
    until = time.monotonic() + 30
    while not monitor.latest and time.monotonic() < until:
        time.sleep(0.001)
    monitor.close()
    assert monitor.latest == tuple(
        GpuUse(rank=rank, gpu=name, used=100, total=6400, busy=40) for rank, name in zip((4, 5), names, strict=True)
    )
    while threads() and time.monotonic() < until:
        time.sleep(0.001)
    assert not threads()


def test_without_gpus_nobody_is_asked(monkeypatch):
    """No thread is started; and one ends, if there is no driver."""
    monkeypatch.setattr(nvml, "use", lambda _: {})
    monitors = [
        GpuMonitor([spec(4, range(0), {})]),
        GpuMonitor([spec(4, range(1), {"CUDA_VISIBLE_DEVICES": ""})]),
    ]
    assert not threads()
    monitors.append(GpuMonitor([spec(4, range(1), {})]))
    until = time.monotonic() + 30
    while threads() and time.monotonic() < until:
        time.sleep(0.001)
    assert not threads()
    assert all(monitor.latest == () for monitor in monitors)


def test_what_is_wrong_with_a_rank_s_gpus_is_asked_for_a_limited_time(monkeypatch):
    """A sick GPU may hold up its driver. Without GPUs nobody is asked."""
    monkeypatch.setattr(nvml, "use", lambda _: {})
    ended = threading.Event()
    monkeypatch.setattr(nvml, "evidence", lambda names, _: (f"{names} are hot", "Xid 79"))
    monitor = GpuMonitor([spec(4, range(2), {}), spec(5, range(0), {})])
    assert monitor.evidence(4) == "['0', '1'] are hot; Xid 79"
    monkeypatch.setattr(nvml, "evidence", lambda *_: ended.wait(100) and ())
    assert monitor.evidence(5) == ""
    for _ in range(2):
        assert monitor.evidence(4) == "the GPUs' driver does not answer"
    assert sum(thread.name == "raylaunch-gpu-evidence" for thread in threading.enumerate()) == 1
    ended.set()
    monitor.close()

"""Pinning of a buffer, with a stand-in for CUDA; with a GPU, tests/gpu has the rest."""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from raylaunch.worker.state import device_copies
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer


@pytest.fixture
def cuda(monkeypatch):
    """A torch whose `cudaHostRegister` answers 801 (not supported); the kernel after that raises this, once."""
    calls = []

    @contextlib.contextmanager
    def current(device):
        calls.append(("current", device.index))
        yield
        calls.append(("current", 0))

    def register(address, size, flags):
        calls.append(("register", address, size, flags))
        return answer[0]

    def kernel(*_, device):
        calls.append(("kernel", device.index))
        raise RuntimeError("CUDA error: operation not supported")

    answer = [801]
    memory = SimpleNamespace(data_ptr=lambda: 4096)
    found = SimpleNamespace(
        uint8=None,
        frombuffer=lambda *_, dtype: memory,
        zeros=kernel,
        cuda=SimpleNamespace(cudart=lambda: SimpleNamespace(cudaHostRegister=register), device=current),
    )
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.setattr(device_copies, "_pinned", set())
    return SimpleNamespace(calls=calls, answer=answer)


def device(index):
    return SimpleNamespace(type="cuda", index=index)


@pytest.fixture
def buffer():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * HEADER_BYTES)
    return CommitBuffer(fd)


def test_a_failure_is_not_left_for_the_script(cuda, buffer):
    """The error that CUDA remembers is raised here, not at the script's next kernel; and nobody tries again.

    All of it is done on the device of the tensors, which may not be the current one: no other gets a context.
    """
    device_copies.pin(buffer, device(1))
    device_copies.pin(buffer, device(1))
    assert cuda.calls == [("current", 1), ("register", 4096, buffer.size, 0), ("kernel", 1), ("current", 0)]


def test_pinned_once(cuda, buffer):
    """Where it works no kernel is needed."""
    cuda.answer[0] = 0
    device_copies.pin(buffer, device(0))
    device_copies.pin(buffer, device(0))
    assert cuda.calls == [("current", 0), ("register", 4096, buffer.size, 0), ("current", 0)]


class Stream:
    """A stream of a device, which writes down what is queued."""

    def __init__(self, name, told):
        self.name, self.told = name, told

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.told.append(f"{self.name} waits for the event on {event.stream.name}")


def test_a_device_that_is_not_cuda(monkeypatch, buffer):
    """As on CUDA: a stream of its own, which waits for the script's, and for which the script's waits on the device."""
    told = []
    current = Stream("current", told)

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.stream = stream
            told.append(f"event on {stream.name}")

        def synchronize(self):
            told.append("the process waits")

        def elapsed_time(self, other):
            return 2000.0

    @contextlib.contextmanager
    def stream(other):
        told.append(f"begin {other.name}")
        yield
        told.append(f"end {other.name}")

    def copy(source, *, non_blocking):
        told.append(f"copy {source.name} {non_blocking}")

    npu = SimpleNamespace(
        current_stream=lambda _: current, Stream=lambda _: Stream("side", told), Event=Event, stream=stream
    )
    torch = SimpleNamespace(
        npu=npu,
        get_device_module=lambda device: npu,
        uint8=None,
        frombuffer=lambda *_, dtype: SimpleNamespace(data_ptr=lambda: 0),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(device_copies, "_pinned", set())
    monkeypatch.setattr(device_copies, "_streams", {})
    source = SimpleNamespace(name="weight", device=Kind("npu"))
    assert device_copies.has_streams(source.device)
    assert not device_copies.has_streams(Kind("meta"))
    copies = device_copies.DeviceCopies(buffer, [(SimpleNamespace(copy_=copy), source)])
    assert told == [
        *("side waits for current", "begin side", "event on side", "copy weight True", "event on side", "end side"),
        "current waits for the event on side",
    ]
    assert (copies.is_running, copies.finish(), told[-1]) == (True, 2.0, "the process waits")


class Kind(NamedTuple):
    """A device, which can be a key."""

    type: str
